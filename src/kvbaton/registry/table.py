"""The table behind the registry: a pure state machine, whose callers pass the time in.

A rank lives as long as its heartbeats come: `RegistryTable.ttl` seconds after the last one it is forgotten. A rank that
registers with the coords of another takes its place. The rooms that it announced are forgotten with it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from kvbaton.layout.nouns import Coords
from kvbaton.registry.base import (
    FoundRooms,
    Registration,
    RegistryRefused,
    Topology,
    UnknownDeployment,
    UnknownInstance,
)
from kvbaton.registry.check import check_registration, coords_order
from kvbaton.registry.rooms import AnnouncedRooms

_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_AXES = ("tp", "pp", "cp", "dp")


@dataclass(frozen=True)
class Limits:
    """How much a table keeps: nothing that a client sends may grow it further."""

    ranks: int = 4096
    deployments: int = 256
    registration_bytes: int = 4 << 20
    total_bytes: int = 256 << 20
    rooms: int = 1 << 18
    rooms_per_request: int = 1 << 14


@dataclass
class _Rank:
    registration: Registration
    nbytes: int
    seen: float


@dataclass
class _Deployment:
    ranks: dict[tuple[int, ...], _Rank] = field(default_factory=dict)
    generation: int = 0


class RegistryTable:
    """Ranks by deployment and coords. Not thread-safe: its callers hold a lock, or run on one thread.

    ``generation`` is where counting starts; a server that may be restarted passes something that grows. Before
    ``settled`` (by its callers' clock) it may lack ranks of the table that was there before: a refusal for want of
    ranks says for how long they may still return (`RegistryRefused.returning_seconds`).
    """

    def __init__(
        self, ttl: float = 10.0, limits: Limits | None = None, generation: int = 0, settled: float = -math.inf
    ) -> None:
        self.ttl = ttl
        self._settled = settled
        self.limits = limits or Limits()
        self._generation = generation
        self._deployments: dict[str, _Deployment] = {}
        self._instances: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._total_bytes = 0
        self._rooms = AnnouncedRooms(self.limits.rooms, self.limits.rooms_per_request)

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def deployments(self) -> tuple[str, ...]:
        """The names of the deployments that have at least one rank."""
        return tuple(self._deployments)

    @property
    def rooms(self) -> int:
        """How many rooms are announced."""
        return len(self._rooms)

    def register(self, registration: Registration, now: float) -> int:
        """Put a rank in, or renew it, and return the deployment's generation.

        Raises `RegistryRefused` if the registration does not hold together, if its sizes or its model differ from
        those of the other ranks (the message names the coords and both numbers), or if the table is full.
        """
        self.expire(now)
        for what, name in (("instance", registration.instance), ("deployment", registration.deployment)):
            if not _NAME.fullmatch(name):
                raise RegistryRefused(
                    f"{what} {name[:80]!r} cannot be used as a name: pass 1 to 128 letters, digits or any of . _ : @ -"
                )
        check_registration(registration)
        nbytes = len(msgspec.json.encode(registration))
        position = coords_order(registration.coords)
        self._check_instance(registration, position)
        self._check_peers(registration, position)
        deployment = self._deployments.get(registration.deployment)
        old = deployment.ranks.get(position) if deployment else None
        self._check_limits(nbytes, old, new_deployment=deployment is None)

        if deployment is None:
            deployment = self._deployments[registration.deployment] = _Deployment()
        if old is not None:
            self._forget(registration.deployment, position, keep_rooms=old.registration == registration)
        deployment.ranks[position] = _Rank(registration, nbytes, now)
        self._deployments[registration.deployment] = deployment
        self._instances[registration.instance] = (registration.deployment, position)
        self._total_bytes += nbytes
        if old is None or old.registration != registration:
            self._touch(deployment)
        return deployment.generation

    def heartbeat(self, instance: str, now: float) -> bool:
        """Keep a rank alive; False if it is unknown, was forgotten, or was replaced by another instance."""
        self.expire(now)
        where = self._instances.get(instance)
        if where is None:
            return False
        rank = self._deployments[where[0]].ranks[where[1]]
        rank.seen = max(rank.seen, now)
        return True

    def remove(self, instance: str, now: float) -> bool:
        """Take a rank out; False if it was not there."""
        self.expire(now)
        where = self._instances.get(instance)
        if where is None:
            return False
        deployment = self._deployments[where[0]]
        self._forget(*where)
        self._touch(deployment)
        return True

    def topology(self, deployment: str, now: float, dp_rank: int | None = None) -> Topology:
        """All ranks of a deployment, or of its data-parallel replica ``dp_rank``, ordered by dp, pp, cp, tp.

        Raises `UnknownDeployment` if it has none, and `RegistryRefused` if some are missing (the message names them),
        or if it has no such replica.
        """
        found = self._find(deployment, now)
        sizes = next(iter(found.ranks.values())).registration.coords
        replicas = range(sizes.dp[1]) if dp_rank is None else range(dp_rank, dp_rank + 1)
        if dp_rank is not None and not 0 <= dp_rank < sizes.dp[1]:
            raise RegistryRefused(
                f"deployment {deployment} has no data-parallel rank {dp_rank}: it has {sizes.dp[1]} "
                f"(0 to {sizes.dp[1] - 1}); name one of them, or none"
            )
        here = [position for position in sorted(found.ranks) if position[0] in replicas]
        expected = len(replicas) * sizes.pp[1] * sizes.cp[1] * sizes.tp[1]
        if len(here) != expected:
            raise self._incomplete(RegistryRefused, self._missing(deployment, here, sizes, replicas, expected), now)
        return Topology(found.generation, tuple(found.ranks[position].registration for position in here))

    def announce_rooms(
        self,
        instance: str,
        opened: Collection[int],
        closed: Collection[int],
        now: float,
        ended: Collection[int] = (),
    ) -> dict[int, int]:
        """See `RegistryClient.announce_rooms`."""
        self.expire(now)
        self._rooms.check(opened, closed, ended)
        deployment, position = self._where(instance)
        if any(position[1:]):
            coords = self._deployments[deployment].ranks[position].registration.coords
            raise RegistryRefused(
                f"rank {coords} of deployment {deployment} announces rooms; the rank with tp, pp and cp rank 0 does "
                "that for its whole replica"
            )
        self._rooms.close(deployment, instance, closed)
        self._rooms.end(deployment, instance, ended, now)
        others = self._rooms.open(deployment, instance, opened)
        return {room: self._dp_rank(holder) for room, holder in others.items()}

    def find_rooms(self, deployment: str, rooms: Collection[int], now: float) -> FoundRooms:
        """See `RegistryClient.find_rooms`; nothing waits here. Raises `UnknownDeployment`."""
        self._rooms.check(rooms)
        found = self._find(deployment, now)
        replicas = next(iter(found.ranks.values())).registration.coords.dp[1]
        if replicas == 1:
            return FoundRooms(1, dict.fromkeys(rooms, 0))
        holders = self._rooms.find(deployment, rooms, now)
        return FoundRooms(replicas, {room: self._dp_rank(holder) for room, holder in holders.items()})

    def deployment_of(self, instance: str) -> str:
        """The deployment of a rank. Raises `UnknownInstance`."""
        return self._where(instance)[0]

    def expire(self, now: float) -> tuple[str, ...]:
        """Forget the ranks whose last sign of life is more than ``ttl`` old; their instance ids are returned."""
        dead = [
            (rank.registration.instance, name, position)
            for name, deployment in self._deployments.items()
            for position, rank in deployment.ranks.items()
            if now - rank.seen > self.ttl
        ]
        for _, name, position in dead:
            deployment = self._deployments[name]
            self._forget(name, position)
            self._touch(deployment)
        return tuple(instance for instance, _, _ in dead)

    def _touch(self, deployment: _Deployment) -> None:
        # One counter for all deployments: one that empties and fills again never shows an old generation.
        self._generation += 1
        deployment.generation = self._generation

    def _find(self, name: str, now: float) -> _Deployment:
        self.expire(now)
        found = self._deployments.get(name)
        if found is None:
            known = ", ".join(sorted(self._deployments)[:8]) or "none"
            message = (
                f"no rank of deployment {name[:80]!r} is registered (deployments here: {known}): "
                "is the prefill side up, and does it register here?"
            )
            raise self._incomplete(UnknownDeployment, message, now)
        return found

    def _incomplete(self, kind: type[RegistryRefused], message: str, now: float) -> RegistryRefused:
        """The refusal for want of ranks."""
        left = max(self._settled - now, 0.0)
        if left:
            message += f"; the registry has just started, and for {left:.1f} s more ranks may return to it"
        return kind(message, left)

    def _where(self, instance: str) -> tuple[str, tuple[int, ...]]:
        where = self._instances.get(instance)
        if where is None:
            raise UnknownInstance(f"no rank with instance {instance[:80]!r} is registered: register again")
        return where

    def _dp_rank(self, instance: str) -> int:
        return self._instances[instance][1][0]

    def _forget(self, name: str, position: tuple[int, ...], *, keep_rooms: bool = False) -> None:
        deployment = self._deployments[name]
        rank = deployment.ranks.pop(position)
        del self._instances[rank.registration.instance]
        if not keep_rooms:
            self._rooms.forget(name, rank.registration.instance)
        self._total_bytes -= rank.nbytes
        if not deployment.ranks:
            del self._deployments[name]

    def _check_instance(self, registration: Registration, position: tuple[int, ...]) -> None:
        where = self._instances.get(registration.instance)
        if where is not None and where != (registration.deployment, position):
            other = self._deployments[where[0]].ranks[where[1]].registration
            raise RegistryRefused(
                f"instance {registration.instance} asks for {registration.coords} of deployment "
                f"{registration.deployment}, but is registered as {other.coords} of {other.deployment}: "
                "each rank needs an instance id of its own"
            )

    def _check_peers(self, registration: Registration, position: tuple[int, ...]) -> None:
        """Compare with any rank that stays; one that is replaced here has no say."""
        deployment = self._deployments.get(registration.deployment)
        ranks = {} if deployment is None else deployment.ranks
        other = next((rank.registration for at, rank in ranks.items() if at != position), None)
        if other is None:
            return
        mine = registration
        for name, (_, size), (_, other_size) in zip(_AXES, mine.coords.all(), other.coords.all(), strict=True):
            if size != other_size:
                raise RegistryRefused(
                    f"rank {mine.coords} of deployment {mine.deployment} says {name} size {size}, but rank "
                    f"{other.coords} ({other.endpoint}) says {other_size}: start all ranks with the same sizes, or "
                    f"wait {self.ttl:g} s until the old ones are forgotten"
                )
        if mine.model != other.model:
            raise RegistryRefused(
                f"rank {mine.coords} of deployment {mine.deployment} serves model {mine.model!r}, but rank "
                f"{other.coords} ({other.endpoint}) serves {other.model!r}: use one deployment for each model"
            )

    def _check_limits(self, nbytes: int, old: _Rank | None, *, new_deployment: bool) -> None:
        limits = self.limits
        if nbytes > limits.registration_bytes:
            raise RegistryRefused(f"the registration has {nbytes} bytes, more than {limits.registration_bytes}")
        if new_deployment and len(self._deployments) >= limits.deployments:
            raise RegistryRefused(f"the registry is full: it holds {limits.deployments} deployments already")
        if old is None and len(self._instances) >= limits.ranks:
            raise RegistryRefused(f"the registry is full: it holds {limits.ranks} ranks already")
        total = self._total_bytes + nbytes - (old.nbytes if old else 0)
        if total > limits.total_bytes:
            raise RegistryRefused(
                f"the registry is full: all layouts together would have {total} bytes, more than {limits.total_bytes}"
            )

    @staticmethod
    def _missing(name: str, here: Collection[tuple[int, ...]], sizes: Coords, replicas: range, expected: int) -> str:
        grid = itertools.product(replicas, *(range(size) for size in (sizes.pp[1], sizes.cp[1], sizes.tp[1])))
        present = set(here)
        absent = (position for position in grid if position not in present)
        shown = [
            str(Coords(tp=(tp, sizes.tp[1]), pp=(pp, sizes.pp[1]), cp=(cp, sizes.cp[1]), dp=(dp, sizes.dp[1])))
            for dp, pp, cp, tp in itertools.islice(absent, 4)
        ]
        rest = expected - len(here) - len(shown)
        more = f", and {rest} more" if rest else ""
        return f"deployment {name} has {len(here)} of {expected} ranks; missing: {'; '.join(shown)}{more}"
