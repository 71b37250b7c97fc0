"""The listening socket behind a ROUTER: one of our own, so that it can be shut for a while.

When the process is out of descriptors, ZeroMQ tries to accept the same connection again and again, at the full speed of
a core. Shut means that ZeroMQ does not look at the socket any more; connections wait in its queue until it is open.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import zmq

from kvbaton.address import Endpoint
from kvbaton.transport.dial import listen

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""How long it stays shut."""
QUIET_SECONDS = 60.0
"""How long nothing is logged after a line about it."""


class Door:
    """Lets ``router`` listen on a free port of ``host``. Raises `AddressError`, or ``zmq.ZMQError``."""

    def __init__(self, router: zmq.Socket[Any], host: str) -> None:
        self._router = router
        self._listener = listen(host, 0)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._where = Endpoint(host.strip("[]"), self.port).url
        self._bound = ""
        self._resume: float | None = None
        self._next_warning = 0.0
        try:
            self._open()
        except BaseException:
            self._listener.close()
            raise

    def shut(self, now: float) -> None:
        """A connection could not be accepted: let some time pass."""
        if not self._bound:
            return
        if now >= self._next_warning:
            self._next_warning = now + QUIET_SECONDS
            logger.warning(
                "control plane: no connection can be taken at %s: out of descriptors; raise the limit of open files "
                "(ulimit -n)",
                self._where,
            )
        with contextlib.suppress(zmq.ZMQError):
            self._router.unbind(self._bound)
        self._bound = ""
        self._resume = now + PAUSE_SECONDS

    def on_turn(self, now: float) -> None:
        """Open it again, if it is time to."""
        if self._resume is None or now < self._resume:
            return
        self._resume = now + PAUSE_SECONDS
        with contextlib.suppress(OSError, zmq.ZMQError):
            self._open()

    def close(self) -> None:
        """Stop listening; the ROUTER's own part of it ends with the ROUTER."""
        self._resume = None
        self._listener.close()

    def _open(self) -> None:
        descriptor = os.dup(self._listener.fileno())
        try:
            self._router.setsockopt(zmq.USE_FD, descriptor)
            self._router.bind(self._where)
        except BaseException:
            os.close(descriptor)
            raise
        self._bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._resume = None
