"""What the processes of both sides have in common: a real core, the engine that uses it, and what both have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvbaton.check.search.bounds import Bounds
from kvbaton.protocol import Abort, Action, Deadlines, Message, RoomChanged, RowsReleased, Status, decode, encode
from kvbaton.protocol.core import Core

Event = tuple[Any, ...]
"""A word, and what it is about."""

NOW = 0.0
PAST = -1e9
"""The clock stands still. A deadline that passes is an event: what has it is moved into the past for a moment."""
DEADLINES = Deadlines(offer_wait=60, transfer=40, drain=6, parked_offers=6, parked_seconds=20)


class LinkKey(NamedTuple):
    """One connection of a prefill and a decode rank. A pair has another one after each loss."""

    prefill: int
    decode: int
    number: int

    def __str__(self) -> str:
        return f"{self.prefill}-{self.decode}#{self.number}"

    @classmethod
    def parse(cls, text: str) -> LinkKey:
        """The key that `str` made ``text`` of."""
        return cls(*(int(number) for number in text.replace("#", "-").split("-")))


class Broken(Exception):
    """A promise is broken."""


@dataclass
class Outcome:
    """What one event did."""

    state: int = 0
    """The process's next state, by number."""
    sends: tuple[tuple[LinkKey, bytes], ...] = ()
    started: tuple[tuple[LinkKey, int], ...] = ()
    """Prefill: writes that began, and the life whose rows they are for."""
    landed: tuple[tuple[LinkKey, Event], ...] = ()
    """Prefill: writes that ended well, as an event of the decode process."""
    released: tuple[int, ...] = ()
    """Decode: lives whose rows were given back."""
    cut: tuple[LinkKey, ...] = ()
    """Decode: peers that are to be cut off."""
    problem: str = ""
    """The promise that was broken."""

    @property
    def reaches_out(self) -> bool:
        """Whether it did more than send frames."""
        return bool(self.started or self.landed or self.released or self.cut)


class Count:
    """Numbers in turn, as `itertools.count` has them, but such that they can be stored and seen."""

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def __iter__(self) -> Count:
        return self

    def __next__(self) -> int:
        number = self.next
        self.next += 1
        return number


@dataclass
class Life:
    """One use of a room number, as this process's engine sees it."""

    status: Status = Status.WAITING
    released: bool = False
    closed: bool = False


class Process:
    """One process: its core, its engine, and what it has seen of each life. `perform` makes one event happen in it."""

    core: Core[Any]

    def __init__(self, bounds: Bounds, rank: int) -> None:
        self.bounds = bounds
        self.rank = rank
        self.lives: dict[int, Any] = {}
        self.begun: set[int] = set()
        """Lives that were opened here, or given up before."""
        self.over: set[int] = set()
        """Lives that are closed here, or died with the process."""
        self._begin()

    # To be filled in by each side.

    def _begin(self) -> None:
        """Let the process start: a new core."""
        raise NotImplementedError

    def events(self) -> list[Event]:
        """What may happen here next, as far as this process alone can say."""
        raise NotImplementedError

    def _events_of(self, life: int) -> list[Event]:
        """What may happen to an open life."""
        raise NotImplementedError

    def _carry_out(self, action: Action) -> None:
        raise NotImplementedError

    # One event.

    def perform(self, event: Event) -> Outcome:
        """Let ``event`` happen. A broken promise is in the outcome."""
        self._outcome = Outcome()
        try:
            self._make(event)
            while self.bounds.prompt and (next_event := self._prompt()):
                self._make(next_event)
            self._check_questions()
            self._normalise()
        except Broken as broken:
            self._outcome.problem = str(broken)
        except Exception as error:
            # Whatever a core raises here it must not: every call is one that an engine or a peer may make.
            self._outcome.problem = f"{type(error).__name__} was raised: {error}"
        outcome = self._outcome
        del self._outcome
        outcome.sends = tuple(sorted(outcome.sends))
        return outcome

    def _make(self, event: Event) -> None:
        method = getattr(self, f"on_{event[0]}")
        for action in method(*event[1:]):
            self._carry_out(action)

    def on_deliver(self, key: LinkKey, frame: bytes) -> list[Action]:
        """A frame arrives."""
        actions: list[Action] = []
        for message in decode(frame):
            actions += self.core.handle(str(key), message, NOW)  # type: ignore[attr-defined]
        return actions

    def on_lost(self, key: LinkKey) -> list[Action]:
        """The process notices that a connection has ended."""
        return self.core.peer_lost(str(key), "the connection ended", NOW)  # type: ignore[attr-defined, no-any-return]

    def on_abort(self, life: int) -> list[Action]:
        """The engine gives a room up."""
        return self.core.abort(self.bounds.rooms[life], "asked for", NOW)  # type: ignore[attr-defined, no-any-return]

    def on_close(self, life: int) -> list[Action]:
        """The engine forgets a room."""
        actions = self.core.close(self.bounds.rooms[life], NOW)  # type: ignore[attr-defined]
        self.lives[life].closed = True
        self.over.add(life)
        return actions  # type: ignore[no-any-return]

    def on_die(self) -> list[Action]:
        """The process ends, and a new one takes its place."""
        self.over |= self.begun
        self.lives.clear()
        self._begin()
        return []

    def on_deadline(self, life: int) -> list[Action]:
        """The time of a room is over."""
        room = self.core._rooms[self.bounds.rooms[life]]
        room.opened = room.progress = PAST
        self.core._timers.set(room, PAST)
        actions = self.core.tick(NOW)  # type: ignore[attr-defined]
        room.opened = room.progress = NOW
        return actions  # type: ignore[no-any-return]

    def _prompt(self) -> Event | None:
        """What a prompt engine does now."""
        for life in sorted(self.lives):
            for event in self._events_of(life):
                if event[0] in ("submit", "offer", "close"):
                    return event
        return None

    # What both sides note.

    def _has_timer(self, life: int) -> bool:
        room = self.core._rooms.get(self.bounds.rooms[life])
        return room is not None and room in self.core._timers._current

    def _life(self, room: int) -> Any:
        """The present life of a room number."""
        for life, state in self.lives.items():
            if self.bounds.rooms[life] == room:
                return life, state
        raise Broken(f"room {room} is not open here, and an action names it")

    def _can_open(self, life: int) -> bool:
        before = self.bounds.before(life)
        return life not in self.begun and before not in self.lives and (before is None or before in self.over)

    def _send(self, peer: str, message: Message) -> None:
        if isinstance(message, Abort):
            # Its words decide nothing: states that differ in them alone are one.
            message = Abort(message.room, message.epoch, offered=message.offered)
        self._outcome.sends += ((LinkKey.parse(peer), encode(message)),)

    def _on_changed(self, action: RoomChanged) -> None:
        life, state = self._life(action.room)
        if state.status.terminal:
            raise Broken(f"life {life} was in {state.status.name} and changed to {action.status.name}")
        if action.status is Status.FAILED and not action.reason:
            raise Broken(f"life {life} failed without a reason")
        if action.status is Status.FAILED and not self.bounds.can_fail:
            raise Broken(f"life {life} failed, and nothing had gone wrong: {action.reason}")
        state.status = action.status

    def _on_released(self, action: RowsReleased) -> None:
        life, state = self._life(action.room)
        if state.released:
            raise Broken(f"the rows of life {life} were released twice")
        if not state.status.terminal:
            raise Broken(f"the rows of life {life} were released in {state.status.name}")
        state.released = True

    def _check_questions(self) -> None:
        for life, state in self.lives.items():
            room = self.bounds.rooms[life]
            if not state.closed and self.core.status(room) is not state.status:
                raise Broken(f"life {life} is in {state.status.name}, the core says {self.core.status(room).name}")
            if self.core.rows_released(room) != state.released:
                raise Broken(f"the core says of life {life} that its rows are released: {not state.released}")

    def _normalise(self) -> None:
        for life in [life for life, state in self.lives.items() if state.closed and state.released]:
            del self.lives[life]

    def held(self) -> frozenset[int]:
        """Decode: the lives whose rows are given away."""
        return frozenset()

    def under_way(self) -> tuple[tuple[LinkKey, int, str], ...]:
        """Prefill: connection, life and fate of each write."""
        return ()

    def left_over(self) -> str:
        """What should not be there when nothing can happen any more; empty if nothing is."""
        for life, state in self.lives.items():
            if not state.closed:
                return f"life {life} has not ended: it is in {state.status.name}"
            return f"the rows of life {life} never came back"
        sizes: dict[str, int] = self.core.table_sizes()  # type: ignore[attr-defined]
        kept = {name: size for name, size in sizes.items() if size and name != "peers"}
        return f"tables are not empty at the end: {kept}" if kept else ""
