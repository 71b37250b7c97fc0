"""Finds out which data-parallel replica opened a room, by asking the registry; for rooms that nobody named one for."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import Protocol

from kvbaton.errors import DeadlineExceeded, KVBatonError, TransferFailed
from kvbaton.protocol.timers import Timers
from kvbaton.registry import FoundRooms, RegistryClient
from kvbaton.runtime.context import Context
from kvbaton.runtime.returning import returning_seconds

logger = logging.getLogger(__name__)

MAX_ROOMS_PER_REQUEST = 8192
WAIT_SECONDS = 5.0
"""How long the registry may take to answer when it knows none of the rooms."""
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.5
"""Seconds until the registry is asked again that failed, or did not wait; doubled each time."""


class FinderUser(Protocol):
    """What `RoomFinder` tells of."""

    def room_found(self, sought: Sought, dp_rank: int) -> None:
        """A room was opened by the replica of this rank."""

    def room_not_found(self, sought: Sought, reason: str, error: type[TransferFailed]) -> None:
        """Nobody opened it in time, or nobody can be asked."""


@dataclass(eq=False)
class Sought:
    """A room that is looked for."""

    number: int
    registry: str
    client: RegistryClient
    started: float
    withdrawn: str | None = None
    """Why the room failed meanwhile: its replica is looked for only to be told so."""
    asks: int = 0
    """How many requests that are under way ask for it."""
    answered: bool = False
    """Whether the registry has said once that it does not know it."""


@dataclass
class _Registry:
    """What is under way at one registry."""

    name: str
    client: RegistryClient
    answered: bool = False
    """Whether it has ever answered."""
    replicas: int = 0
    sought: dict[int, Sought] = field(default_factory=dict)
    unasked: dict[int, Sought] = field(default_factory=dict)
    """Those for which no request is under way."""
    asking: int = 0
    pause: float = 0.0
    not_before: float = 0.0
    error: str = ""
    """What the last request failed with."""


class RoomFinder:
    """On the control thread, but for the requests themselves, each of which has a thread while it lasts.

    New rooms are asked for at once, all in one request: one that is announced already costs one round trip. Those that
    are not go into a request that the registry answers when it knows one of them; it holds every room that waits there,
    and ends the one before (`RegistryClient.find_rooms`). No more than two requests are under way at a registry.
    """

    def __init__(self, context: Context, deployment: str, user: FinderUser) -> None:
        self._context = context
        self._deployment = deployment
        self._user = user
        self._registries: dict[str, _Registry] = {}
        self._timers: Timers[Sought] = Timers()

    def __len__(self) -> int:
        """How many rooms are looked for, those that were withdrawn included."""
        return sum(len(registry.sought) for registry in self._registries.values())

    def find(self, number: int, registry: str, client: RegistryClient) -> None:
        """Look for a room. Its user will be told, unless it is withdrawn."""
        known = self._registries.setdefault(registry, _Registry(registry, client))
        sought = Sought(number, registry, client, self._context.now())
        known.sought[number] = known.unasked[number] = sought
        self._set_timer(sought)

    def forget(self, number: int, registry: str) -> None:
        """The number is opened anew: an earlier room of it is looked for no more."""
        known = self._registries.get(registry)
        if known is not None:
            self._drop(known, known.sought.get(number))

    def withdraw(self, number: int, registry: str, reason: str) -> None:
        """The room failed. It is looked for all the same: its replica waits for an Offer, and must be told."""
        known = self._registries.get(registry)
        sought = known.sought.get(number) if known is not None else None
        if sought is not None:
            sought.withdrawn = reason

    def on_turn(self, now: float) -> float | None:
        """Give up what has lasted too long, and ask; returns when the next turn is due at the latest."""
        for sought in self._timers.due(now):
            self._give_up(self._registries[sought.registry], sought)
        for registry in self._registries.values():
            if registry.unasked and now >= registry.not_before and registry.asking < 2:
                self._ask(registry)
        pauses = [each.not_before for each in self._registries.values() if each.unasked and each.asking < 2]
        deadlines = [self._timers.next(), *pauses]
        return min((when for when in deadlines if when is not None), default=None)

    def shut(self) -> None:
        """Look for nothing any more, and end the requests that wait."""
        for registry in self._registries.values():
            for sought in list(registry.sought.values()):
                self._drop(registry, sought)
            if registry.asking:
                # It ends the earlier ones: they have the same asker.
                self._start(registry, [], 0.0, end_others=True)

    # Requests.

    def _ask(self, registry: _Registry) -> None:
        asked = list(itertools.islice(registry.unasked.values(), MAX_ROOMS_PER_REQUEST))
        seconds = 0.0
        if all(sought.answered for sought in asked):
            seconds = WAIT_SECONDS
            others = (sought for sought in registry.sought.values() if sought.asks)
            asked += itertools.islice(others, MAX_ROOMS_PER_REQUEST - len(asked))
        for sought in asked:
            sought.asks += 1
            registry.unasked.pop(sought.number, None)
        self._start(registry, asked, seconds)

    def _start(self, registry: _Registry, asked: list[Sought], seconds: float, *, end_others: bool = False) -> None:
        registry.asking += 1
        numbers = [sought.number for sought in asked]
        started = self._context.now()
        asker = self._context.instance if seconds or end_others else ""
        work = _Work(registry.client, self._deployment, numbers, seconds, asker)

        def run() -> None:
            result = work.run()
            self._context.control.post(lambda: self._answered(registry, asked, result, started + seconds))

        self._context.threads.start(run, "kvbaton-decode-rooms")

    def _answered(
        self, registry: _Registry, asked: list[Sought], result: FoundRooms | Exception, expected: float
    ) -> None:
        registry.asking -= 1
        now = self._context.now()
        mine = [sought for sought in asked if registry.sought.get(sought.number) is sought]
        for sought in mine:
            sought.asks -= 1
            if not sought.asks:
                registry.unasked[sought.number] = sought
        if isinstance(result, Exception):
            self._failed(registry, mine, result, now)
            return
        registry.answered, registry.replicas, registry.error = True, result.replicas, ""
        # Not one that was ended by the next, or that took as long as it might.
        in_vain = not result.rooms and now < expected and any(not sought.asks for sought in mine)
        self._set_pause(registry, now, longer=in_vain)
        for sought in mine:
            dp_rank = result.rooms.get(sought.number)
            if dp_rank is not None:
                self._drop(registry, sought)
                self._user.room_found(sought, dp_rank)
            elif not sought.answered:
                sought.answered = True
                self._set_timer(sought)

    def _failed(self, registry: _Registry, asked: list[Sought], error: Exception, now: float) -> None:
        self._set_pause(registry, now, longer=True)
        known = isinstance(error, KVBatonError)
        level = logging.DEBUG if registry.error and known else logging.WARNING
        logger.log(level, "decode: registry %s: %s", registry.name, error, exc_info=None if known else error)
        registry.error = str(error)
        if registry.answered or returning_seconds(error):
            return
        # It never worked: better an error now than one at the deadline.
        for sought in asked:
            self._drop(registry, sought)
            self._user.room_not_found(sought, f"prefill source {registry.name}: {error}", TransferFailed)

    @staticmethod
    def _set_pause(registry: _Registry, now: float, *, longer: bool) -> None:
        registry.pause = min(max(2 * registry.pause, FIRST_PAUSE), LONGEST_PAUSE) if longer else 0.0
        registry.not_before = now + registry.pause

    # Ends.

    def _set_timer(self, sought: Sought) -> None:
        self._timers.set(sought, sought.started + self._patience(sought))

    def _patience(self, sought: Sought) -> float:
        settings = self._context.settings
        return settings.deadlines.offer_wait if sought.answered else settings.handshake_seconds

    def _give_up(self, registry: _Registry, sought: Sought) -> None:
        seconds = f"{self._patience(sought):g} s"
        self._drop(registry, sought)
        if sought.answered:
            reason = (
                f"no data-parallel replica of deployment {self._deployment} opened room {sought.number} within "
                f"{seconds}: it has {registry.replicas} replicas at {registry.name}"
            )
        else:
            reason = f"prefill source {registry.name}: no answer within {seconds} from the registry"
        if registry.error:
            reason += f"; the last question failed: {registry.error}"
        self._user.room_not_found(sought, reason, DeadlineExceeded)

    def _drop(self, registry: _Registry, sought: Sought | None) -> None:
        if sought is None:
            return
        registry.sought.pop(sought.number, None)
        registry.unasked.pop(sought.number, None)
        self._timers.cancel(sought)


@dataclass(frozen=True)
class _Work:
    """One request; touches nothing of the finder."""

    client: RegistryClient
    deployment: str
    numbers: list[int]
    seconds: float
    asker: str

    def run(self) -> FoundRooms | Exception:
        try:
            return self.client.find_rooms(self.deployment, self.numbers, self.seconds, self.asker)
        except Exception as error:
            return error
