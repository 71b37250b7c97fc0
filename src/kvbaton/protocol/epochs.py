"""Which epochs of a peer were seen: each counts once, whatever the order they come in."""

from __future__ import annotations

MAX_GAPS = 1 << 16
"""Epochs that may be ahead of one that is still missing."""


class SeenEpochs:
    """A set of numbers from 1 that stays small because a peer uses every number once.

    All up to ``_floor`` were seen; ``_ahead`` holds those beyond it.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._ahead: set[int] = set()

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, epoch: int) -> bool:
        return epoch <= self._floor or epoch in self._ahead

    def add(self, epoch: int) -> bool:
        """Note ``epoch``. False if it was seen before, or if too many others are missing before it."""
        if epoch in self or len(self._ahead) >= MAX_GAPS:
            return False
        self._ahead.add(epoch)
        while self._floor + 1 in self._ahead:
            self._floor += 1
            self._ahead.remove(self._floor)
        return True
