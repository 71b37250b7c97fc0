"""Which epochs of a peer were seen: each counts once, whatever the order they come in."""

from __future__ import annotations

MAX_GAPS = 1 << 16
"""Epochs that may be ahead of one that is still missing: then it counts as seen."""


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
        """Note ``epoch``. False if it was seen before, or is so old that its message must have been lost."""
        if epoch in self:
            return False
        self._ahead.add(epoch)
        if len(self._ahead) > MAX_GAPS:
            # Those that are missing were lost with their messages; all that come must not be refused for them.
            self._floor = min(self._ahead)
            self._ahead.remove(self._floor)
        while self._floor + 1 in self._ahead:
            self._floor += 1
            self._ahead.remove(self._floor)
        return True
