"""A world: every rank, the network, the registry and the router of one scenario, and what happens until it is over."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from kvbaton.check.faults import engine
from kvbaton.check.faults.causes import PROMPT, is_explained
from kvbaton.check.faults.engine import Job
from kvbaton.check.faults.leaks import kept
from kvbaton.check.faults.models import decode_layout, prefill_layout
from kvbaton.check.faults.network import Network
from kvbaton.check.faults.process import Place, Process
from kvbaton.check.faults.reasons import kind_of
from kvbaton.check.faults.registry import SimulatedRegistry
from kvbaton.check.faults.scenario import FAULTS_UNTIL, Request, Scenario
from kvbaton.check.faults.strikes import Strikes
from kvbaton.check.faults.timeline import Timeline
from kvbaton.check.faults.transport import SimulatedTransport
from kvbaton.protocol import Deadlines, Status
from kvbaton.runtime.settings import Settings

DEADLINES = Deadlines(
    offer_wait=10.0, transfer=7.0, drain=2.5, parked_offers=24, parked_seconds=5.0, recent_seconds=5.0
)
SETTINGS = Settings(peer_timeout_seconds=3.0, connect_seconds=1.5, handshake_seconds=6.0, deadlines=DEADLINES)
CALM = FAULTS_UNTIL + 4.0
"""When everything that is broken is mended, in seconds of the world."""
PATIENCE = 30.0
"""Seconds after that in which requests that are left may end, before whoever still could write is replaced."""
PROMPT_SECONDS = 1.5
"""Within which every rank of a request hears that it failed, where nothing hinders messages."""
MOST_STEPS = 200_000
"""Of one world: more, and it goes round in circles."""


class Violation(NamedTuple):
    """Something that must never happen, and did."""

    at: float
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s, {self.where}: {self.what}"


@dataclass
class Result:
    """What became of one world."""

    seed: int
    steps: int = 0
    violations: list[Violation] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """Those that struck, by kind."""
    seen: Counter[str] = field(default_factory=Counter)
    """What happened by itself: full pools, numbers in use, rows that went to the next request."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rooms by side and end."""
    digest: int = 0
    """Of everything that happened: equal for equal runs."""


class World:
    """Made of a scenario; `run` ends with everything checked. ``log`` is told what happens, line by line."""

    def __init__(self, scenario: Scenario, log: list[str] | None = None) -> None:
        self.scenario = scenario
        self.settings = replace(
            SETTINGS,
            striped=scenario.striped,
            aux="fabric" if scenario.fabric_aux else "control",
            digest=scenario.digest,
        )
        self.result = Result(scenario.seed)
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.settings, scenario.stream)
        self.registry = SimulatedRegistry(self.timeline)
        self._log = log
        self._transports: dict[tuple[str, str], SimulatedTransport] = {}
        self._waiting: dict[int, list[Request]] = {}
        """Requests by room number: each begins when the one before it is over."""
        self._running: dict[int, list[Job]] = {}
        """The jobs of the request that has a room number."""
        self._begun: list[tuple[int, int]] = []
        """Room number and index of each request, in the order in which they began."""
        self._closings = 0
        self._rests_until: dict[int, float] = {}
        self._jobs: dict[int, list[Job]] = {}
        """Those of each request."""
        self._kinds = frozenset(fault.kind for fault in scenario.faults)
        self.prompt = self._kinds <= PROMPT
        """Whether nothing hinders messages in this world."""
        self._left = len(scenario.requests)
        self._numbers = len(scenario.requests)
        self._failure = ""
        """The last one."""
        self._lives: Counter[int] = Counter()
        self.places = list(_places(scenario))
        self.processes: list[Process | None] = [None] * len(self.places)
        self.strikes = Strikes(self)
        self.network.tamper = self.strikes.tamper
        for place in self.places:
            self.start(place)

    # What happens.

    def run(self) -> Result:
        """Let everything happen."""
        for request in self.scenario.requests:
            self.timeline.at(request.at, partial(self._arrive, request))
        self.strikes.plan()
        self.timeline.at(CALM, self.strikes.mend)
        # Engines that wait for each other's rows get on at the pace of deadlines.
        for _ in range(3 + len(self.scenario.requests) // 8):
            self._until(lambda: self._is_over() and self.timeline.now > CALM, max(CALM, self.timeline.now) + PATIENCE)
            self._end_quarantines()
        self._check_ends()
        # A registry that was away has forgotten those whose heartbeats it did not hear.
        self._until(lambda: False, self.timeline.now + 1.5 * SETTINGS.registry_heartbeat_seconds)
        self._probe()
        self._until(lambda: False, self.timeline.now + DEADLINES.recent_seconds + 1.0)
        self._check_leaks()
        self.result.steps = self.timeline.steps
        self._note("digest", repr(sorted(self.result.outcomes.items())))
        return self.result

    def _until(self, done: object, limit: float) -> None:
        assert callable(done)
        timeline = self.timeline
        timeline.at(limit, lambda: None)
        while not self.result.violations and timeline.now < limit and not done():
            if not timeline.step():
                return
            if timeline.steps > MOST_STEPS:
                self.violate("the world", f"it has not come to an end after {MOST_STEPS} steps")

    def start(self, place: Place, *, other_version: bool = False) -> None:
        """A new process at a place."""
        life = self._lives[place.slot]
        self._lives[place.slot] += 1
        process = self.processes[place.slot] = Process(self, place, life, other_version=other_version)
        for name, transport in process.transports.items():
            self._transports[name, process.instance] = transport
        self._note("start", process.instance)

    def kill(self, slot: int) -> None:
        """The process at a place dies, with all that it was about to do."""
        process = self.processes[slot]
        if process is None:
            return
        self._note("kill", process.instance)
        self.processes[slot] = None
        if self.network.listening.get(process.place.endpoint) is process:
            del self.network.listening[process.place.endpoint]
        jobs = list(process.jobs.values())
        process.die()
        for job in jobs:
            job.over = True
        self._look_at_queues()

    # The router.

    def _arrive(self, request: Request) -> None:
        self._waiting.setdefault(request.room, []).append(request)
        self._next(request.room)

    def _next(self, room: int) -> None:
        queue = self._waiting.get(room)
        if not queue or room in self._running or self.timeline.now < self._rests_until.get(room, 0.0):
            return
        request = queue.pop(0)
        jobs = []
        for process in self.processes:
            if process is None or process.closing:
                continue
            mine = request.replica if process.place.side == "prefill" else request.group
            if process.place.replica == mine:
                jobs.append(engine.start(process, request))
        self._note("request", f"{request.index} room {room}")
        self._begun.append((room, request.index))
        self._running[room] = self._jobs[request.index] = jobs
        self._look_at_queues()

    def _look_at_queues(self) -> None:
        for room, jobs in list(self._running.items()):
            if all(job.closed for job in jobs):
                del self._running[room]
                self._left -= 1
                # A number is free when both sides have closed it, whatever is still on its way. One that a prefill rank
                # never opened rests: until then what was said of it would count for the next room.
                never = any(job.opened_at is None for job in jobs if job.process.place.side == "prefill")
                rest = DEADLINES.recent_seconds + 1.0 if never else 0.0
                self._rests_until[room] = self.timeline.now + rest
                self.timeline.after(rest, partial(self._next, room))

    # What others tell.

    def violate(self, where: str, what: str) -> None:
        """Something happened that must never happen."""
        self._note("violation", what)
        self.result.violations.append(Violation(self.timeline.now, where, what))

    def later_of_number(self, request: int) -> list[int]:
        """The requests that began after this one with the same room number."""
        room = next((each.room for each in self.scenario.requests if each.index == request), None)
        begun = [index for number, index in self._begun if number == room]
        return begun[begun.index(request) + 1 :] if request in begun else []

    def count(self, what: str) -> None:
        """Something happened by itself."""
        self.result.seen[what] += 1

    def ended(self, job: Job) -> None:
        """A room has ended."""
        self._note("ended", f"{job}: {job.status.value} {job.reason}")
        side = job.process.place.side
        self.result.outcomes[f"{side}: {'success' if job.ok else kind_of(job.reason)}"] += 1
        if job.ok:
            return
        if self.scenario.must_succeed:
            self.violate(job.process.instance, f"{job} failed although nothing can make it fail: {job.reason}")
        elif not is_explained(job.reason, self._kinds, waited=self._anybody_waited):
            self.violate(job.process.instance, f"{job} failed for no fault of this world: {job.reason}")
        if self.prompt:
            self.timeline.after(PROMPT_SECONDS, partial(self._must_have_heard, job))

    @property
    def _anybody_waited(self) -> bool:
        return bool(self.result.seen["pool_full"] or self.result.seen["number_in_use"])

    def _must_have_heard(self, failed: Job) -> None:
        """Every rank of a request hears of its failure at once, where nothing hinders messages."""
        jobs = self._jobs.get(failed.request.index, [])
        first = min(job.ended for job in jobs if job.ended is not None)
        if any(job.opened_at is None or job.opened_at > first for job in jobs):
            # News of one rank come to the others of its side by way of the other side, once these have begun.
            return
        for job in jobs:
            if not job.status.terminal and not job.over:
                self.violate(job.process.instance, f"{job} has not heard that {failed} failed: {failed.reason}")

    def closed(self, process: Process) -> None:
        """A manager has closed: its rooms have ended, and where nothing hinders messages all rows are back."""
        self._closings += 1
        drains = self._kinds - {"close_manager"} <= PROMPT and self._closings == 1
        for job in process.jobs.values():
            if job.room is not None and not job.room.poll().terminal:
                self.violate(process.instance, f"{job} is {job.room.poll().value} although its manager has closed")
            elif job.room is not None and drains and not job.room.rows_released:
                self.violate(process.instance, f"{job} has not its rows back although its manager has closed")

    def job_closed(self) -> None:
        """An engine closed a room."""
        self._look_at_queues()

    def slip(self, kind: str, request: int) -> bool:
        """Whether the engine makes this mistake with a request."""
        return self.strikes.slip(kind, request)

    def transport_of(self, name: str, instance: str) -> SimulatedTransport | None:
        """The transport of that name of an instance, dead or alive."""
        return self._transports.get((name, instance))

    def is_cut(self, source: int, destination: int) -> bool:
        """Whether nothing gets from one place to another."""
        return self.network.is_cut(source, destination)

    def struck(self, kind: str, slot: int) -> float | None:
        """Whether a fault of this kind waits for this place."""
        return self.strikes.struck(kind, slot)

    def living(self) -> list[Process]:
        """The processes that are alive."""
        return [process for process in self.processes if process is not None]

    # The end.

    def _end_quarantines(self) -> None:
        """Rows that a live peer could still write come back when it is gone, and only then."""
        jobs = [job for process in self.living() for job in process.jobs.values()]
        waiting = any(job.status.terminal and job.lease is not None for job in jobs)
        if self.result.violations or not waiting or "mapped" not in self.scenario.transports:
            return
        self.count("quarantine")
        for place in self.places:
            if place.side == "prefill":
                self.kill(place.slot)
                self.start(place)

    def _is_over(self) -> bool:
        return self._left == 0 and not any(process.jobs for process in self.living())

    def _check_ends(self) -> None:
        if self.result.violations:
            return
        for process in self.living():
            for job in process.jobs.values():
                state = job.room.poll().value if job.room is not None else "not open"
                rows = "its rows are not back" if job.lease is not None else "its rows are back"
                self.violate(process.instance, f"{job} is not over: it is {state}, {rows}")
        if self._left and not self.result.violations:
            self.violate("the world", f"{self._left} requests never began")

    def _probe(self) -> None:
        """Nothing is broken any more: a request of every pair must succeed."""
        if self.result.violations:
            return
        shape = self.scenario.shape
        pairs = [(replica, group) for replica in range(shape.replicas) for group in range(shape.groups)]
        if self.result.faults["data_closed"]:
            # The first write of a pair finds out that its data connection is gone, and fails of it.
            self._requests(pairs * shape.prefill_ranks * shape.decode_tp)
        wanted = self.result.outcomes.copy()
        self._requests(pairs)
        if self.result.violations:
            return
        failed = [key for key in self.result.outcomes if not key.endswith("success")]
        if any(self.result.outcomes[key] > wanted[key] for key in failed):
            self.violate("the world", f"nothing is broken any more, but a request failed: {self._failure}")

    def _requests(self, pairs: list[tuple[int, int]]) -> None:
        """One request after the other, of these replicas and groups."""
        for replica, group in pairs:
            number = self._numbers = self._numbers + 1
            has_aux = "aux" in self.scenario.shape.parts
            self._left += 1
            self._arrive(Request(number, 1000 + number, 0.0, replica, group, 5, 0, (2,), number % 2 == 0, has_aux))
            self._until(self._is_over, self.timeline.now + PATIENCE)
            self._check_ends()
            if self.result.violations:
                return

    def _check_leaks(self) -> None:
        if self.result.violations:
            return
        for process in self.living():
            process.wake()
        self._until(lambda: False, self.timeline.now + 0.1)
        for process in self.living():
            self.result.seen["late_offer"] += process.memory.mixed_up
            left = kept(process)
            if left:
                listed = ", ".join(f"{name} {count}" for name, count in left.items())
                self.violate(process.instance, f"everything is over, but it keeps {listed}")

    def _note(self, what: str, of: str) -> None:
        if what == "ended" and "failed" in of:
            self._failure = of
        text = f"{self.timeline.now:9.4f} {what} {of}"
        self.result.digest = zlib.crc32(text.encode(), self.result.digest)
        if self._log is not None:
            self._log.append(text)


def _places(scenario: Scenario) -> list[Place]:
    shape = scenario.shape
    places: list[Place] = []
    for replica in range(shape.replicas):
        for rank in range(shape.prefill_ranks):
            layout = prefill_layout(shape, replica, rank)
            slot = len(places)
            places.append(
                Place(slot, "prefill", replica, rank, shape.prefill_ranks, layout, f"tcp://10.0.0.{slot + 1}:7000")
            )
    for group in range(shape.groups):
        for rank in range(shape.decode_tp):
            places.append(Place(len(places), "decode", group, rank, shape.decode_tp, decode_layout(shape, rank), ""))
    return places


__all__ = ["Result", "Status", "Violation", "World"]
