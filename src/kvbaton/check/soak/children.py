"""The processes of a soak: started, told, heard, struck, and looked at from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.check.soak.rank import RankOptions

SOURCE = Path(__file__).parents[3]


class Child:
    """One process; ``key`` is its place, which a successor takes over."""

    def __init__(self, key: str, command: list[str], log: Path) -> None:
        self.key = key
        self.ready = False
        self.stopped_at: float | None = None
        self.stopped_seconds = 0.0
        self.started = time.monotonic()
        # One arena: with one for each thread that ever was, the allocator keeps what none of them uses any more, and
        # that would hide what kvbaton itself keeps.
        special = {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        environment = {**os.environ, **special}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self._unread = b""

    @property
    def descriptor(self) -> int:
        """What becomes readable when it said something."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def hear(self) -> list[dict[str, Any]]:
        """What it said. Raises `EOFError` when it is gone."""
        received = os.read(self.descriptor, 1 << 16)
        if not received:
            self.process.wait()
            raise EOFError(f"{self.key} ended with {self.process.returncode}")
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def tell(self, do: str, **fields: Any) -> None:
        """Tell it something; one that is gone hears nothing."""
        assert self.process.stdin is not None
        # What is closed already was killed: a fault is undone that its process did not survive.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Let it stand still."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        if self.stopped_at is not None:
            self.stopped_seconds += time.monotonic() - self.stopped_at
            self.stopped_at = None
            self.process.send_signal(signal.SIGCONT)

    @property
    def still_seconds(self) -> float:
        """How long it stood still, up to now."""
        return self.stopped_seconds + (time.monotonic() - self.stopped_at if self.stopped_at else 0.0)

    def private_kibibytes(self) -> int:
        """Memory that is its own: what is shared with others does not count."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1])
        return 0

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._close()

    def end(self, seconds: float = 15.0) -> int | None:
        """Let it end by itself; its exit code, or None if it had to be killed."""
        self.go_on()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        code = self.process.poll()
        if code is None:
            self.process.kill()
            self.process.wait()
        self._close()
        return code

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def rank_child(key: str, options: RankOptions, log: Path) -> Child:
    """Start a rank."""
    said = msgspec.json.encode(options).decode()
    return Child(key, [sys.executable, "-m", "kvbaton.check.soak.rank", said], log)


def registry_child(port: int, log: Path) -> Child:
    """Start a registry; it answers some time later."""
    return Child("registry", [sys.executable, "-m", "kvbaton", "serve", "registry", "--port", str(port)], log)


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
