"""The events of a world, in the order of their times. Nothing here knows what an event is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """``now`` is the time of the event that runs, in seconds from the beginning of the world."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        """Events that have run."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Let ``event`` run at a time; of two at one time the one that was named first runs first."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let ``event`` run so many seconds from now."""
        self.at(self.now + seconds, event)

    def step(self) -> bool:
        """Run the next event. False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        self.steps += 1
        event()
        return True
