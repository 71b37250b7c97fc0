"""The prefill side of a manager: takes chunks from the engine, drives `PrefillCore`, and has them written."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvbaton.errors import DigestMismatch, KVBatonError, RoomError, RowsError, TransferFailed
from kvbaton.observe.base import CONTROL, Figures, ObservedRoom
from kvbaton.plan import Pages, Transfer
from kvbaton.protocol import (
    Abort,
    Action,
    Done,
    Hello,
    Message,
    PrefillCore,
    Send,
    SendDone,
    StartWrite,
    Status,
)
from kvbaton.protocol.messages import short_reason
from kvbaton.runtime.aux_data import bind_aux, pack_aux
from kvbaton.runtime.context import Context
from kvbaton.runtime.destinations import Destinations
from kvbaton.runtime.digest_jobs import Sent, WriteDigests
from kvbaton.runtime.digests import as_sent, aux_portion, digests_of
from kvbaton.runtime.interfaces import Announcements
from kvbaton.runtime.later import Event, Later
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.rooms import Offered, Room, Sender
from kvbaton.runtime.rows import EngineRows, RowsLike, checked_tokens
from kvbaton.runtime.side import Side
from kvbaton.runtime.writes import Write, Writes
from kvbaton.transport.base import Completion

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SenderRoom:
    """What the runtime keeps of a room besides the core's own state."""

    room: Sender
    record: ObservedRoom
    last_token: int = 0
    """By the engine's calls so far; under the lock of the table, as ``finished``."""
    finished: bool = False
    opened: bool = False
    chunks: dict[int, Mapping[str, Pages]] = field(default_factory=dict)
    """What `send` and `finish` handed over, by the core's handle; empty once the rows are released."""
    aux: int | None = None
    """The aux slot."""
    sent: dict[str, Sent] = field(default_factory=dict)
    """Digests of what was sent, by peer that asked for them."""


class PrefillSide(Side[SenderRoom]):
    """The control thread's handler on a prefill rank, and what `Sender` calls. `Side` says what runs where."""

    core: PrefillCore

    def __init__(self, context: Context) -> None:
        super().__init__(context, "prefill", "sender")
        self.core = PrefillCore(context.settings.deadlines)
        self._destinations = Destinations(context, self.core, self.perform)
        self._rows = EngineRows(context.layout, "prefill")
        self._writes = Writes()
        self._digests = WriteDigests(context, lambda completion: self._written(completion, context.now()))
        self._handles = itertools.count(1)
        self._later = Later(context.threads)
        self.announcer: Announcements | None = None
        """Set before the first room, on the rank that announces the rooms of its data-parallel replica."""

    # Called by the engine, on any thread.

    def open_room(self, number: int) -> Sender:
        """A sender for a free room number. Raises `RoomError` if it is in use."""
        entry = SenderRoom(Sender(number, self), self.context.observation.record(number))
        self._begin(entry, lambda: self._open(entry))
        if self.announcer is not None:
            # Only we have the sender yet: nobody can have closed it.
            self.announcer.opened(number)
        return entry.room

    def _on_close(self, room: Room) -> None:
        if self.announcer is not None:
            self.announcer.closed(room.room, early=room.poll() is not Status.SUCCESS)

    def submit(
        self, sender: Sender, rows: Mapping[str, RowsLike], tokens: tuple[int, int], after: Event | None
    ) -> None:
        """See `Sender.send`."""
        number = sender.room
        with self.rooms.lock:
            entry = self._unfinished(sender)
            span = checked_tokens(number, tokens)
            chunk = self._rows.chunk(rows, span)
            ranges, slots = self._rows.ranges_and_slots(chunk, span)
            if slots:
                raise RowsError(
                    f"prefill: room {number}: component {min(slots)} has rows of no token: pass them to finish"
                )
            entry.last_token = max(entry.last_token, span[1])
            handle = next(self._handles)

            def step() -> list[Action]:
                self._keep(entry, handle, chunk)
                return self.core.submit(number, handle, ranges, self.context.now())

            self._post_after(entry, after, step)

    def finish(
        self,
        sender: Sender,
        rows: Mapping[str, RowsLike],
        tokens: tuple[int, int] | None,
        aux: int | None,
        after: Event | None,
    ) -> None:
        """See `Sender.finish`."""
        number = sender.room
        with self.rooms.lock:
            entry = self._unfinished(sender)
            span = (entry.last_token, entry.last_token) if tokens is None else checked_tokens(number, tokens)
            chunk = self._rows.chunk(rows, span)
            slot = None if aux is None else self._rows.aux(aux)
            ranges, slots = self._rows.ranges_and_slots(chunk, span)
            entry.last_token = total = max(entry.last_token, span[1])
            entry.finished = True
            handle = next(self._handles)

            def step() -> list[Action]:
                self._keep(entry, handle, chunk)
                entry.aux = slot
                return self.core.finish(number, handle, total, ranges, slots, slot is not None, self.context.now())

            self._post_after(entry, after, step)

    def _post_after(self, entry: SenderRoom, after: Event | None, step: Callable[[], list[Action]]) -> None:
        """Post a step when the device has done what is ``after``. Those of a room keep their order."""

        def post(error: Exception | None) -> None:
            def fail() -> list[Action]:
                raise TransferFailed(f"prefill: room {entry.room.room}: the event of a chunk failed: {error}")

            self._post(entry, step if error is None else fail)

        self._later.run(entry, after, post)

    def _unfinished(self, sender: Sender) -> SenderRoom:
        """The entry of a sender that takes chunks. Raises `RoomError` for another. Under the table's lock."""
        entry = self.rooms.open_by(sender)
        if entry.finished:
            raise RoomError(f"prefill: room {sender.room} is finished; nothing can be sent after finish")
        return entry

    # Called by the announcer, on its thread.

    def room_refused(self, number: int, dp_rank: int) -> None:
        """The data-parallel replica ``dp_rank`` has announced this room too."""
        reason = (
            f"prefill: room {number} was opened by two data-parallel replicas: {dp_rank} announced it first, this is "
            f"{self.context.layout.coords.dp[0]}; send a request to one of them"
        )
        logger.error("%s", reason)
        self.context.control.post(lambda: self._fail_number(number, reason))

    def stop_looking(self) -> None:
        """See `Side.stop_looking`."""
        self._later.stop()

    def peers(self) -> tuple[PeerRank, ...]:
        """The decode ranks that are joined."""
        return self._destinations.peers()

    def figures(self) -> Figures:
        """See `Side.figures`."""
        return replace(super().figures(), tickets=len(self._writes), parked_offers=self.core.parked_offers)

    # Called by the control plane, on the control thread, as all that follows.

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A decode rank is gone."""
        self._destinations.on_disconnected(peer, reason)

    def _let_pass(self, now: float) -> float | None:
        """Take in finished writes and let time pass."""
        for transport in self.context.transports.values():
            for completion in transport.poll():
                self._written(completion, now)
        self.perform(self.core.tick(now))
        return self.core.next_deadline()

    def _on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, Hello):
            self._destinations.on_hello(peer, message)
        elif isinstance(message, Abort) and (rank := self._destinations.outside(peer)) is not None:
            self.perform(self.core.withdrawn(message, self.context.now(), rank=rank))
        else:
            if isinstance(message, Abort) and message.error == DigestMismatch.__name__:
                # Also where the room counts as sent: it is this side's memory, or its network, that may be broken.
                destination = self._destinations.get(peer)
                who = peer if destination is None else destination.rank.coords
                logger.error("prefill: room %d: decode rank %s says: %s", message.room, who, message.reason)
            self.perform(self.core.handle(peer, message, self.context.now()))

    def _on_malformed(self, peer: str, error: KVBatonError) -> None:
        self._destinations.on_malformed(peer, error)

    def _written(self, completion: Completion, now: float) -> None:
        if self._digests.holds(completion):
            return
        write = self._writes.ended(completion.ticket)
        if self.context.observation.detailed:
            self._tell_written(write, completion)
        digest_error = self._digests.error(completion.ticket)
        if completion.error:
            self._destinations.give_up_if_dead(write.peer, completion.error)
        else:
            self._count(write.room, write.moved)
        self.perform(self.core.written(completion.ticket, completion.error or digest_error, now, write.moved))

    def _tell_written(self, write: Write, completion: Completion) -> None:
        entry, destination = self.rooms.get(write.room), self._destinations.get(write.peer)
        if entry is not None:
            self.context.observation.chunk_written(
                entry.record,
                completion.ticket,
                write.peer,
                destination.index if destination else -1,
                write.started,
                write.moved,
                write.pieces,
                completion.error,
            )

    # Rooms.

    def _open(self, entry: SenderRoom) -> list[Action]:
        if entry.room.poll().terminal:
            return self.core.cancelled(entry.room.room, entry.room.reason, self.context.now())
        actions = self.core.open(entry.room.room, self.context.now())
        entry.opened = True
        return actions

    def _fail_number(self, number: int, reason: str) -> None:
        entry = self.rooms.get(number)
        if entry is not None and not entry.room.closed:
            self.perform(self._fail(entry, reason, TransferFailed))

    def _close_in_core(self, number: int) -> list[Action]:
        return self.core.close(number, self.context.now())

    @staticmethod
    def _keep(entry: SenderRoom, handle: int, chunk: Mapping[str, Pages]) -> None:
        # Nobody would drop the rows of a room that failed, and whose rows were released, before they came.
        if not entry.room.rows_released:
            entry.chunks[handle] = chunk

    def _let_go(self, entry: SenderRoom) -> None:
        entry.chunks.clear()
        entry.sent.clear()
        entry.aux = None

    def _count_rows(self, entry: SenderRoom) -> int:
        return sum(len(pages.rows) for chunk in list(entry.chunks.values()) for pages in chunk.values())

    def _count(self, number: int, moved: Mapping[str, int]) -> None:
        entry = self.rooms.get(number)
        if entry is not None:
            for name, nbytes in moved.items():
                entry.room.count(name, nbytes)

    def _show(self, entry: SenderRoom, status: Status, reason: str, error: type[TransferFailed]) -> None:
        if status is Status.TRANSFERRING and entry.room.offered is None:
            # Before the status: who sees that one may ask for this.
            account = self.core.account(entry.room.room)
            offer = account.parts[0].offer if account is not None and account.parts else None
            entry.room.offered = None if offer is None else Offered(offer.tokens, offer.prefix)
        super()._show(entry, status, reason, error)

    # Actions of the core.

    def _carry_out(self, action: Action) -> list[Action]:
        if isinstance(action, StartWrite):
            return self._start_write(action)
        if isinstance(action, SendDone):
            self.context.send(action.peer, self._complete(action))
            return []
        return super()._carry_out(action)

    def _not_carried_out(self, action: Action, error: Exception) -> list[Action]:
        if isinstance(action, StartWrite):
            if not isinstance(error, KVBatonError):
                logger.error("prefill: room %d: an unforeseen error", action.room, exc_info=error)
            self._destinations.give_up_if_dead(action.peer, str(error))
            return self.core.written(action.ticket, str(error), self.context.now())
        if isinstance(action, SendDone):
            # For the core this destination is served already: only this message can tell it otherwise.
            done = action.done
            abort = Abort(done.room, done.epoch, short_reason(f"the Done could not be sent: {error}"))
            return [*self._broken(done.room, error, "SendDone"), Send(action.peer, abort)]
        return super()._not_carried_out(action, error)

    def _start_write(self, action: StartWrite) -> list[Action]:
        destination, entry = self._destinations.get(action.peer), self.rooms.get(action.room)
        if destination is None or entry is None:
            return self.core.written(action.ticket, "the decode rank is gone", self.context.now())
        offer = self.core.offer(action.room, action.peer)
        aux: dict[str, list[Transfer]] = {}
        if action.aux and entry.aux is not None:
            aux = bind_aux(self.context, destination.plan, entry.aux, offer.aux_row)
        chunk = entry.chunks[action.handle]
        observed = self.context.now() if self.context.observation.detailed else None
        self._writes.start(action, destination, chunk, offer, aux, observed)
        if offer.digest:
            sent = entry.sent.setdefault(action.peer, Sent())
            self._digests.start(action, destination.plan, chunk, sent, entry.aux if action.aux else None)
        return []

    def _complete(self, action: SendDone) -> Done:
        """A Done with what the core cannot know: aux data and digests."""
        done, destination, entry = action.done, self._destinations.get(action.peer), self.rooms.get(action.done.room)
        if destination is None or entry is None:
            return done
        if action.aux:
            done = self._with_aux(action.peer, done)
        if not self.core.offer(done.room, action.peer).digest:
            return done
        sent = entry.sent.get(action.peer, Sent())
        if action.aux and entry.aux is not None:
            sent.add(digests_of(self.context, aux_portion(self.context.layout, destination.plan, "source", entry.aux)))
        return msgspec.structs.replace(done, digests=as_sent(sent.sums))

    def _with_aux(self, peer: str, done: Done) -> Done:
        """Put the aux slot's bytes into Done."""
        destination, entry = self._destinations.get(peer), self.rooms.get(done.room)
        if destination is None or entry is None or entry.aux is None:
            return done
        packed, moved = pack_aux(self.context, destination.plan, entry.aux)
        self._count(done.room, moved)
        observation = self.context.observation
        if observation.detailed and moved:
            now = self.context.now()
            observation.chunk_written(
                entry.record, 0, peer, destination.index, now, moved, dict.fromkeys(moved, 1), transport=CONTROL
            )
        return msgspec.structs.replace(done, bytes={**done.bytes, **moved}, aux=packed)
