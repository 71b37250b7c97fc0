"""Runs an app in the foreground until a signal, and drains it then."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

from kvbaton.errors import ConfigurationError
from kvbaton.registry import server as _registry_server  # noqa: F401 - says which extra is missing, if one is
from kvbaton.serve.generation import Service

import uvicorn  # isort: skip
from kvbaton.registry.impatient import ImpatientProtocol, PatientServer  # isort: skip
from fastapi import FastAPI  # isort: skip

PARENT_VARIABLE = "KVBATON_PARENT"
"""Set by `kvbaton.serve.processes` to its process id: a server whose parent died stops by itself."""

_log = logging.getLogger("kvbaton.serve")


class DrainingServer(PatientServer):
    """A uvicorn server that stops in three steps.

    At the signal new requests are refused (and ``/health`` fails, so that routers look elsewhere); what runs has
    ``drain_seconds`` to finish; what still runs then is answered with an error, so that no client waits.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at SIGTERM and SIGINT, and let the caller go on after it.

        uvicorn's own way raises the signal once more at the end, and would end the process before the engine is closed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal does not wait."""
        self._service.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, for a bounded time."""
        self._service.draining = True
        limit = asyncio.create_task(self._fail_late())
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    async def _fail_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        if self._service.running:
            _log.warning("%d requests did not end in %g s: failing them", self._service.running, self._drain_seconds)
        self._service.fail_all(f"the server is shutting down, and the request did not end in {self._drain_seconds:g} s")


def bind(host: str, port: int) -> socket.socket:
    """Take an address, without answering there yet. Raises `ConfigurationError` if it cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigurationError(f"cannot listen at {host} port {port}: {error}; choose another port") from error
    return listener


def run_server(app: FastAPI, listener: socket.socket, drain_seconds: float = 10.0) -> None:
    """Serve an app that `kvbaton.serve.app.make_app` made, at an address from `bind`.

    Returns after SIGTERM or SIGINT, when all that ran has ended; that takes about ``drain_seconds`` at the most.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(drain_seconds) + 5,
        http=ImpatientProtocol,
    )
    DrainingServer(config, app.state.service, drain_seconds).run(sockets=[listener])


def stop_with_parent() -> None:
    """Stop this process by SIGTERM when the one that `PARENT_VARIABLE` names is gone; nothing where it names none."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdigit():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        _log.warning("the process that started this server is gone: stopping")
        while True:
            # Again and again: one that comes just before the server takes over the signals would be lost.
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
