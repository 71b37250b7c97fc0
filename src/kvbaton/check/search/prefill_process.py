"""A prefill process: the real core, an engine that submits, and writes under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvbaton.check.search.process import DEADLINES, NOW, PAST, Broken, Count, Event, Life, LinkKey, Process
from kvbaton.layout import PAGED
from kvbaton.protocol import (
    Action,
    ComponentNeed,
    PeerShare,
    PrefillCore,
    RoomChanged,
    RowsReleased,
    Send,
    SendDone,
    StartWrite,
    rows_from_bytes,
)

LIVE, REVOKED, GONE = "live", "revoked", "gone"
"""Of a write: it can land; the receiver proved that it cannot; the receiver is dead, whatever happens in its memory."""


class Write(NamedTuple):
    """A write under way."""

    key: LinkKey
    life: int
    """Whose rows it is for, as the Offer says."""
    handle: int
    """Which life of the sender, and which chunk of it, it carries."""
    ticket: int
    fate: str = LIVE


@dataclass
class SenderLife(Life):
    """A life on the prefill side."""

    submitted: int = 0
    """Chunks that were submitted; the last comes with finish."""


class PrefillProcess(Process):
    """A prefill rank."""

    core: PrefillCore
    lives: dict[int, SenderLife]

    def _begin(self) -> None:
        self.core = PrefillCore(DEADLINES)
        self.core._timers._numbers = Count()  # type: ignore[assignment]
        self.core._numbers = Count(1)  # type: ignore[assignment]
        self.writes: list[Write] = []

    def _share(self) -> PeerShare:
        sends = self.bounds.sends(self.rank)
        components = {"kv": ComponentNeed(PAGED)} if sends else {}
        return PeerShare(components, 0, self.bounds.decodes, self.rank, sends=sends)

    # What may happen.

    def events(self) -> list[Event]:
        """See `Process.events`."""
        events: list[Event] = []
        for life in range(len(self.bounds.rooms)):
            if self._can_open(life):
                events.append(("open", life))
                if self.bounds.cancels:
                    events.append(("cancel", life))
            elif life in self.lives:
                events += self._events_of(life)
        for write in self.writes:
            if write.fate != REVOKED:
                events.append(("land", *write[:3]))
            events.append(("fail", *write[:3]))
        if self.bounds.deadlines != "never":
            if len(self.core._parking):
                events.append(("unpark",))
            if self.core._early._ended:
                events.append(("forget", "ended"))
            if self.core._early._withdrawn:
                events.append(("forget", "withdrawn"))
        return events

    def _events_of(self, life: int) -> list[Event]:
        state, events = self.lives[life], []
        if state.status.terminal:
            return [] if state.closed else [("close", life)]
        if state.submitted < self.bounds.chunks:
            events.append(("submit", life))
        events.append(("abort", life))
        if self.bounds.deadlines != "never" and self._has_timer(life):
            events.append(("deadline", life))
        return events

    # Events.

    def on_joined(self, key: LinkKey) -> list[Action]:
        """A decode rank passed the handshake."""
        share = self._share()
        if key.decode:
            share = PeerShare(share.components, key.decode, share.destinations, share.part, share.sends)
        return self.core.peer_joined(str(key), share)

    def on_open(self, life: int) -> list[Action]:
        """The engine opens a room."""
        self.begun.add(life)
        self.lives[life] = SenderLife()
        return self.core.open(self.bounds.rooms[life], NOW)

    def on_cancel(self, life: int) -> list[Action]:
        """The engine gives a room up that it has not opened."""
        self.begun.add(life)
        self.over.add(life)
        return self.core.cancelled(self.bounds.rooms[life], "asked for", NOW)

    def on_submit(self, life: int) -> list[Action]:
        """The engine has the next chunk; with the last one the request is finished."""
        room, state = self.bounds.rooms[life], self.lives[life]
        chunk = state.submitted
        state.submitted += 1
        handle, ranges = life * self.bounds.chunks + chunk, {"kv": (chunk, chunk + 1)}
        if state.submitted < self.bounds.chunks:
            return self.core.submit(room, handle, ranges, NOW)
        return self.core.finish(room, handle, self.bounds.tokens, ranges, (), False, NOW)

    def on_land(self, key: LinkKey, life: int, handle: int) -> list[Action]:
        """Every byte of a write is visible, which is reported."""
        write = self._end_write(key, life, handle)
        if write.fate == LIVE:
            origin, chunk = divmod(handle, self.bounds.chunks)
            self._outcome.landed += ((key, ("landed", life, self.rank, chunk, origin)),)
        return self.core.written(write.ticket, "", NOW)

    def on_fail(self, key: LinkKey, life: int, handle: int) -> list[Action]:
        """A write ends without its bytes, which is reported."""
        return self.core.written(self._end_write(key, life, handle).ticket, "broken", NOW)

    def on_settle(self, key: LinkKey, fate: str) -> list[Action]:
        """The writes over a connection can land no more: the peer proved it, or is gone."""
        self.writes = [write._replace(fate=fate) if write.key == key else write for write in self.writes]
        return []

    def on_unpark(self) -> list[Action]:
        """The time of the oldest parked Offer is over."""
        parked = self.core._parking._by_age
        oldest = next(iter(parked))
        parked[oldest] = parked[oldest]._replace(expires=PAST)
        return self.core.tick(NOW)

    def on_forget(self, what: str) -> list[Action]:
        """The time of the oldest thing that is remembered of a room is over."""
        early: Any = self.core._early
        by_age = (early._ended if what == "ended" else early._withdrawn)._by_age
        oldest = next(iter(by_age))
        by_age[oldest] = (by_age[oldest][0], PAST)
        return self.core.tick(NOW)

    def under_way(self) -> tuple[tuple[LinkKey, int, str], ...]:
        """See `Process.under_way`."""
        return tuple((write.key, write.life, write.fate) for write in self.writes)

    # Below: how it is done.

    def _end_write(self, key: LinkKey, life: int, handle: int) -> Write:
        (write,) = [write for write in self.writes if write[:3] == (key, life, handle)]
        self.writes.remove(write)
        return write

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.peer, action.message)
        elif isinstance(action, SendDone):
            self._send(action.peer, msgspec.structs.replace(action.done, bytes={}))
        elif isinstance(action, StartWrite):
            self._start(action)
        elif isinstance(action, RoomChanged):
            self._on_changed(action)
        elif isinstance(action, RowsReleased):
            self._on_released(action)
            life, _ = self._life(action.room)
            if any(write.handle // self.bounds.chunks == life for write in self.writes):
                raise Broken(f"the sender's rows of life {life} were released while they are read")
        else:
            raise Broken(f"a prefill core asked for {type(action).__name__}")

    def _start(self, action: StartWrite) -> None:
        offer = self.core.offer(action.room, action.peer)
        if offer.epoch != action.epoch:
            raise Broken(f"a write is for epoch {action.epoch}, its Offer is of epoch {offer.epoch}")
        if any(first >= last for first, last in action.pieces.values()) or not action.pieces:
            raise Broken("an empty write was started")
        (life,) = (int(row) for row in rows_from_bytes(offer.components["kv"].rows))
        key = LinkKey.parse(action.peer)
        if any(write[:3] == (key, life, action.handle) for write in self.writes):
            raise Broken(f"the same write to life {life} was started twice")
        self.writes.append(Write(key, life, action.handle, action.ticket))
        self._outcome.started += ((key, life),)

    def _normalise(self) -> None:
        super()._normalise()
        # Tickets are numbered anew, by what they are for: how many there were before does not matter.
        self.writes.sort(key=lambda write: write[:3])
        tickets = self.core._tickets
        if sorted(tickets) != sorted(write.ticket for write in self.writes):
            raise Broken(f"{len(self.writes)} writes are under way, the core waits for {len(tickets)}")
        self.core._tickets = {number: tickets[write.ticket] for number, write in enumerate(self.writes, 1)}
        self.writes = [write._replace(ticket=number) for number, write in enumerate(self.writes, 1)]
        self.core._numbers = Count(len(self.writes) + 1)  # type: ignore[assignment]
