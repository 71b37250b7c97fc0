"""Which epochs of a peer were seen: each counts once, whatever the order they come in."""

from __future__ import annotations

from bisect import bisect_left, insort

MAX_GAPS = 1 << 16
"""Epochs that may be ahead of one that is still missing: then it counts as seen."""


class SeenEpochs:
    """A set of numbers from 1 that stays small because a peer uses every number once.

    All up to ``_floor`` were seen; ``_ahead`` holds those beyond it, in order.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._ahead: list[int] = []

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, epoch: int) -> bool:
        place = bisect_left(self._ahead, epoch)
        return epoch <= self._floor or self._ahead[place : place + 1] == [epoch]

    def add(self, epoch: int) -> bool:
        """Note ``epoch``. False if it was seen before, or is so old that its message must have been lost."""
        if epoch in self:
            return False
        insort(self._ahead, epoch)
        if len(self._ahead) > MAX_GAPS:
            # Those that are missing were lost with their messages; all that come must not be refused for them.
            self._floor = self._ahead[0]
        while self._ahead and self._ahead[0] <= self._floor + 1:
            self._floor = self._ahead.pop(0)
        return True
