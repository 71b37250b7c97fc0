"""A registry inside one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from kvbaton.registry.base import FoundRooms, Registration, RegistryClient, Topology
from kvbaton.registry.table import RegistryTable


class MemoryRegistry(RegistryClient):
    """A registry inside this process, for tests, examples and single-process runs; thread-safe."""

    def __init__(self, ttl: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = RegistryTable(ttl)
        self._clock = clock
        self._lock = threading.Condition()
        self._newest_ask: dict[str, object] = {}
        """By asker, while it waits."""

    def register(self, registration: Registration) -> None:
        """See `RegistryClient.register`."""
        with self._lock:
            self._table.register(registration, self._clock())

    def heartbeat(self, instance: str) -> bool:
        """See `RegistryClient.heartbeat`."""
        with self._lock:
            return self._table.heartbeat(instance, self._clock())

    def remove(self, instance: str) -> None:
        """See `RegistryClient.remove`."""
        with self._lock:
            self._table.remove(instance, self._clock())

    def topology(self, deployment: str = "default", dp_rank: int | None = None) -> Topology:
        """See `RegistryClient.topology`."""
        with self._lock:
            return self._table.topology(deployment, self._clock(), dp_rank)

    def announce_rooms(
        self, instance: str, opened: Collection[int], closed: Collection[int], ended: Collection[int] = ()
    ) -> dict[int, int]:
        """See `RegistryClient.announce_rooms`."""
        with self._lock:
            held = self._table.announce_rooms(instance, opened, closed, self._clock(), ended)
            self._lock.notify_all()
            return held

    def find_rooms(
        self, deployment: str, rooms: Collection[int], wait_seconds: float = 0.0, asker: str = ""
    ) -> FoundRooms:
        """See `RegistryClient.find_rooms`."""
        ask = object()
        with self._lock:
            self._newest_ask[asker] = ask
            self._lock.notify_all()

            def answered() -> bool:
                replaced = bool(asker) and self._newest_ask.get(asker) is not ask
                return replaced or bool(self._table.find_rooms(deployment, rooms, self._clock()).rooms)

            try:
                self._lock.wait_for(answered, wait_seconds)
                return self._table.find_rooms(deployment, rooms, self._clock())
            finally:
                if self._newest_ask.get(asker) is ask:
                    del self._newest_ask[asker]
