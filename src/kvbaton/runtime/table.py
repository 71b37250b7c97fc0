"""The rooms of one side by number, shared by the engine's threads and the control thread."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from kvbaton.errors import RoomError
from kvbaton.observe.base import ObservedRoom
from kvbaton.runtime.rooms import Room


class RoomEntry(Protocol):
    """What a side keeps of a room besides the core's own state."""

    @property
    def room(self) -> Room:
        """What the engine holds."""

    @property
    def record(self) -> ObservedRoom:
        """What observers are told of it."""

    @property
    def opened(self) -> bool:
        """Whether the core knows the room."""


Entry = TypeVar("Entry", bound=RoomEntry)


class RoomTable(Generic[Entry]):
    """A number stays in use until its room is both closed and released. Hold `lock` for what is marked so."""

    def __init__(self, side: str, noun: str) -> None:
        self._side = side
        self._noun = noun
        self._entries: dict[int, Entry] = {}
        self._shut = False
        self.lock = threading.Lock()
        """Also for posting what must reach the control thread in the order of the table's changes."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, number: int) -> Entry | None:
        """The room of this number, if it is in use."""
        return self._entries.get(number)

    def shut(self) -> None:
        """Let no room enter any more."""
        with self.lock:
            self._shut = True

    def quiet(self) -> bool:
        """Whether the rows of every room are released."""
        return all(entry.room.rows_released for entry in self.entries())

    def entries(self) -> list[Entry]:
        """All rooms."""
        with self.lock:
            return list(self._entries.values())

    def held_by(self, room: Room) -> Entry | None:
        """The entry of what the engine holds, unless that was closed. Under the lock."""
        entry = self._entries.get(room.room)
        return entry if entry is not None and entry.room is room and not room.closed else None

    def open_by(self, room: Room) -> Entry:
        """As `held_by`, but raises `RoomError` for one that was closed. Under the lock."""
        entry = self.held_by(room)
        if entry is None:
            raise RoomError(f"{self._side}: room {room.room} was closed; ask the manager for a new {self._noun}")
        return entry

    def add(self, entry: Entry) -> None:
        """Enter a room. Raises `RoomError` if its number is in use. Under the lock."""
        number = entry.room.room
        if self._shut:
            raise RoomError(f"{self._side}: room {number}: the manager is closed")
        if number in self._entries:
            raise RoomError(
                f"{self._side}: room {number} is in use ({self._entries[number].room.poll().value}); close its "
                f"{self._noun} first, and wait until its rows are released"
            )
        self._entries[number] = entry

    def remove_if_over(self, entry: Entry) -> None:
        """Free the number of a room that is closed and released. Under the lock.

        Called at each of these events; whichever comes last frees it.
        """
        room = entry.room
        if room.closed and room.rows_released and self._entries.get(room.room) is entry:
            del self._entries[room.room]
