"""Tells SGLang's objects of a room what becomes of it: SGLang reads the state of a room out of a table of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from kvbaton.errors import TransferFailed
from kvbaton.observe.base import ObservedRoom, Observer
from kvbaton.protocol import Status


class Listener(Protocol):
    """A sender or a receiver of SGLang. Called on the control thread; must return at once."""

    def room_offered(self) -> None:
        """The decode side has said where the data belong."""

    def room_ended(self, status: Status, reason: str, error: type[TransferFailed] | None) -> None:
        """The room succeeded or failed."""


class RoomWatch(Observer):
    """Leads what happens to a room to the object that opened it, and to no later one with the same number."""

    def __init__(self) -> None:
        self._opening = threading.local()
        self._listeners: dict[ObservedRoom, Listener] = {}

    @contextlib.contextmanager
    def opening(self, listener: Listener) -> Iterator[None]:
        """Rooms that this thread opens inside belong to ``listener``."""
        self._opening.listener = listener
        try:
            yield
        finally:
            self._opening.listener = None

    def room_opened(self, room: ObservedRoom) -> None:
        """See `Observer.room_opened`."""
        listener = getattr(self._opening, "listener", None)
        if listener is not None:
            self._listeners[room] = listener

    def room_offered(self, room: ObservedRoom) -> None:
        """See `Observer.room_offered`."""
        listener = self._listeners.get(room)
        if listener is not None:
            listener.room_offered()

    def room_ended(self, room: ObservedRoom) -> None:
        """See `Observer.room_ended`."""
        listener = self._listeners.pop(room, None)
        if listener is not None:
            listener.room_ended(room.status, room.reason, room.error)
