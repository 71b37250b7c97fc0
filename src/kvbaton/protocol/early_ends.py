"""Rooms that one side gave up before the other had begun: what came too late, or comes too early, is answered.

Both are remembered for a short while only, by room number: numbers may be used again. Decode ranks are told apart by
their index, which stays the same when they connect anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbaton.protocol.failures import Failure
from kvbaton.protocol.recent import Recent


@dataclass(frozen=True)
class Ended:
    """One life of a room number that is over on one side."""

    failure: Failure
    ranks: set[int]
    """The decode ranks that offered or gave up: another Offer of theirs is for a later life of the number."""


class EarlyEnds:
    """Rooms that ended before all had offered, and rooms that were withdrawn before they were opened."""

    def __init__(self, seconds: float) -> None:
        self._ended: Recent[Ended] = Recent(seconds)
        self._withdrawn: Recent[Ended] = Recent(seconds)

    def __len__(self) -> int:
        return len(self._ended) + len(self._withdrawn)

    def end(self, room: int, failure: Failure, ranks: Iterable[int], now: float) -> None:
        """A room is closed for which only ``ranks`` have offered or given up: Offers of others may be on their way."""
        self._ended.put(room, Ended(failure, set(ranks)), now)

    def withdraw(self, room: int, failure: Failure, rank: int, now: float) -> None:
        """A room that is not open yet will not be offered by decode rank ``rank``."""
        before = self._withdrawn.get(room, now)
        self._withdrawn.put(room, Ended(failure, {rank} | (before.ranks if before else set())), now)

    def begin(self, room: int, now: float) -> Ended | None:
        """The room is opened; returns why it was withdrawn, and by whom, if it was."""
        self._ended.take(room, now)
        return self._withdrawn.take(room, now)

    def refusal(self, room: int, rank: int, now: float) -> Failure | None:
        """Why an Offer of decode rank ``rank`` comes too late, if it does; not a second time."""
        ended = self._ended.get(room, now)
        if ended is None or rank in ended.ranks:
            return None
        ended.ranks.add(rank)
        return ended.failure

    def gave_up(self, room: int, rank: int, now: float) -> bool:
        """Decode rank ``rank`` gave the room up; whether that is about one that has ended here, and not a later one."""
        ended = self._ended.get(room, now)
        if ended is None or rank in ended.ranks:
            return False
        ended.ranks.add(rank)
        return True

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        self._ended.expire(now)
        self._withdrawn.expire(now)
