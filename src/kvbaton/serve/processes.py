"""Starts, watches and stops the processes of a prefill/decode deployment on this host."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvbaton.errors import KVBatonError
from kvbaton.serve.server import PARENT_VARIABLE

WorkerCommand = Callable[[str, int, int], Sequence[str]]
"""Makes the command line of a server from its role ("prefill" or "decode"), port and bootstrap port (0 for decode)."""

_TAIL_BYTES = 4000
_FIRST_PORT = 10240


class ProcessFailed(KVBatonError):
    """A process ended, or did not get ready; the message says which, how, and how its log ends."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Find ``count`` different ports at which nothing listens now.

    They are below those that the system gives to outgoing connections: a server may take its port much later.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.SystemRandom().sample(range(_FIRST_PORT, _first_outgoing_port()), 4096):
            if len(ports) == count:
                return ports
            candidate = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                candidate.bind((host, port))
                ports.append(port)
    raise ProcessFailed(f"no {count} free ports were found from {_FIRST_PORT} to {_first_outgoing_port()}")


def _first_outgoing_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first if first > _FIRST_PORT + 8192 else 32768


class ManagedProcess:
    """One child process in a session of its own, whose output goes to a log file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        self.command = tuple(command)
        self._asked_to_stop = False
        variables = dict(os.environ if environment is None else environment)
        variables[PARENT_VARIABLE] = str(os.getpid())
        variables["PYTHONUNBUFFERED"] = "1"
        with log.open("ab") as output:
            # A session of its own: Ctrl-C in the terminal reaches only us, and we stop the processes in order.
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> int | None:
        """Return its exit code (negative for a signal), or None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        return self._process.wait()

    def tail(self) -> str:
        """Return the end of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self.log.stat().st_size - _TAIL_BYTES, 0))
                return log.read().decode("utf-8", "replace").strip()
        except OSError as error:
            return f"(its log cannot be read: {error})"

    def check(self) -> None:
        """Raise `ProcessFailed` if it has ended."""
        code = self.ended()
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise ProcessFailed(f"{self.name} {how}; its log {self.log} ends with:\n{self.tail() or '(nothing)'}")

    def terminate(self) -> None:
        """Ask it to stop; asking again changes nothing."""
        if self.ended() is None and not self._asked_to_stop:
            self._asked_to_stop = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self, seconds: float = 20.0) -> int:
        """Ask it to stop, kill it and its children after ``seconds``, and return its exit code."""
        self.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait(10)


def http_get(url: str, timeout: float = 5.0) -> bytes | None:
    """Return the body of a 200 answer, or None for anything else; proxies of the environment are not used."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return bytes(answer.read(1 << 20))
    except (OSError, ValueError, urllib.error.URLError):
        return None


def wait_until(
    ready: Callable[[], bool],
    processes: Sequence[ManagedProcess],
    what: str,
    seconds: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until ``ready()`` or ``interrupted()``.

    Raises `ProcessFailed` at once if a process ends, or after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not interrupted() and not ready():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            logs = "\n".join(f"{each.name} ({each.log}): ... {each.tail()[-600:]}" for each in processes)
            raise ProcessFailed(f"{what} was not ready after {seconds:g} s\n{logs}")
        time.sleep(0.05)


class PDCluster:
    """Prefill servers, decode servers and the router over them, as child processes; a context manager.

    Entering it returns when the router has found every server. ``url`` is the router's; ``logs`` the folder of the
    log files (a new temporary one if none is given, removed again if nothing failed). ``command`` makes the command
    lines of the servers: the default runs ``kvbaton serve`` with ``model`` and the engines' options (JSON values):
    those of both roles, of prefill and of decode. ``router_options`` are flags of ``kvbaton serve router``. Raises
    `ProcessFailed` if one does not get ready.
    """

    def __init__(
        self,
        model: str = "",
        prefills: int = 1,
        decodes: int = 1,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        logs: Path | str | None = None,
        options: Mapping[str, Any] | None = None,
        prefill_options: Mapping[str, Any] | None = None,
        decode_options: Mapping[str, Any] | None = None,
        served_model_name: str = "",
        command: WorkerCommand | None = None,
        router_options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        ready_seconds: float = 300.0,
    ) -> None:
        ports = iter(free_ports(2 * prefills + decodes + 2))
        self.host = host
        self.port = port or next(ports)
        self.logs = Path(logs) if logs is not None else Path(tempfile.mkdtemp(prefix="kvbaton-logs-"))
        self._logs_are_ours = logs is None
        self._metrics_port = next(ports)
        self._prefill_ports = [(next(ports), next(ports)) for _ in range(prefills)]
        self._decode_ports = [next(ports) for _ in range(decodes)]
        by_role = {
            "prefill": {**(options or {}), **(prefill_options or {})},
            "decode": {**(options or {}), **(decode_options or {})},
        }
        self._command = command or _default_command(model, served_model_name, by_role)
        self._router_options = tuple(router_options)
        self._environment = environment
        self._ready_seconds = ready_seconds
        self.processes: list[ManagedProcess] = []

    @property
    def url(self) -> str:
        """Where the router answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def prefill_urls(self) -> list[str]:
        """Where the prefill servers answer."""
        return [f"http://127.0.0.1:{port}" for port, _ in self._prefill_ports]

    @property
    def registry_urls(self) -> list[str]:
        """Where the registries of the prefill servers answer."""
        return [f"http://127.0.0.1:{bootstrap}" for _, bootstrap in self._prefill_ports]

    @property
    def decode_urls(self) -> list[str]:
        """Where the decode servers answer."""
        return [f"http://127.0.0.1:{port}" for port in self._decode_ports]

    def start(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start everything and wait until it answers, or until ``interrupted()``.

        What was started is stopped again if something fails.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for index, (port, bootstrap_port) in enumerate(self._prefill_ports):
                self._start(f"prefill-{index}", self._command("prefill", port, bootstrap_port))
            for index, port in enumerate(self._decode_ports):
                self._start(f"decode-{index}", self._command("decode", port, 0))
            for url, process in zip([*self.prefill_urls, *self.decode_urls], list(self.processes), strict=True):
                self._wait(functools.partial(_answers, f"{url}/health"), process.name, interrupted)
            if not interrupted():
                self._start("router", self._router_command())
                servers = len(self.processes) - 1
                self._wait(lambda: _healthy_workers(self.url) == servers, "router", interrupted)
        except BaseException:
            self.stop()
            raise

    def process(self, name: str) -> ManagedProcess:
        """The process of this name: ``prefill-0``, ``decode-0``, ``router``."""
        return next(each for each in self.processes if each.name == name)

    def start_again(self, name: str) -> None:
        """Start a new process in place of one that ends, at the same ports; it gets ready some time later."""
        old = self.process(name)
        old.wait()
        new = ManagedProcess(name, old.command, old.log, self._environment)
        self.processes[self.processes.index(old)] = new

    def check(self) -> None:
        """Raise `ProcessFailed` for the first process that has ended."""
        for process in self.processes:
            process.check()

    def stop(self, seconds: float = 20.0) -> None:
        """Stop the router, then the servers: the former sends the latter nothing new while they drain."""
        processes, self.processes = self.processes, []
        routers = [each for each in processes if each.name == "router"]
        for router in routers:
            router.stop(seconds)
        for process in processes:
            process.terminate()
        for process in processes:
            process.stop(seconds)

    def _router_command(self) -> list[str]:
        servers: list[str] = []
        for url, (_, bootstrap_port) in zip(self.prefill_urls, self._prefill_ports, strict=True):
            servers += ["--prefill", f"{url},{bootstrap_port}"]
        for url in self.decode_urls:
            servers += ["--decode", url]
        serve = [sys.executable, "-m", "kvbaton", "serve", "router", "--host", self.host, "--port", str(self.port)]
        return [*serve, *servers, "--metrics-port", str(self._metrics_port), *self._router_options]

    def _wait(self, ready: Callable[[], bool], what: str, interrupted: Callable[[], bool]) -> None:
        wait_until(ready, self.processes, what, self._ready_seconds, interrupted)

    def _start(self, name: str, command: Sequence[str]) -> None:
        self.processes.append(ManagedProcess(name, command, self.logs / f"{name}.log", self._environment))

    def __enter__(self) -> PDCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._logs_are_ours and error is None:
            shutil.rmtree(self.logs, ignore_errors=True)


def _default_command(model: str, name: str, options: Mapping[str, Mapping[str, Any]]) -> WorkerCommand:
    def command(role: str, port: int, bootstrap_port: int) -> Sequence[str]:
        bootstrap = ("--bootstrap-port", str(bootstrap_port)) if role == "prefill" else ()
        serve = (sys.executable, "-m", "kvbaton", "serve", role, "--model", model, "--port", str(port))
        given = msgspec.json.encode(options[role]).decode()
        return [*serve, *bootstrap, "--served-model-name", name, "--options", given]

    return command


def _answers(url: str) -> bool:
    return http_get(url) is not None


def _healthy_workers(url: str) -> int:
    """How many servers the router at ``url`` has found; 0 while it does not answer."""
    body = http_get(f"{url}/readiness")
    try:
        return int(msgspec.json.decode(body or b"{}").get("healthy_workers", 0))
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
        return 0
