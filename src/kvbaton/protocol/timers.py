"""Deadlines of many rooms: the next one is found without looking at the others."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Timers(Generic[Key]):
    """At most one time for each key; a key is anything hashable."""

    def __init__(self) -> None:
        self._current: dict[Key, int] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: Key, when: float) -> None:
        """Let ``key`` be due at ``when``, instead of any time before."""
        number = next(self._numbers)
        self._current[key] = number
        heapq.heappush(self._heap, (when, number, key))
        self._compact()

    def cancel(self, key: Key) -> None:
        """Forget ``key``."""
        if self._current.pop(key, None) is not None:
            self._compact()

    def next(self) -> float | None:
        """The earliest time; None if there is none."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Key]:
        """Forget, and return, the keys whose time has come, earliest first."""
        keys = []
        while (when := self.next()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._current[key]
            keys.append(key)
        self._compact()
        return keys

    def _is_current(self, entry: tuple[float, int, Key]) -> bool:
        _, number, key = entry
        return self._current.get(key) == number

    def _compact(self) -> None:
        # Entries of forgotten keys stay in the heap until they are more than half of it: constant cost on average.
        if len(self._heap) > 2 * len(self._current):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
