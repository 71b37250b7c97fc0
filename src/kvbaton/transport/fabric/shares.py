"""What all peers share of something scarce, so that those which stand still leave enough for the others."""

from __future__ import annotations

import logging
from collections import Counter, deque

logger = logging.getLogger(__name__)


class Shares:
    """``total`` of something, and how much of it each owner has.

    Half of it is kept for owners that have none. Of the other half, one may have as much as it leaves free for others.
    So as long as not more than half of ``total`` owners never give theirs back, each other owner gets its turn, however
    many there are.
    """

    def __init__(self, total: int) -> None:
        self.free = total
        """How much nobody has."""
        self._kept = total // 2
        self._held: Counter[object] = Counter()

    def allows(self, owner: object) -> bool:
        """Whether the owner may take one more now."""
        held = self._held.get(owner, 0)
        return held < self.free - self._kept if held else self.free > 0

    def take(self, owner: object) -> None:
        """The owner has one more."""
        self.free -= 1
        self._held[owner] += 1

    def give(self, owner: object) -> None:
        """The owner has one less; one that is gone may still give back."""
        self.free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]


class Staging:
    """The staging slabs, by number. A slab that the library may still read is never given back."""

    def __init__(self, slabs: int) -> None:
        self._slabs = deque(range(slabs))
        self._shares = Shares(slabs)
        self._told = False

    @property
    def free(self) -> int:
        """How many nobody has."""
        return self._shares.free

    def take(self, owner: object) -> int | None:
        """A slab for the owner; None if it has to wait, for one of its own or for those of others."""
        if not self._shares.allows(owner):
            if not self._slabs and not self._told:
                self._told = True
                logger.info("all staging slabs are in use; if writes wait for long, set the option staging_slabs")
            return None
        self._shares.take(owner)
        return self._slabs.popleft()

    def give(self, owner: object, slab: int) -> None:
        """The owner's slab is read no more."""
        self._shares.give(owner)
        self._slabs.append(slab)
