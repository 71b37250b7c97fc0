"""A source: the prefill ranks of one deployment, as one decode rank sees them, from look-up to loss."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbaton.errors import KVBatonError, LayoutMismatch, TransferFailed
from kvbaton.layout import RankLayout
from kvbaton.plan import PairPlan, assign, compile_pair
from kvbaton.protocol import Hello
from kvbaton.protocol.handshake import expected_parts
from kvbaton.protocol.messages import AuxPath
from kvbaton.registry import Registration, RegistryClient
from kvbaton.runtime.endpoints import numeric
from kvbaton.runtime.reach import PeerRank
from kvbaton.transport.base import Transport


class SourceKey(NamedTuple):
    """Where the prefill ranks of a room are looked up, and which data-parallel replica serves it."""

    registry: str
    dp_rank: int


class Withdrawn(NamedTuple):
    """A room that failed before its source was ready."""

    room: int
    reason: str


class Part(NamedTuple):
    """One prefill rank, and what it will send here."""

    registration: Registration
    plan: PairPlan
    sends: bool
    """Whether it is one of those that end with a Done."""
    endpoint: str
    """Where it is dialled: as registered, but with an address where that has the name of a host."""

    def name(self, index: int, parts: int) -> str:
        """What it is called in the reasons of rooms: which of ``parts``, where it stands, and what it sends here."""
        components = ", ".join(self.plan.components) or "nothing"
        return f"part {index} of {parts} ({self.registration.coords}, sends {components})"


@dataclass
class Link:
    """The connection to one prefill rank."""

    peer: str
    index: int
    part: Part
    hello: Hello
    transport: Transport | None = None
    """The transport that the prefill rank chose; set when it joined, as what follows."""
    aux: AuxPath = "control"
    """How its aux data come."""
    reason: str = ""
    """Why it chose so."""
    failed: dict[str, str] = field(default_factory=dict)
    """Transports that it chose before and that did not work here, and why."""

    @property
    def joined(self) -> bool:
        """Whether it answered our Hello with a Welcome."""
        return self.transport is not None

    @property
    def rank(self) -> PeerRank | None:
        """The prefill rank, once it joined."""
        if self.transport is None:
            return None
        registered = self.part.registration
        failed = [f"{name} failed here: {why}" for name, why in self.failed.items()]
        reason = "; ".join([self.reason, *failed])
        return PeerRank(registered.instance, registered.coords, self.transport.name, self.aux, reason)


@dataclass(eq=False)
class Source:
    """The prefill ranks that one room needs: ready when every one of them has answered the handshake."""

    key: SourceKey
    client: RegistryClient
    give_up: float
    """When the look-up and the handshake must be over, in seconds of the control thread's clock."""
    links: dict[str, Link] = field(default_factory=dict)
    ready: bool = False
    failure: KVBatonError | None = None
    mismatch: LayoutMismatch | None = None
    """Why it can never be ready: found here, and told to its ranks."""
    withdrawn: list[Withdrawn] = field(default_factory=list)
    """Rooms of which the prefill ranks must be told when it is ready."""
    rooms: set[int] = field(default_factory=set)
    """Rooms that use it and are not forgotten; its connections stay open as long as there are any."""

    @property
    def peers(self) -> tuple[str, ...]:
        """The keys of its connections, in the order of the grid."""
        return tuple(sorted(self.links, key=lambda peer: self.links[peer].index))

    @property
    def alone(self) -> bool:
        """Whether its deployment is known to have no other data-parallel replica."""
        return any(link.part.registration.coords.dp[1] == 1 for link in self.links.values())

    def link(self, index: int) -> Link:
        """The connection to the prefill rank at this place of the grid."""
        return next(link for link in self.links.values() if link.index == index)

    @property
    def sending(self) -> tuple[int, ...]:
        """The places in the grid of those that end with a Done."""
        return tuple(sorted(link.index for link in self.links.values() if link.part.sends))

    def words(self) -> tuple[str, type[TransferFailed]]:
        """Why its rooms fail, and the class to raise for it, if it has failed."""
        kind = type(self.failure) if isinstance(self.failure, TransferFailed) else TransferFailed
        return f"prefill source {self.key.registry}: {self.failure}", kind


class Wishes(NamedTuple):
    """What a decode rank says of itself to every source."""

    layout: RankLayout
    destination_index: int
    destinations: int
    striped: bool
    cast: bool
    aux: AuxPath


class LookedUp(NamedTuple):
    """The prefill ranks of one replica; they send nothing where ``mismatch`` says why their layouts and ours differ."""

    parts: list[Part]
    mismatch: LayoutMismatch | None = None


def look_up(client: RegistryClient, deployment: str, dp_rank: int, wishes: Wishes, seconds: float) -> LookedUp:
    """Ask the registry for the prefill ranks of one replica, and plan what each of them will send. Blocks.

    Names of their hosts are looked up within ``seconds``. Raises `RegistryError` if they cannot be had (also if there
    is no such replica), and `AddressError` for an endpoint that cannot be dialled.
    """
    ranks = client.topology(deployment, dp_rank).ranks
    limit = time.monotonic() + seconds
    endpoints = [numeric(rank.endpoint, limit - time.monotonic()) for rank in ranks]
    layout, cast = wishes.layout, wishes.cast
    try:
        shares = assign(
            [rank.layout for rank in ranks],
            layout,
            destination_index=wishes.destination_index,
            striped=wishes.striped,
            cast=cast,
        )
        plans = [compile_pair(rank.layout, layout, share, cast=cast) for rank, share in zip(ranks, shares, strict=True)]
    except LayoutMismatch as error:
        # They are greeted all the same: their refusal is how they learn of it.
        nothing = PairPlan({}, {})
        silent = [Part(rank, nothing, False, where) for rank, where in zip(ranks, endpoints, strict=True)]
        return LookedUp(silent, error)
    sending = expected_parts(shares)
    return LookedUp(
        [
            Part(rank, plan, index in sending, where)
            for index, (rank, plan, where) in enumerate(zip(ranks, plans, endpoints, strict=True))
        ]
    )
