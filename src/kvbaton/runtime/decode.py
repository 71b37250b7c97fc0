"""The decode side of a manager: takes offers from the engine, drives `DecodeCore`, and takes in aux data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from kvbaton.errors import KVBatonError, RoomError, RowsError, TransferFailed
from kvbaton.observe.base import CONTROL, Figures, ObservedRoom
from kvbaton.plan import PairPlan
from kvbaton.protocol import (
    Action,
    CheckDigests,
    DecodeCore,
    Deliver,
    Done,
    FencePeer,
    Message,
    Refused,
    Rows,
    Send,
    Status,
    Welcome,
    rows_to_bytes,
)
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.messages import MAX_TOKENS, AuxPath
from kvbaton.registry import RegistryClient
from kvbaton.runtime.aux_data import aux_nbytes, unpack_aux
from kvbaton.runtime.context import Context
from kvbaton.runtime.digest_jobs import DigestJobs
from kvbaton.runtime.digests import Digests, Portion, aux_digests, check_memory, compare, landed_portion
from kvbaton.runtime.finder import RoomFinder, Sought
from kvbaton.runtime.observation import ROW_BYTES
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.rooms import Receiver
from kvbaton.runtime.rows import EngineRows, RowsLike
from kvbaton.runtime.side import Side
from kvbaton.runtime.source import Source, SourceKey, Withdrawn
from kvbaton.runtime.sources import Sources

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OfferedRows:
    """What `Receiver.offer` was given."""

    components: dict[str, Rows]
    tokens: int
    prefix: int
    aux: int | None


class AuxSlot(NamedTuple):
    """Where the aux data of one part belong, and how they come."""

    plan: PairPlan
    slot: int
    path: AuxPath


@dataclass
class ReceiverRoom:
    """What the runtime keeps of a room besides the core's own state."""

    room: Receiver
    record: ObservedRoom
    digest: bool = False
    """Whether it is checked by digests."""
    offered: OfferedRows | None = None
    """Set once, under the lock of the table."""
    opened: bool = False
    sought: bool = False
    """Whether its data-parallel replica is looked for."""
    source: Source | None = None


class DecodeSide(Side[ReceiverRoom]):
    """The control thread's handler on a decode rank, and what `Receiver` calls. `Side` says what runs where."""

    core: DecodeCore

    def __init__(self, context: Context, deployment: str, destination_index: int, destinations: int) -> None:
        super().__init__(context, "decode", "receiver")
        self.core = DecodeCore(context.settings.deadlines, inspect=self._inspect)
        self._rows = EngineRows(context.layout, "decode")
        self._sources = Sources(
            context,
            self.core,
            self,
            deployment=deployment,
            destination_index=destination_index,
            destinations=destinations,
        )
        self._digests = DigestJobs(context)
        self._finder = RoomFinder(context, deployment, self)

    # Called by the engine, on any thread.

    def open_room(
        self,
        number: int,
        registry: str,
        client: RegistryClient,
        dp_rank: int | None,
        digest: bool | None = None,
    ) -> Receiver:
        """A receiver for a free room number; ``dp_rank`` None: find out; ``digest`` None: as the settings say.

        Raises `RoomError` if the number is in use, and `ConfigurationError` where digests cannot be made.
        """
        digest = self.context.settings.digest if digest is None else digest
        if digest:
            check_memory(self.context.regions)
        entry = ReceiverRoom(Receiver(number, self, registry), self.context.observation.record(number), digest)
        self._begin(entry, lambda: self._open(entry, registry, client, dp_rank))
        return entry.room

    def offer(
        self, receiver: Receiver, rows: Mapping[str, RowsLike], tokens: int, prefix: int, aux: int | None
    ) -> None:
        """See `Receiver.offer`."""
        tokens, prefix = int(tokens), int(prefix)
        if not 0 <= prefix <= tokens <= MAX_TOKENS:
            raise RowsError(
                f"decode: room {receiver.room}: a prefix of {prefix} tokens is not within the {tokens} tokens"
            )
        pages = self._rows.offered(rows, tokens, prefix)
        components = {name: Rows(rows_to_bytes(value.rows), value.start) for name, value in pages.items()}
        offered = OfferedRows(components, tokens, prefix, None if aux is None else self._rows.aux(aux))
        with self.rooms.lock:
            entry = self.rooms.open_by(receiver)
            if entry.offered is not None:
                raise RoomError(
                    f"decode: room {receiver.room} was offered already; one offer holds all of a request's rows"
                )
            entry.offered = offered
            receiver.restart_clock()
            self._post(entry, lambda: self._offered(entry))

    def peers(self) -> tuple[PeerRank, ...]:
        """The prefill ranks that are joined."""
        return self._sources.peers()

    def figures(self) -> Figures:
        """See `Side.figures`."""
        return replace(super().figures(), unfenced_peers=self._sources.unfenced)

    # Called by the control plane, on the control thread, as all that follows.

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A prefill rank is gone."""
        self._sources.on_disconnected(peer, reason)

    def on_refused(self, peer: str, reason: str) -> None:
        """A prefill rank does not share our secret."""
        self._sources.on_refused(peer, reason)

    def stop_looking(self) -> None:
        """See `Side.stop_looking`."""
        self._finder.shut()

    def _let_pass(self, now: float) -> float | None:
        """Let time pass."""
        looking = self._finder.on_turn(now)
        for transport in self.context.transports.values():
            transport.poll()
        self.perform(self.core.tick(now))
        deadlines = (looking, self._sources.on_turn(now), self.core.next_deadline())
        return min((when for when in deadlines if when is not None), default=None)

    def _on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, (Welcome, Refused)):
            self._sources.on_answer(peer, message)
        else:
            self.perform(self.core.handle(peer, message, self.context.now()))

    def _on_malformed(self, peer: str, error: KVBatonError) -> None:
        self._sources.on_malformed(peer, error)

    # Called by Sources.

    def source_ready(self, source: Source) -> None:
        """Begin the rooms that waited for it."""
        for withdrawn in source.withdrawn:
            self._tell_withdrawn(source, withdrawn)
        source.withdrawn.clear()
        for entry in self._rooms_of(source):
            self._take(entry, partial(self._open_in_core, entry))

    def source_failed(self, source: Source) -> None:
        """Fail the rooms that waited for it."""
        for entry in self._rooms_of(source):
            self.perform(self._fail(entry, *source.words()))

    def _rooms_of(self, source: Source) -> list[ReceiverRoom]:
        entries = [self.rooms.get(number) for number in source.rooms]
        return [entry for entry in entries if entry is not None]

    # Called by RoomFinder.

    def room_found(self, sought: Sought, dp_rank: int) -> None:
        """Begin a room whose replica is known now, or tell the replica that it failed meanwhile."""
        key = SourceKey(sought.registry, dp_rank)
        if sought.withdrawn is not None:
            withdrawn = Withdrawn(sought.number, sought.withdrawn)
            source = self._sources.current(key, sought.client)
            if source.ready:
                self._tell_withdrawn(source, withdrawn)
            else:
                source.withdrawn.append(withdrawn)
            return
        entry = self.rooms.get(sought.number)
        if entry is not None and entry.sought:
            entry.sought = False
            self._take(entry, lambda: self._use(entry, key, sought.client))

    def room_not_found(self, sought: Sought, reason: str, error: type[TransferFailed]) -> None:
        """Fail a room whose replica is not known."""
        entry = self.rooms.get(sought.number)
        if sought.withdrawn is None and entry is not None and entry.sought:
            entry.sought = False
            self.perform(self._fail(entry, reason, error))

    # Rooms.

    def _open(self, entry: ReceiverRoom, registry: str, client: RegistryClient, dp_rank: int | None) -> list[Action]:
        if entry.room.poll().terminal:
            return []
        self._finder.forget(entry.room.room, registry)
        self._sources.forget_withdrawn(entry.room.room)
        key = self._sources.only_replica(registry) if dp_rank is None else SourceKey(registry, dp_rank)
        if key is not None:
            return self._use(entry, key, client)
        entry.sought = True
        self._finder.find(entry.room.room, registry, client)
        return []

    def _use(self, entry: ReceiverRoom, key: SourceKey, client: RegistryClient) -> list[Action]:
        source = self._sources.use(entry.room.room, key, client)
        if source.failure is not None:
            # The look-up could not even begin.
            return self._fail(entry, *source.words())
        entry.source = source
        return self._open_in_core(entry) if source.ready else []

    def _open_in_core(self, entry: ReceiverRoom) -> list[Action]:
        if entry.opened or entry.source is None or entry.room.poll().terminal:
            return []
        actions = self.core.open(entry.room.room, entry.source.peers, self.context.now())
        entry.opened = True
        self.context.observation.room_connected(entry.record)
        # Before the offer: it may have failed already.
        self.perform(actions)
        return self._offer_in_core(entry)

    def _offered(self, entry: ReceiverRoom) -> list[Action]:
        if not entry.room.poll().terminal:
            self.context.observation.room_offered(entry.record)
        return self._offer_in_core(entry)

    def _offer_in_core(self, entry: ReceiverRoom) -> list[Action]:
        offered = entry.offered
        if offered is None or not entry.opened or entry.room.poll() is not Status.WAITING:
            return []
        return self.core.offer(
            entry.room.room,
            offered.components,
            offered.tokens,
            self.context.now(),
            prefix=offered.prefix,
            aux_row=-1 if offered.aux is None else offered.aux,
            digest=entry.digest,
            trace=entry.record.trace,
        )

    def _close_in_core(self, number: int) -> list[Action]:
        return self.core.close(number, self.context.now())

    def _let_go(self, entry: ReceiverRoom) -> None:
        if entry.sought:
            entry.sought = False
            self._finder.withdraw(entry.room.room, entry.room.source, entry.room.reason)
        source, entry.source = entry.source, None
        if source is None:
            return
        if not (entry.opened or source.ready or source.failure):
            source.withdrawn.append(Withdrawn(entry.room.room, entry.room.reason))
        self._sources.leave(entry.room.room, source)

    def _count_rows(self, entry: ReceiverRoom) -> int:
        offered = entry.offered
        return 0 if offered is None else sum(len(rows.rows) // ROW_BYTES for rows in offered.components.values())

    def _tell_withdrawn(self, source: Source, withdrawn: Withdrawn) -> None:
        """Tell the prefill ranks of a room that failed during the handshake: they would wait for an Offer."""
        number, now = withdrawn.room, self.context.now()
        try:
            actions = [
                *self.core.open(number, source.peers, now),
                *self.core.abort(number, withdrawn.reason, now),
                *self.core.close(number, now),
            ]
        except KVBatonError as error:
            logger.error("decode: room %d could not be withdrawn: %s", number, error)
            return
        # The rest is about a room that the engine may have forgotten, or opened anew.
        self.perform([action for action in actions if isinstance(action, Send)])

    # Actions of the core, and its question.

    def _carry_out(self, action: Action) -> list[Action]:
        if isinstance(action, Deliver):
            self._deliver(action)
        elif isinstance(action, CheckDigests):
            self._check(action)
        elif isinstance(action, FencePeer):
            self._sources.cut_off(action.peer, action.reason)
        else:
            return super()._carry_out(action)
        return []

    def _inspect(self, number: int, done: Done) -> str:
        """What is wrong with a Done, before the core believes it."""
        aux = self._aux(number, done.part)
        expected = {} if aux is None else aux_nbytes(self.context, aux.plan)
        if aux is not None and aux.path == "fabric":
            written = {name: done.bytes.get(name, 0) for name in expected}
            if written != expected or done.aux:
                return f"{sum(written.values())} bytes of aux data were written where {sum(expected.values())} belong"
            return ""
        if sum(expected.values()) != len(done.aux):
            return (
                f"{len(done.aux)} bytes of aux data came where {sum(expected.values())} belong: "
                "give an aux slot on both sides, or on neither"
            )
        return ""

    def _check(self, action: CheckDigests) -> None:
        """Compare what a part put in place with what it sent; the core hears of it, perhaps later."""

        def made(result: Digests | Exception) -> None:
            if isinstance(result, Exception):
                failure: Failure | None = Failure(TransferFailed, f"its digests could not be checked: {result}")
            else:
                failure = compare(result, action.done)
            self.perform(self.core.checked(action, failure, self.context.now()))

        try:
            portion, travelled = self._landed(action)
        except Exception as error:
            made(error)
            return
        self._digests.make(portion, made, travelled)

    def _landed(self, action: CheckDigests) -> tuple[Portion, Digests]:
        """What a part put in place, and the digests of what came inside its Done."""
        entry, done, context = self.rooms.get(action.room), action.done, self.context
        if entry is None or entry.source is None or entry.offered is None:
            raise RoomError(f"room {action.room} is not open")
        plan, offered = entry.source.link(done.part).part.plan, entry.offered
        aux = self._aux(action.room, done.part)
        written = aux.slot if aux is not None and aux.path == "fabric" else None
        portion = landed_portion(context.layout, plan, offered.components, offered.tokens, offered.prefix, written)
        return portion, aux_digests(context, plan, done.aux) if aux is not None and written is None else {}

    def _deliver(self, action: Deliver) -> None:
        aux = self._aux(action.room, action.part)
        if aux is not None and aux.path == "control":
            unpack_aux(self.context, aux.plan, aux.slot, action.done.aux)
        entry = self.rooms.get(action.room)
        if entry is not None:
            for name, nbytes in action.done.bytes.items():
                entry.room.count(name, nbytes)
            if self.context.observation.detailed:
                self._tell_delivered(entry, action, aux)

    def _tell_delivered(self, entry: ReceiverRoom, action: Deliver, aux: AuxSlot | None) -> None:
        link = entry.source.link(action.part) if entry.source is not None else None
        transport = link.transport.name if link is not None and link.transport is not None else ""
        inside = aux_nbytes(self.context, aux.plan) if aux is not None and aux.path == "control" else {}
        moved = {name: nbytes for name, nbytes in action.done.bytes.items() if name not in inside}
        for name, nbytes in ((transport, moved), (CONTROL, inside)):
            if nbytes or name == transport:
                self.context.observation.part_delivered(entry.record, action.part, name, nbytes)

    def _aux(self, number: int, part: int) -> AuxSlot | None:
        """Where the aux data of one part belong; None if no slot was offered."""
        entry = self.rooms.get(number)
        if entry is None or entry.source is None or entry.offered is None or entry.offered.aux is None:
            return None
        link = entry.source.link(part)
        return AuxSlot(link.part.plan, entry.offered.aux, link.aux)
