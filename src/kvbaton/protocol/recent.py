"""What is remembered of room numbers for a short while: a few facts, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MAX_REMEMBERED = 4096

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """One value for a room number, for ``seconds``; at most `MAX_REMEMBERED` of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._by_age: OrderedDict[int, tuple[Value, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def put(self, room: int, value: Value, now: float) -> None:
        """Remember ``value``, and forget what was remembered of ``room`` before, and what is too old."""
        self.expire(now)
        self._by_age.pop(room, None)
        self._by_age[room] = (value, now + self._seconds)
        if len(self._by_age) > MAX_REMEMBERED:
            self._by_age.popitem(last=False)

    def get(self, room: int, now: float) -> Value | None:
        """What is remembered of ``room``."""
        entry = self._by_age.get(room)
        return None if entry is None or entry[1] <= now else entry[0]

    def take(self, room: int, now: float) -> Value | None:
        """Forget, and return, what is remembered of ``room``."""
        value = self.get(room, now)
        self._by_age.pop(room, None)
        return value

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._by_age and next(iter(self._by_age.values()))[1] <= now:
            self._by_age.popitem(last=False)
