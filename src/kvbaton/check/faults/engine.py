"""The engines of a world: what each rank does with its part of a request, from its rows to their return."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbaton.check.faults.memory import Lease
from kvbaton.check.faults.scenario import Request
from kvbaton.check.faults.watch import WatchedDecode, WatchedPrefill
from kvbaton.errors import RoomError
from kvbaton.protocol import Status
from kvbaton.protocol.decode_room import DecodeRoom
from kvbaton.runtime.rooms import Receiver, Room, Sender

if TYPE_CHECKING:
    from kvbaton.check.faults.process import Process

TRY_AGAIN = 0.3
"""Seconds until an engine asks again for rows, or for a number that is in use."""
SLACK = 1.0
"""Seconds that a room may end after its limit: turns come late."""


class Job(abc.ABC):
    """The part that one rank has in one request."""

    def __init__(self, process: Process, request: Request) -> None:
        self.process = process
        self.request = request
        self.world = process.world
        self.chance = self.world.scenario.stream("job", request.index, process.slot)
        self.room: Room | None = None
        self.lease: Lease | None = None
        self.status = Status.WAITING
        self.opened_at: float | None = None
        self.ended: float | None = None
        self.over = False
        """Its room is closed and its rows are back, or it never began."""
        self._reason = ""
        self._began = self._progress = 0.0
        self._moved: object = None
        self._fresh = False

    @property
    def closed(self) -> bool:
        """Whether its engine needs the number no more."""
        return self.over or (self.room is not None and self.room.closed)

    @property
    def ok(self) -> bool:
        """Whether the room succeeded."""
        return self.status is Status.SUCCESS

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self._reason

    def begin(self) -> None:
        """Take rows, then open the room; again and again until there are some."""
        if self.process.closing or self._never_begins():
            if self.lease is not None:
                self._give_back()
            self._leave()
            return
        if self.lease is None:
            self.lease = self.process.memory.lend(self.request.index, self._wanted())
            if self.lease is None:
                self.world.count("pool_full")
                self._later(TRY_AGAIN, self.begin)
                return
        try:
            self.room = self._open()
        except RoomError:
            self.world.count("number_in_use")
            self._later(TRY_AGAIN, self.begin)
            return
        self.opened_at = self.process.now
        self.process.watch.began(self.request.room)
        self._began = self._progress = self._time()
        self._go_on()

    def abort(self, reason: str) -> None:
        """The engine gives the request up."""
        if self.room is not None:
            self.room.abort(reason)  # type: ignore[attr-defined]

    def close(self) -> None:
        """The engine forgets the room."""
        if self.room is not None and not self.room.closed:
            self.room.close()  # type: ignore[attr-defined]
            self.look()
            self.world.job_closed()

    def look(self) -> None:
        """See what has become of the room."""
        room = self.room
        if room is None or self.over:
            return
        status = room.poll()
        if self.status.terminal:
            if status is not self.status or room.reason != self._reason:
                self._violate(
                    f"ended as {self.status.value} ({self._reason}), and now is {status.value} ({room.reason})"
                )
        elif status is not self.status or self._has_moved(room) != self._moved:
            self.status, self._moved, self._progress = status, self._has_moved(room), self._time()
            if status.terminal:
                self._end(room)
        if not self.status.terminal and self._time() > self._limit() + SLACK:
            self._violate(f"is still {status.value} {self._time() - self._limit():.1f} s after its limit")
        if room.rows_released and self.lease is not None:
            if not status.terminal:
                self._violate(f"has its rows back while it is {status.value}")
            self._give_back()
        if room.closed and room.rows_released:
            self._leave()

    def _leave(self) -> None:
        self.over = True
        self.process.jobs.pop(self.request.index, None)
        self.world.job_closed()

    def _end(self, room: Room) -> None:
        self._reason = room.reason
        self.ended = self.process.now
        if self.status is Status.FAILED and not room.reason:
            self._violate("failed without a reason")
        self.world.ended(self)
        if self.lease is not None:
            self.lease.failed = self.status is Status.FAILED
        if self.status is Status.SUCCESS:
            self._succeeded()
            if self.world.slip("abort_after_success", self.request.index):
                self.abort("too late")
                self.abort("too late again")
        self._later(self.chance.uniform(0.0, 0.5), self.close)

    def _give_back(self) -> None:
        assert self.lease is not None
        self.process.memory.take_back(self.lease, poison=self._poison)
        self.lease = None

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        self.process.after(seconds, event)

    def _time(self) -> float:
        """Seconds in which the process ran."""
        return self.process.now - self.process.standing

    def _violate(self, what: str) -> None:
        self.world.violate(self.process.instance, f"request {self.request.index}, room {self.request.room}: {what}")

    def __str__(self) -> str:
        return f"{self.process} request {self.request.index} (room {self.request.room})"

    _poison = False

    def _never_begins(self) -> bool:
        return False

    @abc.abstractmethod
    def _wanted(self) -> dict[str, int]:
        """Rows that the request needs here, by component."""

    @abc.abstractmethod
    def _open(self) -> Room:
        """Open the room."""

    @abc.abstractmethod
    def _go_on(self) -> None:
        """The room is open."""

    @abc.abstractmethod
    def _succeeded(self) -> None:
        """The room succeeded."""

    def _has_moved(self, room: Room) -> object:
        """What changes with each progress of the room."""
        return room.bytes_by_component

    @abc.abstractmethod
    def _limit(self) -> float:
        """When a room must have ended of which nothing more is seen, in the process's running time."""


class PrefillJob(Job):
    """Computes chunks, and sends them."""

    _poison = True

    def _never_begins(self) -> bool:
        return self.world.slip("no_sender", self.request.index)

    def _wanted(self) -> dict[str, int]:
        wanted = {}
        for name, places in self.process.memory.places.items():
            component = places.component
            if component.kind.has_tokens:
                wanted[name] = -(-self.request.tokens // component.page_size)
            else:
                wanted[name] = int(not component.kind.aux or self.request.aux)
        return wanted

    def _open(self) -> Room:
        assert isinstance(self.process.side, WatchedPrefill)
        return self.process.side.open_room(self.request.room)

    def _go_on(self) -> None:
        chunks = list(itertools.pairwise((0, *self.request.cuts, self.request.tokens)))
        *early, last = chunks
        self.chance.shuffle(early)
        if self.world.slip("lost_chunk", self.request.index) and early:
            early.pop()
        self._send(early, last)

    def _send(self, early: list[tuple[int, int]], last: tuple[int, int]) -> None:
        def step() -> None:
            room = self.room
            if not isinstance(room, Sender) or room.closed or self.lease is None:
                return
            self._progress = self._time()
            if early:
                first, end = early.pop()
                room.send(self._compute(first, end), (first, end))
                self._send(early, last)
            elif not self.world.slip("never_finish", self.request.index):
                self._finish(room, last)

        self._later(self.chance.uniform(0.0, 0.4), step)

    def _finish(self, room: Sender, last: tuple[int, int]) -> None:
        assert self.lease is not None
        first, end = last
        if self.world.slip("wrong_tokens", self.request.index) and end > first:
            end -= 1
        rows = self._compute(first, end)
        aux = None
        for name, places in self.process.memory.places.items():
            if places.component.kind.has_tokens or not self.lease.rows[name]:
                continue
            self.process.memory.fill(self.lease, name, 0, 0, 0)
            if places.component.kind.aux:
                (aux,) = self.lease.rows[name]
            else:
                rows[name] = self.lease.rows[name]
        room.finish(rows, (first, end), aux)

    def _compute(self, first: int, end: int) -> dict[str, list[int]]:
        assert self.lease is not None
        rows = {}
        for name, places in self.process.memory.places.items():
            component = places.component
            if component.kind.has_tokens:
                self.process.memory.fill(self.lease, name, first, end, 0)
                pages = self.lease.rows[name]
                size = component.page_size
                rows[name] = pages[first // size : -(-end // size)] if end > first else []
        return rows

    def _succeeded(self) -> None:
        pass

    def _limit(self) -> float:
        deadlines = self.world.settings.deadlines
        return max(self._began + deadlines.offer_wait, self._progress) + deadlines.transfer


class DecodeJob(Job):
    """Offers rows, and looks at what came."""

    def _first(self, name: str) -> tuple[int, int]:
        """The first token that is needed of a component, and the first of the page that it is in."""
        component = self.process.memory.places[name].component
        first = component.kind.needed(self.request.tokens, self.request.prefix)[0]
        return first, first // component.page_size * component.page_size

    def _wanted(self) -> dict[str, int]:
        wanted = {}
        for name, places in self.process.memory.places.items():
            component = places.component
            if component.kind.has_tokens:
                first, start = self._first(name)
                count = -(-self.request.tokens // component.page_size) - start // component.page_size
                wanted[name] = count if first < self.request.tokens else 0
            else:
                wanted[name] = int(not component.kind.aux or self.request.aux)
        return wanted

    def _open(self) -> Room:
        side = self.process.side
        assert isinstance(side, WatchedDecode)
        dp_rank = self.request.replica if self.request.named else None
        return side.open_room(self.request.room, self.process.registry_name, self.process.client, dp_rank)

    def _go_on(self) -> None:
        if not self.world.slip("no_offer", self.request.index):
            self._later(self.chance.uniform(0.0, 0.4), self._offer)

    def _offer(self) -> None:
        room, lease = self.room, self.lease
        if not isinstance(room, Receiver) or room.closed or lease is None:
            return
        rows: dict[str, list[int]] = {}
        expected: dict[str, tuple[int, int, int]] = {}
        aux = None
        for name, places in self.process.memory.places.items():
            component = places.component
            if component.kind.has_tokens:
                first, start = self._first(name)
                rows[name] = lease.rows[name]
                expected[name] = (first, self.request.tokens, start)
            elif component.kind.aux:
                if lease.rows[name]:
                    (aux,) = lease.rows[name]
                    expected[name] = (0, 0, 0)
            else:
                rows[name] = lease.rows[name]
                expected[name] = (0, 0, 0)
        self.process.memory.expect(lease, expected)
        self._progress = self._time()
        room.offer(rows, self.request.tokens, self.request.prefix, aux)

    def _succeeded(self) -> None:
        if self.lease is None:
            self._violate("succeeded after its rows were released")
        else:
            self.process.memory.check_complete(self.lease)

    def _has_moved(self, room: Room) -> object:
        # A part that has no bytes for this rank is done by its word alone.
        state = self.process.side.core._rooms.get(self.request.room)
        done = sum(link.done for link in state.links.values()) if isinstance(state, DecodeRoom) else 0
        return room.bytes_by_component, done

    def _limit(self) -> float:
        settings = self.world.settings
        if self.status is Status.WAITING:
            # Its replica, then the handshake, then its own engine.
            waits = 2 * settings.deadlines.offer_wait + settings.handshake_seconds
            return self._began + waits
        if self.world.prompt and self.world.slip("no_sender", self.request.index):
            return self._progress + settings.deadlines.parked_seconds
        return self._progress + settings.deadlines.transfer


def start(process: Process, request: Request) -> Job:
    """Let a rank begin its part of a request, a little later."""
    kind = PrefillJob if process.place.side == "prefill" else DecodeJob
    job = process.jobs[request.index] = kind(process, request)
    process.after(job.chance.uniform(0.0, 0.6), job.begin)
    return job
