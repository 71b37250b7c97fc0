"""What both cores share: the table of rooms, the questions about them, and the count of what did not fit."""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

from kvbaton.protocol.actions import Action
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.status import Status
from kvbaton.protocol.timers import Timers


class RoomState(Protocol):
    """What `Core` must know of a room."""

    status: Status
    failure: Failure | None
    closed: bool
    released: bool


Room = TypeVar("Room", bound=RoomState)


class Core(Generic[Room]):
    """The rooms of one rank, by number. A room stays here after `close` until its rows are released."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._rooms: dict[int, Room] = {}
        self._timers: Timers[Room] = Timers()
        self.unexpected: Counter[str] = Counter()
        """Messages and events that did not fit, by kind."""

    def status(self, room: int) -> Status:
        """The status of a room; FAILED for one that is not open."""
        state = self._rooms.get(room)
        return Status.FAILED if state is None or state.closed else state.status

    def reason(self, room: int) -> str:
        """Why the room failed; empty if it did not."""
        state = self._rooms.get(room)
        if state is None or state.closed:
            return f"room {room} is not open"
        return state.failure.reason if state.failure else ""

    def rows_released(self, room: int) -> bool:
        """Whether no transfer touches the room's rows any more; True for a number that is free."""
        state = self._rooms.get(room)
        return state is None or state.released

    def _ignore(self, kind: str) -> list[Action]:
        self.unexpected[kind] += 1
        return []
