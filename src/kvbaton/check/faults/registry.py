"""The simulated registry: the table of the real one behind a network that may be down, and restarts that lose it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from kvbaton.check.faults.background import LongCall, LongCalls, WouldWait
from kvbaton.check.faults.timeline import Timeline
from kvbaton.errors import RegistryError
from kvbaton.registry import FoundRooms, Registration, RegistryClient, RegistryTable, Topology

NAME = "http://registry"


class SimulatedRegistry:
    """The server. While it is ``down`` nobody reaches it."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.down = 0
        """How many faults keep it down now."""
        self.restarts = 0
        self._waiting: dict[str, LongCall] = {}
        """Requests that wait for a room, by asker."""
        self._table = RegistryTable()

    def restart(self) -> None:
        """Lose everything."""
        self.restarts += 1
        ttl = self._table.ttl
        self._table = RegistryTable(ttl, generation=1000 * self.restarts, settled=self.timeline.now + ttl)
        self.look_again(end=True)

    def reach(self) -> RegistryTable:
        """The table. Raises `RegistryError` while it is down."""
        if self.down:
            raise RegistryError("the registry cannot be reached: connection refused")
        return self._table

    def knows(self, instance: str) -> bool:
        """Whether a rank is registered, and was heard of in time."""
        self._table.expire(self.timeline.now)
        return instance in self._table._instances

    def wait(self, asker: str, call: LongCall, seconds: float) -> None:
        """A request waits until a room is announced, or for so long; an earlier one of the same asker ends."""
        if self._waiting.get(asker) is call:
            return
        earlier = self._waiting.get(asker)
        self._waiting[asker] = call
        if earlier is not None:
            self._end(earlier)
        self.timeline.after(seconds, partial(self._end, call))

    def over(self, asker: str, call: LongCall) -> None:
        """A request waits no more."""
        if self._waiting.get(asker) is call:
            del self._waiting[asker]

    def look_again(self, *, end: bool = False) -> None:
        """Something changed: those that wait look again, and ``end`` whatever they find."""
        for call in list(self._waiting.values()):
            call.over = call.over or end
            self.timeline.after(0.0, call.run)

    def _end(self, call: LongCall) -> None:
        call.over = True
        call.run()


class SimulatedClient(RegistryClient):
    """The registry as one process sees it."""

    def __init__(self, registry: SimulatedRegistry, calls: LongCalls) -> None:
        self._registry = registry
        self._calls = calls

    @property
    def _now(self) -> float:
        return self._registry.timeline.now

    def register(self, registration: Registration) -> None:
        """See `RegistryClient.register`."""
        self._registry.reach().register(registration, self._now)

    def heartbeat(self, instance: str) -> bool:
        """See `RegistryClient.heartbeat`."""
        return self._registry.reach().heartbeat(instance, self._now)

    def remove(self, instance: str) -> None:
        """See `RegistryClient.remove`."""
        self._registry.reach().remove(instance, self._now)

    def topology(self, deployment: str = "default", dp_rank: int | None = None) -> Topology:
        """See `RegistryClient.topology`."""
        return self._registry.reach().topology(deployment, self._now, dp_rank)

    def announce_rooms(
        self, instance: str, opened: Collection[int], closed: Collection[int], ended: Collection[int] = ()
    ) -> dict[int, int]:
        """See `RegistryClient.announce_rooms`."""
        held = self._registry.reach().announce_rooms(instance, opened, closed, self._now, ended)
        self._registry.look_again()
        return held

    def find_rooms(
        self, deployment: str, rooms: Collection[int], wait_seconds: float = 0.0, asker: str = ""
    ) -> FoundRooms:
        """See `RegistryClient.find_rooms`. Inside a `LongCall`, which tries again when there may be an answer."""
        call = self._calls.current
        assert call is not None
        try:
            found = self._registry.reach().find_rooms(deployment, rooms, self._now)
        except RegistryError:
            self._registry.over(asker, call)
            raise
        if found.rooms or call.over or not (wait_seconds and asker):
            self._registry.over(asker, call)
            return found
        self._registry.wait(asker, call, wait_seconds)
        raise WouldWait
