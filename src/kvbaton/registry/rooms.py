"""Which rank announced which room: a pure table, whose callers have checked who speaks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvbaton.registry.base import RegistryRefused

MAX_ROOM = (1 << 63) - 1


class AnnouncedRooms:
    """Rooms by deployment, each of one instance. At most ``limit`` of them, and ``batch`` in one call."""

    def __init__(self, limit: int, batch: int) -> None:
        self._limit = limit
        self._batch = batch
        self._holders: dict[tuple[str, int], str] = {}
        self._rooms_of: dict[str, set[int]] = {}

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
        holders = {room: self._holders[deployment, room] for room in rooms}
        return {room: holder for room, holder in holders.items() if holder != instance}

    def find(self, deployment: str, rooms: Iterable[int]) -> dict[int, str]:
        """The instance that holds each of the rooms; one that nobody holds is absent."""
        found = {room: self._holders.get((deployment, room)) for room in rooms}
        return {room: holder for room, holder in found.items() if holder is not None}

    def forget(self, deployment: str, instance: str) -> None:
        """Forget all rooms of an instance."""
        for room in self._rooms_of.pop(instance, ()):
            del self._holders[deployment, room]
