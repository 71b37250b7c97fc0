"""Tells the observers of one manager what happens to its rooms, and keeps the record of each."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbaton.errors import ConfigurationError, TransferFailed
from kvbaton.layout.nouns import Coords
from kvbaton.observe.base import (
    Chunk,
    Figures,
    ObservedRank,
    ObservedRoom,
    Observer,
    PartRecord,
    PeerRecord,
)
from kvbaton.plan import PairPlan
from kvbaton.protocol import PartAccount, RoomAccount, Status

if TYPE_CHECKING:
    from kvbaton.runtime.reach import PeerRank

logger = logging.getLogger(__name__)

ROW_BYTES = 8
"""Of one row index in an Offer."""
_UNKNOWN = PeerRecord("", "", "")
_EVENTS = [name for name, value in vars(Observer).items() if inspect.isfunction(value)]
_DETAILS = {"room_transferring", "chunk_written", "part_delivered"}
"""Events whose telling needs more than is at hand."""


class _Peer(NamedTuple):
    record: PeerRecord
    plan: PairPlan


class Observation:
    """What a side calls; each method is one event. Where nobody listens they set a time in a record, and return.

    ``now`` is the clock of the rank. Methods are called on the threads that `Observer` says.
    """

    def __init__(
        self,
        rank: ObservedRank,
        observers: Iterable[Observer] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._now = now
        self._observers = tuple(observers)
        for observer in self._observers:
            if not isinstance(observer, Observer):
                raise ConfigurationError(
                    f"observers has a {type(observer).__name__}; each must be a kvbaton.observe.Observer"
                )
        self._hearers: dict[str, list[Callable[..., None]]] = {
            event: [
                getattr(observer, event)
                for observer in self._observers
                if getattr(type(observer), event) is not getattr(Observer, event)
            ]
            for event in _EVENTS
        }
        self._peers: dict[str, _Peer] = {}
        self._logged: set[tuple[str, Callable[..., None]]] = set()
        self.detailed = any(self._hearers[event] for event in _DETAILS)
        """Whether somebody hears of each chunk and of what a room goes on to, so that it is worth finding out."""

    @classmethod
    def of_nobody(cls) -> Observation:
        """One that tells nobody."""
        return cls(ObservedRank("", "", Coords(), frozenset(), 0.0, Figures))

    # The rank.

    def started(self) -> None:
        """The manager begins."""
        self._tell("rank_started", self.rank)

    def closed(self) -> None:
        """The manager has ended."""
        self._tell("rank_closed", self.rank)

    # Peers.

    def peer_joined(self, peer: str, rank: PeerRank, plan: PairPlan) -> None:
        """A rank passed the handshake as ``peer``."""
        record = PeerRecord(rank.instance, str(rank.coords), rank.transport)
        self._peers[peer] = _Peer(record, plan)
        self._tell("peer_joined", self.rank, record)

    def peer_lost(self, peer: str, reason: str) -> None:
        """It is gone. To be called after its rooms were failed: their records name it."""
        known = self._peers.pop(peer, None)
        if known is not None:
            self._tell("peer_lost", self.rank, known.record, reason)

    def handshake_refused(self, error: str, reason: str) -> None:
        """See `Observer.handshake_refused`."""
        self._tell("handshake_refused", self.rank, error, reason)

    def frame_dropped(self, kind: str, reason: str) -> None:
        """See `Observer.frame_dropped`."""
        self._tell("frame_dropped", self.rank, kind, reason)

    # Rooms.

    def record(self, number: int) -> ObservedRoom:
        """A record for a room that the engine asks for. On the engine's thread."""
        return ObservedRoom(self.rank, number, self._now())

    def room_opened(self, record: ObservedRoom) -> None:
        """The room was entered. On the engine's thread, before any other event of it."""
        self._tell("room_opened", record)

    def room_connected(self, record: ObservedRoom) -> None:
        """The prefill ranks are greeted."""
        record.connected = self._now()
        self._tell("room_connected", record)

    def room_offered(self, record: ObservedRoom) -> None:
        """The decode side's rows are known."""
        record.offered = self._now()
        self._tell("room_offered", record)

    def room_transferring(self, record: ObservedRoom) -> None:
        """The status changed."""
        record.transferring = self._now()
        record.status = Status.TRANSFERRING
        if record.offered is None:
            record.offered = record.transferring
            self._tell("room_offered", record)
        self._tell("room_transferring", record)

    def room_ended(
        self, record: ObservedRoom, status: Status, reason: str, error: type[TransferFailed], moved: Mapping[str, int]
    ) -> None:
        """The status changed for the last time."""
        record.ended = self._now()
        record.status, record.reason, record.moved = status, reason, moved
        if status is Status.FAILED:
            record.error = error
        self._tell("room_ended", record)

    def rows_released(self, record: ObservedRoom) -> None:
        """The rows are free."""
        record.released = self._now()
        self._tell("rows_released", record)

    def chunk_written(
        self,
        record: ObservedRoom,
        ticket: int,
        peer: str,
        part: int,
        started: float,
        moved: Mapping[str, int],
        pieces: Mapping[str, int],
        error: str = "",
        transport: str = "",
    ) -> None:
        """A write to ``peer`` ended; ``transport`` where it is not that of the pair."""
        known = self._peers.get(peer)
        name = transport or (known.record.transport if known else "")
        self._tell("chunk_written", record, Chunk(ticket, part, name, started, self._now(), moved, pieces, error))

    def part_delivered(self, record: ObservedRoom, part: int, transport: str, moved: Mapping[str, int]) -> None:
        """A part is complete; these of its bytes came by ``transport``."""
        now = self._now()
        started = now if record.transferring is None else record.transferring
        self._tell("part_delivered", record, Chunk(0, part, transport, started, now, moved, {}))

    def take_in(
        self,
        record: ObservedRoom,
        account: RoomAccount | None,
        aux: Callable[[PairPlan], Mapping[str, int]],
    ) -> None:
        """Put what the core knows of a room into its record; ``aux`` gives the bytes of aux data of a pair."""
        record.held = account is not None and not account.released
        if account is not None:
            if not record.trace:
                record.trace = next((part.offer.trace for part in account.parts if part.offer is not None), "")
            record.sent_tokens = account.sent_tokens
            record.parts = tuple(self._part(part, aux) for part in account.parts)

    def _part(self, part: PartAccount, aux: Callable[[PairPlan], Mapping[str, int]]) -> PartRecord:
        known, offer = self._peers.get(part.peer), part.offer
        expected: dict[str, int] = {}
        if known is not None and part.sends and offer is not None:
            for name in known.plan.components:
                rows = len(offer.components[name].rows) // ROW_BYTES if name in offer.components else 0
                expected[name] = known.plan.moved_bytes(name, offer.tokens, offer.prefix, rows)
            expected.update(aux(known.plan) if offer.aux_row >= 0 else {})
        return PartRecord(
            known.record if known else _UNKNOWN,
            part.part,
            part.epoch,
            offer.tokens if offer else 0,
            offer.prefix if offer else 0,
            part.sends,
            part.done,
            part.quiet,
            part.writes,
            part.moved,
            {name: nbytes for name, nbytes in expected.items() if nbytes},
        )

    def _tell(self, event: str, *arguments: Any) -> None:
        for hear in self._hearers[event]:
            try:
                hear(*arguments)
            except Exception:
                # The first one of each is worth a traceback; an observer may be broken for good.
                level = logging.DEBUG if (event, hear) in self._logged else logging.ERROR
                self._logged.add((event, hear))
                logger.log(level, "%s: an observer failed in %s", self.rank.side, event, exc_info=True)
