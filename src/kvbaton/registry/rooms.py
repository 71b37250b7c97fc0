"""Which rank announced which room: a pure table, whose callers have checked who speaks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvbaton.registry.base import RegistryRefused

MAX_ROOM = (1 << 63) - 1
ENDED_SECONDS = 4.0
"""How long it is known who gave a room up; shorter than ranks remember why (`Deadlines.recent_seconds`)."""
MAX_ENDED = 1 << 14


class AnnouncedRooms:
    """Rooms by deployment, each of one instance. At most ``limit`` of them, and ``batch`` in one call."""

    def __init__(self, limit: int, batch: int) -> None:
        self._limit = limit
        self._batch = batch
        self._holders: dict[tuple[str, int], str] = {}
        self._rooms_of: dict[str, set[int]] = {}
        self._ended: OrderedDict[tuple[str, int], tuple[str, float]] = OrderedDict()
        """Who gave a room up, and until when that is remembered; the oldest first."""

    def __len__(self) -> int:
        return len(self._holders)

    def check(self, *batches: Collection[int]) -> None:
        """Raise `RegistryRefused` for numbers that are no rooms, and for too many of them."""
        count = sum(map(len, batches))
        if count > self._batch:
            raise RegistryRefused(f"{count} rooms in one request; at most {self._batch} fit, send more requests")
        for rooms in batches:
            for room in rooms:
                if not 0 <= room <= MAX_ROOM:
                    raise RegistryRefused(f"room {room} is not within 0..{MAX_ROOM}")

    def close(self, deployment: str, instance: str, rooms: Iterable[int]) -> None:
        """Forget those of the rooms that ``instance`` holds."""
        held = self._rooms_of.get(instance, set())
        for room in held.intersection(rooms):
            held.discard(room)
            del self._holders[deployment, room]
        if not held:
            self._rooms_of.pop(instance, None)

    def end(self, deployment: str, instance: str, rooms: Iterable[int], now: float) -> None:
        """`close` them, but remember for `ENDED_SECONDS` who gave them up; for the latest `MAX_ENDED` of them."""
        rooms = list(rooms)
        self.close(deployment, instance, rooms)
        while self._ended and (len(self._ended) > MAX_ENDED - len(rooms) or next(iter(self._ended.values()))[1] <= now):
            self._ended.popitem(last=False)
        for room in rooms:
            self._ended[deployment, room] = (instance, now + ENDED_SECONDS)
            self._ended.move_to_end((deployment, room))

    def open(self, deployment: str, instance: str, rooms: Iterable[int]) -> dict[int, str]:
        """Enter rooms; returns those that another instance holds, with its id.

        Raises `RegistryRefused`, and enters none, if there would be too many.
        """
        free = {room for room in rooms if (deployment, room) not in self._holders}
        if len(self._holders) + len(free) > self._limit:
            raise RegistryRefused(
                f"the registry is full: it holds {len(self._holders)} rooms, {len(free)} more would be over the limit "
                f"of {self._limit}: close rooms that have ended"
            )
        if free:
            self._rooms_of.setdefault(instance, set()).update(free)
            self._holders.update(((deployment, room), instance) for room in free)
            for room in free:
                self._ended.pop((deployment, room), None)
        holders = {room: self._holders[deployment, room] for room in rooms}
        return {room: holder for room, holder in holders.items() if holder != instance}

    def find(self, deployment: str, rooms: Iterable[int], now: float) -> dict[int, str]:
        """The instance that holds each of the rooms, or has given it up; one that nobody holds is absent."""
        found = {room: self._holder(deployment, room, now) for room in rooms}
        return {room: holder for room, holder in found.items() if holder is not None}

    def _holder(self, deployment: str, room: int, now: float) -> str | None:
        holder = self._holders.get((deployment, room))
        if holder is not None:
            return holder
        instance, until = self._ended.get((deployment, room), (None, 0.0))
        return instance if now < until else None

    def forget(self, deployment: str, instance: str) -> None:
        """Forget all rooms of an instance."""
        for room in self._rooms_of.pop(instance, ()):
            del self._holders[deployment, room]
        for ended in [ended for ended, (holder, _) in self._ended.items() if holder == instance]:
            del self._ended[ended]
