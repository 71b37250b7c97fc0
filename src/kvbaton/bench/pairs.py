"""Starts the two processes of a contender, and runs them; see `kvbaton.bench.contenders`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvbaton.errors import KVBatonError

FOLDER = Path(__file__).with_name("contenders")
CONTENDERS_PYTHON = Path("build/contenders/venv/bin/python")
"""The Python that has the vendors' libraries; ``make bench`` makes it, ``KVBATON_CONTENDERS`` names another."""
ANSWER_SECONDS = 300.0

# The scripts run as a package of their own, so that a vendor's Python needs nothing of kvbaton.
# A resting process, stopped by a signal, would outlive a parent that is killed: the kernel ends it (PR_SET_PDEATHSIG).
_START = """
import ctypes, runpy, sys, types
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
package = types.ModuleType("contenders")
package.__path__ = [sys.argv[1]]
sys.modules["contenders"] = package
module = sys.argv[2]
del sys.argv[1:3]
runpy.run_module("contenders." + module, run_name="__main__")
"""


class ContenderFailed(KVBatonError):
    """A process of a contender answered with an error, ended or fell silent."""


@dataclass(frozen=True)
class Contender:
    """Who takes part: a script of `kvbaton.bench.contenders`, its arguments, and what it runs in.

    ``needs`` is a module that the vendors' Python must have; empty for what runs in kvbaton's own. With ``own``, it is
    kvbaton's own Python that must have it.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    needs: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    own: bool = False

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        return contenders_python() if self.needs and not self.own else Path(sys.executable)

    def missing(self) -> str:
        """Why it cannot take part here; empty if it can."""
        if not self.needs:
            return ""
        if not self.python.exists():
            return f"{self.python} is missing: scripts/contenders.sh makes it"
        tried = subprocess.run(
            [str(self.python), "-c", f"import {self.needs}"], capture_output=True, text=True, timeout=120, check=False
        )
        if not tried.returncode:
            return ""
        last = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        hint = "; make setup-fabrics installs it" if self.own else ""
        return f"{self.python} cannot import {self.needs}: {last}{hint}"


class Timing(NamedTuple):
    """One run: seconds from the source's start until the bytes were there, and processor seconds of each side."""

    seconds: float
    source_processor: float
    destination_processor: float
    returned: float | None
    """Seconds until the call gave the caller's thread back, where the contender says so."""


class Process:
    """One side, with a pipe in each direction."""

    def __init__(self, contender: Contender, role: str) -> None:
        self.name = f"{contender.name}, {role}"
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            [str(contender.python), "-c", _START, str(FOLDER), contender.module, *contender.arguments, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **contender.environment},
        )

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a command. Raises `ContenderFailed` if the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(f"{do} could not be sent: {error}") from error

    def answer(self) -> Any:
        """The answer to the oldest command that has none yet. Raises `ContenderFailed`."""
        assert self._process.stdout is not None
        # One answer at a time is under way, and it is one line: nothing is left in Python's buffer.
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise self._failed("the process ended" if ready else f"no answer in {ANSWER_SECONDS:g} s")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer["ok"]

    def call(self, do: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        self.ask(do, **arguments)
        return self.answer()

    def pause(self, paused: bool) -> None:
        """Stop the process, or let it go on."""
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _failed(self, reason: str) -> ContenderFailed:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = f"; it said: {' | '.join(lines[-3:])}" if lines and "Error" not in reason else ""
        return ContenderFailed(f"{self.name}: {reason}{said}")


class Pair:
    """Both sides of a contender, connected. Close it, or use it in a ``with``."""

    def __init__(self, contender: Contender, work: Mapping[str, Any]) -> None:
        self.contender = contender
        self.destination = Process(contender, "destination")
        self.source = Process(contender, "source")
        try:
            for process in (self.destination, self.source):
                process.ask("prepare", work=dict(work))
            to_source, to_destination = self.destination.answer(), self.source.answer()
            self.source.ask("meet", card=to_source)
            self.destination.ask("meet", card=to_destination)
            self.source.answer()
            self.destination.answer()
            self.expected = self.source.call("checksum")
        except BaseException:
            self.close()
            raise

    def run(self, check: bool = True) -> Timing:
        """Move everything once. Raises `ContenderFailed`, also if the destination has other bytes than the source."""
        self.destination.call("arm")
        before = [process.call("processor_seconds") for process in (self.source, self.destination)]
        self.source.ask("run")
        self.destination.ask("arrived")
        times, seen = self.source.answer(), self.destination.answer()
        after = [process.call("processor_seconds") for process in (self.source, self.destination)]
        if check and (found := self.destination.call("checksum")) != self.expected:
            raise ContenderFailed(f"{self.contender.name}: checksum {found} at the destination, not {self.expected}")
        started, returned = times["started"], times.get("returned")
        return Timing(
            (times["ended"] if seen is None else seen) - started,
            after[0] - before[0],
            after[1] - before[1],
            None if returned is None else returned - started,
        )

    def rest(self, resting: bool = True) -> None:
        """Stop both processes, or let them go on: one that polls when idle takes no core from the others then.

        kvbaton's own are left alone: they sleep, and a peer that stands still counts as lost.
        """
        if self.contender.needs:
            for process in (self.source, self.destination):
                process.pause(resting)

    def run_alone(self) -> Timing:
        """`run`, between two rests."""
        self.rest(False)
        timing = self.run()
        self.rest()
        return timing

    def close(self) -> None:
        """End both processes."""
        self.rest(False)
        self.source.close()
        self.destination.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def contenders_python() -> Path:
    """The Python that has the vendors' libraries, whether or not it is there."""
    return Path(os.environ.get("KVBATON_CONTENDERS", CONTENDERS_PYTHON)).absolute()
