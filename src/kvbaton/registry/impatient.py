"""HTTP connections that may not be idle for long: whoever connects must soon ask something, and ask it whole.

uvicorn waits for ever for the first request of a connection. Each holds a descriptor, so that strangers who only
connect would in time keep everybody out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
"""How long a connection may take until a request has begun: its head has come, or the one before has not ended."""
QUIET_SECONDS = 60.0
"""How long nothing is logged after a line about descriptors."""


class ImpatientProtocol(H11Protocol):
    """Closes a connection that has no request under way for `REQUEST_SECONDS`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        self._seen: Any = None
        self._look = self.loop.call_later(REQUEST_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._look.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        under_way = self.cycle is not None and not self.cycle.response_complete
        if not under_way and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._look = self.loop.call_later(REQUEST_SECONDS, self._close_if_idle)


class PatientServer(uvicorn.Server):
    """A server that says once in a while, not every second, that there are no descriptors for a connection."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        asyncio.get_running_loop().set_exception_handler(_report)
        await super().startup(sockets)


_next_warning = 0.0


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the loop; that there are no descriptors, which comes every second then, once in a while."""
    global _next_warning
    if "out of system resource" not in str(context.get("message")):
        loop.default_exception_handler(context)
    elif time.monotonic() >= _next_warning:
        _next_warning = time.monotonic() + QUIET_SECONDS
        logger.warning(
            "http: no connection can be taken: %s; raise the limit of open files (ulimit -n)", context.get("exception")
        )
