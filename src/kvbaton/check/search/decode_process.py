"""A decode process: the real core, an engine that offers its pages, and the memory behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.check.search.process import DEADLINES, NOW, Broken, Count, Event, Life, LinkKey, Process
from kvbaton.errors import DigestMismatch
from kvbaton.protocol import (
    Action,
    CheckDigests,
    DecodeCore,
    Deliver,
    FencePeer,
    RoomChanged,
    Rows,
    RowsReleased,
    Send,
    Status,
    rows_to_bytes,
)
from kvbaton.protocol.failures import Failure


@dataclass
class ReceiverLife(Life):
    """A life on the decode side."""

    offered: bool = False
    landed: set[tuple[int, int, int]] = field(default_factory=set)
    """Part, token, and the sender's life that it came from."""
    delivered: set[int] = field(default_factory=set)
    checks: dict[int, CheckDigests] = field(default_factory=dict)
    """Checks of digests under way, by part."""


class DecodeProcess(Process):
    """A decode rank. Each life has rows of its own, so that a write into rows that were given back is seen at once."""

    core: DecodeCore
    lives: dict[int, ReceiverLife]

    def _begin(self) -> None:
        self.core = DecodeCore(DEADLINES)
        self.core._timers._numbers = Count()  # type: ignore[assignment]
        self.links: dict[int, LinkKey] = {}
        """The latest connection of each prefill rank."""

    # What may happen.

    def events(self) -> list[Event]:
        """See `Process.events`."""
        events: list[Event] = []
        for life in range(len(self.bounds.rooms)):
            if self._can_open(life):
                if len(self.links) == self.bounds.prefills:
                    events.append(("open", life))
            elif life in self.lives:
                events += self._events_of(life)
        return events

    def _events_of(self, life: int) -> list[Event]:
        state = self.lives[life]
        events: list[Event] = []
        for part in sorted(state.checks):
            events += [("checked", life, part, True), ("checked", life, part, False)]
        if state.status.terminal:
            if not state.closed:
                events.append(("close", life))
            if self._has_timer(life):
                events.append(("drain", life))
            return events
        if not state.offered and self._free_pages():
            events.append(("offer", life))
        events.append(("abort", life))
        if self.bounds.deadlines != "never" and self._has_timer(life):
            events.append(("deadline", life))
        return events

    def _free_pages(self) -> int:
        return self.bounds.pages - sum(state.offered and not state.released for state in self.lives.values())

    # Events.

    def on_joined(self, key: LinkKey) -> list[Action]:
        """A prefill rank passed the handshake."""
        self.links[key.prefill] = key
        parts = [part for part in range(self.bounds.prefills) if self.bounds.sends(part)]
        return self.core.peer_joined(str(key), key.prefill, parts)

    def on_open(self, life: int) -> list[Action]:
        """The engine opens a room."""
        self.begun.add(life)
        self.lives[life] = ReceiverLife()
        return self.core.open(self.bounds.rooms[life], [str(self.links[part]) for part in sorted(self.links)], NOW)

    def on_offer(self, life: int) -> list[Action]:
        """The engine offers pages."""
        self.lives[life].offered = True
        rows = {"kv": Rows(rows_to_bytes([life]))}
        return self.core.offer(self.bounds.rooms[life], rows, self.bounds.tokens, NOW, digest=self.bounds.digests)

    def on_checked(self, life: int, part: int, right: bool) -> list[Action]:
        """The digests of a part were compared with what is in place."""
        check = self.lives[life].checks.pop(part)
        return self.core.checked(check, None if right else Failure(DigestMismatch, "another content"), NOW)

    def on_drain(self, life: int) -> list[Action]:
        """The time is over in which peers had to confirm that they write no more."""
        return self.on_deadline(life)

    def on_fenced(self, key: LinkKey) -> list[Action]:
        """It is proven that no write over this connection lands any more."""
        return self.core.peer_fenced(str(key), NOW)

    def on_landed(self, life: int, part: int, token: int, origin: int) -> list[Action]:
        """Bytes arrive in memory."""
        state = self.lives.get(life)
        if state is None or state.released:
            raise Broken(f"a write of part {part} landed in rows of life {life} after they were given back")
        if not state.status.terminal:
            state.landed.add((part, token, origin))
        return []

    def held(self) -> frozenset[int]:
        """See `Process.held`."""
        return frozenset(life for life, state in self.lives.items() if state.offered and not state.released)

    # Below: how it is done.

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.peer, action.message)
        elif isinstance(action, FencePeer):
            self._outcome.cut += (LinkKey.parse(action.peer),)
        elif isinstance(action, CheckDigests):
            _, state = self._life(action.room)
            state.checks[action.done.part] = action
        elif isinstance(action, Deliver):
            life, state = self._life(action.room)
            if state.status.terminal or action.part in state.delivered:
                raise Broken(f"part {action.part} of life {life} was delivered in {state.status.name}, or twice")
            state.delivered.add(action.part)
        elif isinstance(action, RoomChanged):
            self._on_changed(action)
            life, state = self._life(action.room)
            if action.status is Status.SUCCESS:
                self._check_complete(life, state)
            if state.status.terminal:
                state.landed, state.delivered = set(), set()
        elif isinstance(action, RowsReleased):
            self._on_released(action)
            life, state = self._life(action.room)
            if state.checks:
                raise Broken(f"the rows of life {life} were given back while they are read to be checked")
            if state.offered:
                self._outcome.released += (life,)
        else:
            raise Broken(f"a decode core asked for {type(action).__name__}")

    def _check_complete(self, life: int, state: ReceiverLife) -> None:
        parts = [part for part in range(self.bounds.prefills) if self.bounds.sends(part)]
        wanted = {(part, token, life) for part in parts for token in range(self.bounds.tokens)}
        if state.landed != wanted:
            raise Broken(f"life {life} succeeded with (part, token, life) {sorted(state.landed)} in place")
        if state.delivered != set(parts):
            raise Broken(f"life {life} succeeded with Done of parts {sorted(state.delivered)} alone")
