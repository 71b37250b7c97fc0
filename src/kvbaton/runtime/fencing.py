"""Prefill ranks whose control connection is gone while they may still write, until that is proven to be over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvbaton.protocol.messages import MAX_LOST, Hello
from kvbaton.transport.base import Transport

logger = logging.getLogger(__name__)


class Greeting(NamedTuple):
    """How a prefill rank was greeted: enough to do it again."""

    endpoint: str
    hello: Hello


@dataclass
class _Lost:
    instance: str
    transport: Transport
    greeting: Greeting
    next_try: float = 0.0
    error_logged: bool = False


class Fenced(NamedTuple):
    """A peer that writes no more, nor does its instance by any other connection of this transport."""

    peer: str
    instance: str
    transport: Transport


class LostPeers:
    """Fences lost peers, and tries those again every ``retry_seconds`` that could not be fenced yet."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._lost: dict[str, _Lost] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, peer: str, instance: str, transport: Transport, greeting: Greeting) -> None:
        """A peer was lost; ``instance`` is the rank's name at ``transport``."""
        self._lost[peer] = _Lost(instance, transport, greeting)

    def instances(self) -> dict[str, Greeting]:
        """The ranks that may still write, each with the last greeting that it answered."""
        return {lost.instance: lost.greeting for lost in self._lost.values()}

    def connections(self, instance: str) -> tuple[int, ...]:
        """The numbers of its connections whose end is not proven."""
        numbers = [lost.greeting.hello.connection for lost in self._lost.values() if lost.instance == instance]
        return tuple(numbers[:MAX_LOST])

    def let_go(self, instance: str, over: Iterable[int]) -> list[str]:
        """The rank says that these of its connections are ``over``; returns, and forgets, those that this proves."""
        over = frozenset(over)
        proven = [
            peer
            for peer, lost in self._lost.items()
            if lost.instance == instance
            and lost.transport.capabilities.lets_go
            and lost.greeting.hello.connection in over
        ]
        for peer in proven:
            del self._lost[peer]
        return proven

    def waits_for(self, instance: str) -> bool:
        """Whether an earlier connection of this rank is still to be fenced."""
        return any(lost.instance == instance for lost in self._lost.values())

    def forgive(self, instance: str, may_write: Callable[[str], bool]) -> None:
        """The rank lives: no fence for those of its earlier connections that no room waits for (``may_write``)."""
        for peer, lost in list(self._lost.items()):
            if lost.instance == instance and not may_write(peer):
                del self._lost[peer]

    def fence(self, now: float, but_not: Collection[str] = ()) -> list[Fenced]:
        """Try those that are due, but not these instances. Returns, and forgets, who certainly writes no more."""
        fenced = []
        for peer, lost in list(self._lost.items()):
            if now < lost.next_try or lost.instance in but_not:
                continue
            lost.next_try = now + self._retry_seconds
            if self._is_fenced(lost):
                del self._lost[peer]
                fenced.append(Fenced(peer, lost.instance, lost.transport))
        return fenced

    def next_try(self) -> float | None:
        """When `fence` has something to do."""
        return min((lost.next_try for lost in self._lost.values()), default=None)

    @staticmethod
    def _is_fenced(lost: _Lost) -> bool:
        try:
            return lost.transport.fence(lost.instance)
        except Exception as error:
            # Not proven: the rows stay where they are.
            if not lost.error_logged:
                logger.error("decode: fencing %s failed", lost.instance, exc_info=error)
            lost.error_logged = True
            return False
