"""Asks prefill ranks that were lost, and may live, what they have let go of: rows wait for the answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvbaton.errors import KVBatonError
from kvbaton.protocol import Refused, Welcome
from kvbaton.runtime.context import Context
from kvbaton.runtime.fencing import Greeting, LostPeers

logger = logging.getLogger(__name__)

REVISIT_SECONDS = 1.0
"""How long fences are tried before a rank is greeted again, and between two greetings."""


@dataclass
class _Visit:
    instance: str
    give_up: float


class Revisits:
    """A rank that was stopped, or cut off from the network, comes back some day while no room needs it.

    Each lost rank is greeted again as it was before, at its own address, and asked about the connections that it lost.
    ``told(instance, over)`` hears its answer. While it is asked, it is let in, and its fences rest.
    """

    def __init__(
        self,
        context: Context,
        lost: LostPeers,
        connections: itertools.count[int],
        told: Callable[[str, Sequence[int]], None],
    ) -> None:
        self._context = context
        self._lost = lost
        self._connections = connections
        self._told = told
        self._visits: dict[str, _Visit] = {}
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._visits)

    def instances(self) -> frozenset[str]:
        """The ranks that are being asked."""
        return frozenset(visit.instance for visit in self._visits.values())

    def on_turn(self, now: float) -> float | None:
        """Greet those that are due, give up those that do not answer; returns when the next turn is due."""
        lost = self._lost.instances()
        self._due = {instance: self._due.get(instance, now + REVISIT_SECONDS) for instance in lost}
        for peer, visit in list(self._visits.items()):
            if now >= visit.give_up or visit.instance not in lost:
                self._end(peer, now)
        asked = self.instances()
        for instance, greeting in lost.items():
            if instance not in asked and now >= self._due[instance]:
                self._visit(instance, greeting, now)
        asked = self.instances()
        waiting = [when for instance, when in self._due.items() if instance not in asked]
        return min([*waiting, *(visit.give_up for visit in self._visits.values())], default=None)

    def on_answer(self, peer: str, message: Welcome | Refused) -> bool:
        """A prefill rank answered; whether it is one that was asked here."""
        visit = self._visits.get(peer)
        if visit is None:
            return False
        self._end(peer, self._context.now())
        if isinstance(message, Welcome) and message.instance == visit.instance:
            self._told(visit.instance, message.over)
        return True

    def on_ended(self, peer: str) -> bool:
        """A connection is gone, or brought nonsense; whether it is one of these."""
        if peer not in self._visits:
            return False
        self._end(peer, self._context.now())
        return True

    def _visit(self, instance: str, greeting: Greeting, now: float) -> None:
        self._due[instance] = now + REVISIT_SECONDS
        hello = msgspec.structs.replace(
            greeting.hello, connection=next(self._connections), lost=self._lost.connections(instance)
        )
        for transport in self._context.transports.values():
            transport.readmit(instance)
        try:
            peer = self._context.control.dial(greeting.endpoint)
        except KVBatonError as error:
            logger.debug("decode: %s cannot be asked: %s", instance, error)
            return
        self._visits[peer] = _Visit(instance, now + self._context.settings.handshake_seconds)
        self._context.send(peer, hello)

    def _end(self, peer: str, now: float) -> None:
        visit = self._visits.pop(peer)
        self._due[visit.instance] = now + REVISIT_SECONDS
        self._context.hang_up(peer)
