"""Look-ups that a registry refused for want of ranks, while ranks may still return to it: when each is tried again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvbaton.protocol.timers import Timers
from kvbaton.registry import RegistryRefused

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Seconds until a look-up is tried again; doubled each time."""

Key = TypeVar("Key", bound=Hashable)


def returning_seconds(error: Exception) -> float:
    """For how long the question that failed may still be answered by itself; 0 where the failure stands."""
    return error.returning_seconds if isinstance(error, RegistryRefused) else 0.0


class Returning(Generic[Key]):
    """``Key`` is who asks. Time is an argument, in seconds of one clock."""

    def __init__(self) -> None:
        self._timers: Timers[Key] = Timers()
        self._pauses: dict[Key, float] = {}

    def __len__(self) -> int:
        """How many have a pause."""
        return len(self._pauses)

    def failed(self, key: Key, error: Exception, now: float, give_up: float) -> bool:
        """A look-up failed: whether it shall be tried again, when it is `due`; never at or after ``give_up``.

        Where it is not, all that is known of it is forgotten.
        """
        seconds = returning_seconds(error)
        pause = min(max(2 * self._pauses.get(key, 0.0), FIRST_PAUSE), LONGEST_PAUSE)
        # The last one right after the time is over: its answer stands.
        again = now + min(pause, max(seconds, FIRST_PAUSE))
        if not seconds or again >= give_up:
            self.forget(key)
            return False
        self._pauses[key] = pause
        self._timers.set(key, again)
        return True

    def forget(self, key: Key) -> None:
        """It was answered, or is not wanted any more."""
        self._pauses.pop(key, None)
        self._timers.cancel(key)

    def due(self, now: float) -> list[Key]:
        """Those that are to be tried now."""
        return self._timers.due(now)

    def next_try(self) -> float | None:
        """When the next one is due; None if there is none."""
        return self._timers.next()
