"""Tickets of a transport: each one is opened once, ends once, and is reported once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvbaton.errors import TransportError
from kvbaton.transport.base import Completion


class Tickets:
    """The outstanding tickets and those that ended since the last `drain`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding: set[int] = set()
        self._ended: list[Completion] = []
        self._wake: Callable[[], None] | None = None
        self._closed = False

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever `drain` begins to have something new; at once if it has already."""
        with self._lock:
            self._wake = wake
            waiting = bool(self._ended)
        if waiting:
            wake()

    def open(self, ticket: int) -> None:
        """Note a ticket as outstanding. Raises `TransportError` if it is already, or if the transport is closed."""
        with self._lock:
            if self._closed:
                raise TransportError("the transport is closed; nothing can be written any more")
            if ticket in self._outstanding:
                raise TransportError(f"ticket {ticket} is outstanding already; each write needs its own")
            self._outstanding.add(ticket)

    def end(self, ticket: int, error: str = "") -> None:
        """End a ticket, with an error or as success. A ticket that is not outstanding is left alone."""
        with self._lock:
            if ticket not in self._outstanding:
                return
            self._outstanding.discard(ticket)
            # Who was woken for one that still waits takes this one with it.
            wake = None if self._ended else self._wake
            self._ended.append(Completion(ticket, error))
        if wake is not None:
            wake()

    def withdraw(self, tickets: Iterable[int]) -> None:
        """Forget tickets that never began, or whose ends are reported by somebody else."""
        with self._lock:
            self._outstanding.difference_update(tickets)

    def drain(self) -> list[Completion]:
        """The tickets that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Refuse new tickets from now on."""
        with self._lock:
            self._closed = True

    @property
    def outstanding(self) -> int:
        """How many tickets have not ended yet."""
        with self._lock:
            return len(self._outstanding)
