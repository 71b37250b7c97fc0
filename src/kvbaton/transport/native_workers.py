"""Workers that are threads of the native kernel: they never want the interpreter's lock.

The engine's thread and the control thread keep that lock for themselves; a copy begins and ends beside them, and its
end wakes the control thread by a descriptor, without a thread of Python's in between. A forked child has no such
threads: its copy of a transport is of no use.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvbaton.copy.implementation import NATIVE, kernel
from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.base import Completion
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.workers import CHUNK, LEAST_CHUNK, MappedPeer, Workers

if TYPE_CHECKING:
    from kvbaton.copy._kernel import Pool

AVAILABLE = NATIVE and hasattr(kernel, "Pool") and hasattr(os, "eventfd")
"""Whether the native kernel is there, and has them."""

CLOSED = "the transport was closed before the write was over"

_open: set[NativeWorkers] = set()
"""Those that have copied: their threads must end before the interpreter takes the memory away that they copy."""


@atexit.register
def _close_all() -> None:
    for workers in list(_open):
        workers.close()


class NativeWorkers(Workers):
    """``count`` threads with names that begin with ``name``, started when there is something to do.

    Writes of up to ``at_once`` bytes are copied by `submit` itself.
    """

    def __init__(self, name: str, count: int, at_once: int) -> None:
        self._pool: Pool = kernel.Pool(count, name, CHUNK, LEAST_CHUNK)
        self._at_once = at_once
        self._tickets = Tickets()
        self._lock = threading.Lock()
        self._bridge: _Bridge | None = None
        self._closed = False

    def attach(self, peer: MappedPeer) -> None:
        """As `Workers.attach`."""
        peer.handle = self._pool.attach(peer.bases, peer.descriptor, f"the process of peer {peer.instance} has ended")

    def submit(self, peer: MappedPeer, transfers: Sequence[Transfer], ticket: int, bases: Int64s) -> None:
        """As `Workers.submit`."""
        self._tickets.open(ticket)
        if not transfers:
            self._tickets.end(ticket)
            return
        error = peer.enter() if peer.descriptor < 0 else ""
        if error:
            self._tickets.end(ticket, error)
            return
        _open.add(self)
        try:
            ended = self._pool.submit(peer.handle, ticket, transfers, bases, self._at_once)
        except ConnectionError:
            self._tickets.withdraw([ticket])
            raise TransportError(f"peer {peer.instance} is disconnected; connect again") from None
        except BaseException:
            self._tickets.withdraw([ticket])
            raise
        if ended is not None:
            self._tickets.end(ticket, ended)

    def drain(self) -> list[Completion]:
        """As `Workers.drain`."""
        ended = [Completion(*pair) for pair in self._pool.drain()]
        self._tickets.withdraw([completion.ticket for completion in ended])
        return ended + self._tickets.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Workers.set_waker`; one with a descriptor is woken by the copying threads themselves."""
        descriptor = getattr(wake, "descriptor", -1)
        with self._lock:
            if self._closed:
                return
            before, self._bridge = self._bridge, None
            if descriptor < 0:
                self._bridge = _Bridge(wake)
                descriptor = self._bridge.descriptor
            self._pool.wake_by(descriptor)
        self._tickets.set_waker(wake)
        if before is not None:
            before.close()

    def forget(self, peer: MappedPeer, reason: str) -> None:
        """As `Workers.forget`."""
        self._pool.forget(peer.handle, reason)

    def refuse(self) -> None:
        """As `Workers.refuse`."""
        self._tickets.close()

    def close(self) -> None:
        """As `Workers.close`."""
        self._pool.close(CLOSED)
        with self._lock:
            self._closed = True
            self._pool.wake_by(-1)
            bridge, self._bridge = self._bridge, None
        _open.discard(self)
        if bridge is not None:
            bridge.close()


class _Bridge:
    """Calls a waker that has no descriptor, from a thread of its own."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = wake
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-wake", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            os.eventfd_read(self.descriptor)
            self._wake()
            if self._closing:
                return

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self.descriptor, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self.descriptor)
