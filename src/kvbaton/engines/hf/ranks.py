"""The managers of all ranks that an engine has in its process, and the rooms of a request on all of them as one.

An engine does not see how many ranks it has: a room of the group has failed as soon as one of its ranks has, and has
succeeded when all have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvbaton.engines.hf.pools import RankRows
from kvbaton.errors import KVBatonError
from kvbaton.layout import Coords
from kvbaton.protocol import Status
from kvbaton.runtime import Manager
from kvbaton.runtime.later import Event
from kvbaton.runtime.rooms import Receiver, Sender

MOST_OPENED_AT_ONCE = 8


class GroupRoom:
    """One room on several ranks; ``coords`` name them in reasons, where there are several."""

    def __init__(self, rooms: Sequence[Any], coords: Sequence[Coords]) -> None:
        self.rooms: tuple[Any, ...] = tuple(rooms)
        self._coords = tuple(coords)

    def poll(self) -> Status:
        """Failed if any rank has failed; else the state of those that are behind."""
        states = [room.poll() for room in self.rooms]
        for state in (Status.FAILED, Status.WAITING, Status.TRANSFERRING):
            if state in states:
                return state
        return Status.SUCCESS

    @property
    def reason(self) -> str:
        """Why the first rank that failed did; its coords are named where there are several ranks."""
        for room, coords in zip(self.rooms, self._coords, strict=True):
            if room.poll() is Status.FAILED:
                return f"rank {coords}: {room.reason}" if len(self.rooms) > 1 else room.reason
        return ""

    @property
    def rows_released(self) -> bool:
        """Whether the rows of all ranks may be used again."""
        return all(room.rows_released for room in self.rooms)

    @property
    def seconds(self) -> float:
        """How long the slowest rank took, or has taken so far."""
        return float(max(room.seconds for room in self.rooms))

    @property
    def bytes_by_component(self) -> dict[str, int]:
        """Bytes moved by all ranks, by component."""
        total: dict[str, int] = {}
        for room in self.rooms:
            for name, nbytes in room.bytes_by_component.items():
                total[name] = total.get(name, 0) + nbytes
        return total

    def abort(self, reason: str) -> None:
        """Fail the room on every rank where it has not ended."""
        for room in self.rooms:
            room.abort(reason)

    def close(self) -> None:
        """Forget the room on every rank."""
        for room in self.rooms:
            room.close()


class GroupSender(GroupRoom):
    """The senders of one room."""

    rooms: tuple[Sender, ...]

    def send(self, rows: RankRows, tokens: tuple[int, int], after: Event | None = None) -> None:
        """Hand over a chunk: the rows of each rank that hold ``tokens``; see `Sender.send`."""
        for room, each in zip(self.rooms, rows, strict=True):
            if each:
                room.send(each, tokens, after)

    def finish(
        self, rows: RankRows, tokens: tuple[int, int], aux: Sequence[int | None], after: Event | None = None
    ) -> None:
        """Hand over what is left; see `Sender.finish`. ``aux`` is the aux slot of each rank that has an aux table."""
        for room, each, slot in zip(self.rooms, rows, aux, strict=True):
            room.finish(each, tokens, slot, after)


class GroupReceiver(GroupRoom):
    """The receivers of one room."""

    rooms: tuple[Receiver, ...]

    def offer(self, rows: RankRows, tokens: int, aux: Sequence[int | None]) -> None:
        """Say where the data shall go, on each rank; see `Receiver.offer`."""
        for room, each, slot in zip(self.rooms, rows, aux, strict=True):
            room.offer(each, tokens=tokens, aux=slot)


class RankGroup:
    """The managers of several ranks. ``make`` opens the one of a rank by its place in ``coords``.

    They are opened side by side; if one cannot be opened, the others are closed again and its error is raised.
    """

    def __init__(self, make: Callable[[int], Manager], coords: Sequence[Coords]) -> None:
        self._coords = tuple(coords)
        self.managers: list[Manager] = []
        with ThreadPoolExecutor(min(MOST_OPENED_AT_ONCE, len(self._coords))) as pool:
            opening = [pool.submit(make, index) for index in range(len(self._coords))]
        errors = [each.exception() for each in opening]
        self.managers = [each.result() for each in opening if each.exception() is None]
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            self.close()
            raise failed

    def sender(self, room: int) -> GroupSender:
        """The senders of a room. Raises `RoomError` if it is in use on any rank."""
        return GroupSender(self._on_each(lambda manager: manager.sender(room)), self._coords)

    def receiver(self, room: int, source: str | None = None) -> GroupReceiver:
        """The receivers of a room. Raises `RoomError` if it is in use on any rank."""
        return GroupReceiver(self._on_each(lambda manager: manager.receiver(room, source)), self._coords)

    def close(self) -> None:
        """Close all managers, side by side."""
        if self.managers:
            with ThreadPoolExecutor(len(self.managers)) as pool:
                list(pool.map(lambda manager: manager.close(), self.managers))

    def _on_each(self, open_room: Callable[[Manager], Any]) -> list[Any]:
        opened: list[Any] = []
        try:
            for manager in self.managers:
                opened.append(open_room(manager))  # noqa: PERF401
        except KVBatonError:
            for room in opened:
                room.close()
            raise
        return opened
