"""One life of one rank: the real logic of a manager in a simulated world, and the engine that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Union

from kvbaton.check.faults.background import Background, LongCalls
from kvbaton.check.faults.memory import Memory
from kvbaton.check.faults.plane import Frame, Gone, SimulatedControl
from kvbaton.check.faults.registry import NAME, SimulatedClient
from kvbaton.check.faults.transport import SimulatedTransport
from kvbaton.check.faults.watch import Watch, WatchedDecode, WatchedPrefill
from kvbaton.errors import KVBatonError
from kvbaton.layout import RankLayout
from kvbaton.protocol.messages import PROTOCOL_VERSION
from kvbaton.registry import Registration
from kvbaton.runtime.announcer import Announcer
from kvbaton.runtime.context import Context
from kvbaton.runtime.membership import Membership
from kvbaton.runtime.outbox import Outbox

if TYPE_CHECKING:
    from kvbaton.check.faults.engine import Job
    from kvbaton.check.faults.world import World

TOLD_SECONDS = 0.6
"""After a heartbeat: within these the registry has heard of all rooms."""
HEAD = slice(4, 6)
"""Where a frame says which version it is of."""
OTHER_VERSION = PROTOCOL_VERSION + 41


@dataclass(frozen=True)
class Place:
    """Where a rank stands; its processes come and go."""

    slot: int
    side: str
    replica: int
    """Of the prefill side; on the decode side, the group."""
    rank: int
    ranks: int
    """How many serve a request together on this side."""
    layout: RankLayout
    endpoint: str

    def __str__(self) -> str:
        return f"{self.side}{self.replica}.{self.rank}"


class Process:
    """``instance`` is new for each. It ends with `die`, and can stand still between `stop` and `resume`."""

    def __init__(self, world: World, place: Place, life: int, *, other_version: bool = False) -> None:
        self.world = world
        self.place = place
        self.slot = place.slot
        self.instance = f"{place}-{life}"
        self.alive = True
        self.stopped = False
        self.closing = False
        """Whether its manager closes, or has closed: it takes no request any more."""
        self._closed = False
        self.version = OTHER_VERSION if other_version else PROTOCOL_VERSION
        self.jobs: dict[int, Job] = {}
        """What its engine works on, by the index of the request."""
        self.chance = world.scenario.stream("process", self.instance)
        self.memory = Memory(place.layout, partial(world.violate, self.instance), world.later_of_number)
        self.watch = Watch(partial(world.violate, self.instance))
        self.standing = 0.0
        """Seconds that it has stood still."""
        self._stops = 0
        self._stopped_at = 0.0
        self._offset = self.chance.uniform(0.0, 1000.0)
        self._due: float | None = None
        self._deferred: list[Callable[[], None]] = []
        self._announcing = False
        self.membership: Membership | None = None
        self.announcer: Announcer | None = None
        self.control = SimulatedControl(world.network, self, self.wake)
        self.background = Background(world.timeline, self, world.scenario.stream("background", self.instance))
        self.calls = LongCalls(world.timeline, self, world.scenario.stream("calls", self.instance))
        self.client = SimulatedClient(world.registry, self.calls)
        self.transports = {
            name: SimulatedTransport(name, self.instance, self, world, self._stream(name), world.scenario.write_seconds)
            for name in world.scenario.transports
        }
        for transport in self.transports.values():
            transport.register([self.memory.region])
            transport.set_waker(self.wake)
        context = Context(
            instance=self.instance,
            model="simulated",
            layout=place.layout,
            regions=(self.memory.region,),
            transports=self.transports,
            left_out={},
            control=self.control,
            outbox=Outbox(self.control.send),
            settings=world.settings,
            executor=self.background,
            threads=self.calls,
            clock=self.clock,
        )
        self.side: Union[WatchedPrefill, WatchedDecode]  # noqa: UP007
        if place.side == "prefill":
            self.side = WatchedPrefill(context, self.watch)
            world.network.listening[place.endpoint] = self
            self._join_registry()
        else:
            self.side = WatchedDecode(context, place.rank, place.ranks, self.watch)
        self.wake()

    def __str__(self) -> str:
        return self.instance

    # Its clock and its turns.

    def clock(self) -> float:
        """Its own time."""
        return self.world.timeline.now + self._offset

    def jump(self, seconds: float) -> None:
        """Its clock leaps forward."""
        self._offset += seconds
        self.world.timeline.after(self.chance.uniform(0.0, 1.0), self.wake)

    def wake(self) -> None:
        """Give it a turn soon."""
        self._turn_by(self.world.timeline.now + self.chance.uniform(0.0, 0.002))

    def _turn_by(self, when: float) -> None:
        if self._due is not None and self._due <= when:
            return
        self._due = when
        self.world.timeline.at(when, lambda: self._turn_if(when))

    def _turn_if(self, when: float) -> None:
        if self._due == when and self.alive and not self.stopped and not self._closed:
            self._turn()

    def _turn(self) -> None:
        self._due = None
        try:
            deadline = self.control.turn(self.side, self.clock())
        except Exception as error:
            self.world.violate(self.instance, f"an error came out of the control loop: {error!r}")
            return
        if not self.control.idle:
            self.wake()
        if deadline is not None:
            # Rounded up, as the real one does.
            self._turn_by(max(deadline - self._offset, self.world.timeline.now) + 0.0005)
        self.look()

    def look(self) -> None:
        """The engine looks at its rooms, and the watch at the tables."""
        for job in list(self.jobs.values()):
            job.look()
        self.watch.check(self.side, self.control.connected)

    # Its life.

    def die(self) -> None:
        """It is killed."""
        self.alive = False
        self.world.network.died(self)
        self._deferred.clear()
        self.jobs.clear()

    def close(self, closed: Callable[[], None]) -> None:
        """Its engine closes the manager, and stays; ``closed`` is called when that is over."""
        self.closing = True
        self.side.shut_down()
        self._close_when_quiet(self.clock() + self.world.settings.close_seconds, closed)

    def _close_when_quiet(self, give_up: float, closed: Callable[[], None]) -> None:
        if not self.side.rooms.quiet() and self.clock() < give_up:
            self.after(0.02, partial(self._close_when_quiet, give_up, closed))
            return
        if self.membership is not None:
            self.membership.leave()
        for transport in self.transports.values():
            transport.close()
        while not self.control.idle:
            self._turn()
        self._turn()
        self._closed = True
        self.control.close()
        self.calls.running.clear()
        if self.world.network.listening.get(self.place.endpoint) is self:
            del self.world.network.listening[self.place.endpoint]
        self.world.closed(self)
        closed()

    def stop(self) -> None:
        """It stands still until `resume` was called as often."""
        self._stops += 1
        if self._stops == 1:
            self.stopped, self._stopped_at = True, self.world.timeline.now
            self.world.network.stopped(self)

    def resume(self) -> None:
        """It goes on."""
        self._stops = max(0, self._stops - 1)
        if self._stops or not self.stopped or not self.alive:
            return
        self.stopped = False
        self.standing += self.world.timeline.now - self._stopped_at
        self.world.network.resumed(self)
        self._due = None
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self.when_running(event)
        self.wake()

    def when_running(self, event: Callable[[], None]) -> None:
        """Run an event now, or when the process goes on; never if it is gone."""
        if self.stopped:
            self._deferred.append(event)
        elif self.alive:
            event()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run an event of this process after a while."""
        self.world.timeline.after(seconds, lambda: self.when_running(event))

    # What the network brings.

    def arrived(self, key: str, frame: bytes) -> None:
        """See `Node.arrived`."""
        if self.version != PROTOCOL_VERSION:
            # It reads its own version, and no other.
            theirs = int.from_bytes(frame[HEAD], "little")
            mine = PROTOCOL_VERSION if theirs == self.version else OTHER_VERSION
            frame = frame[:4] + mine.to_bytes(2, "little") + frame[6:]
        self.control.arrived(Frame(key, frame))

    def lost(self, key: str, reason: str) -> None:
        """See `Node.lost`."""
        self.control.arrived(Gone(key, reason))

    # The registry.

    def _join_registry(self) -> None:
        place, settings = self.place, self.world.settings
        if self.closing:
            return
        membership = Membership(
            self.client, Registration(self.instance, place.endpoint, place.layout, "simulated", "default")
        )
        try:
            membership.join()
        except KVBatonError:
            # Its engine starts it again until the registry is there.
            self.after(0.5, self._join_registry)
            return
        if self.world.scenario.shape.replicas > 1 and place.rank == 0:
            assert isinstance(self.side, WatchedPrefill)
            self.announcer = Announcer(
                self.client,
                self.instance,
                settings,
                refused=self.side.room_refused,
                unknown=lambda: self.after(0.01, membership.beat),
                clock=self.clock,
            )
            self.announcer.set_waker(lambda: self._announce_in(settings.announce_seconds))
            self.side.announcer = membership.announcer = self.announcer
        self.membership = membership
        self._beat_later(membership)

    def _beat_later(self, membership: Membership) -> None:
        def beat() -> None:
            if self.closing:
                return
            membership.beat()
            self._beat_later(membership)
            if self.announcer is not None:
                restarts = self.world.registry.restarts
                self.after(TOLD_SECONDS, lambda: self._check_announced(restarts))

        self.after(self.world.settings.registry_heartbeat_seconds * self.chance.uniform(0.9, 1.1), beat)

    def _check_announced(self, restarts: int) -> None:
        """A registry that a heartbeat has reached since it restarted knows every open room."""
        registry, announcer = self.world.registry, self.announcer
        if (
            self._closed
            or registry.down
            or registry.restarts != restarts
            or announcer is None
            or not registry.knows(self.instance)
        ):
            return
        told = [room for room in announcer._open if room not in announcer._news]
        missing = set(told) - registry.reach().find_rooms("default", told, self.now).rooms.keys()
        if missing:
            self.world.violate(self.instance, f"the registry does not know of its open rooms {sorted(missing)}")

    def _announce_in(self, seconds: float) -> None:
        if self._announcing or self.announcer is None:
            return
        self._announcing = True

        def tell() -> None:
            self._announcing = False
            if self._closed:
                return
            assert self.announcer is not None
            again = self.announcer.tell()
            if again is not None:
                self._announce_in(again)

        self.after(seconds, tell)

    @property
    def registry_name(self) -> str:
        """What the decode side calls the registry."""
        return NAME

    @property
    def now(self) -> float:
        """The time of the world."""
        return self.world.timeline.now

    def _stream(self, name: str) -> Random:
        return self.world.scenario.stream("transport", name, self.instance)
