"""Rooms that one side gave up before the other had begun: what came too late, or comes too early, is answered.

Both are remembered for a short while only, by room number: numbers may be used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbaton.protocol.failures import Failure
from kvbaton.protocol.recent import Recent


@dataclass(frozen=True)
class _Ended:
    failure: Failure
    peers: set[str]
    """Those that offered or gave up: another Offer of theirs is for a later life of the number."""


class EarlyEnds:
    """Rooms that ended before all had offered, and rooms that were withdrawn before they were opened."""

    def __init__(self, seconds: float) -> None:
        self._ended: Recent[_Ended] = Recent(seconds)
        self._withdrawn: Recent[Failure] = Recent(seconds)

    def __len__(self) -> int:
        return len(self._ended) + len(self._withdrawn)

    def end(self, room: int, failure: Failure, peers: Iterable[str], now: float) -> None:
        """A room is closed for which only ``peers`` have offered or given up: Offers of others may be on their way."""
        self._ended.put(room, _Ended(failure, set(peers)), now)

    def withdraw(self, room: int, failure: Failure, now: float) -> None:
        """A room that is not open yet will not be offered."""
        self._withdrawn.put(room, failure, now)

    def begin(self, room: int, now: float) -> Failure | None:
        """The room is opened; returns why it was withdrawn, if it was."""
        self._ended.take(room, now)
        return self._withdrawn.take(room, now)

    def refusal(self, room: int, peer: str, now: float) -> Failure | None:
        """Why an Offer of ``peer`` comes too late, if it does; not a second time."""
        ended = self._ended.get(room, now)
        if ended is None or peer in ended.peers:
            return None
        ended.peers.add(peer)
        return ended.failure

    def gave_up(self, room: int, peer: str, now: float) -> bool:
        """``peer`` gave the room up; whether that is about one that has ended here."""
        ended = self._ended.get(room, now)
        if ended is not None:
            ended.peers.add(peer)
        return ended is not None

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        self._ended.expire(now)
        self._withdrawn.expire(now)
