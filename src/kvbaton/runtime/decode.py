"""The decode side of a manager: finds and greets prefill ranks, drives `DecodeCore`, and takes in aux data."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvbaton import copy
from kvbaton.errors import (
    DeadlineExceeded,
    KVBatonError,
    PeerLost,
    RoomError,
    RowsError,
    TransferAborted,
    TransferFailed,
)
from kvbaton.plan import Transfer
from kvbaton.protocol import (
    Action,
    DecodeCore,
    Deliver,
    Done,
    FencePeer,
    Message,
    Refused,
    RoomChanged,
    Rows,
    RowsReleased,
    Send,
    Status,
    Welcome,
    decode,
    encode,
    rows_to_bytes,
)
from kvbaton.protocol.handshake import check_welcome, make_hello, refusal
from kvbaton.protocol.messages import MAX_TOKENS
from kvbaton.registry import RegistryClient
from kvbaton.runtime.context import Context
from kvbaton.runtime.rooms import Receiver
from kvbaton.runtime.rows import RowsLike, aux_pages, needed_tokens, pages_by_component
from kvbaton.runtime.source import Link, Part, Source, SourceKey, Withdrawn, look_up
from kvbaton.transport.base import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OfferedRows:
    """What `Receiver.offer` was given."""

    components: dict[str, Rows]
    tokens: int
    prefix: int
    aux: int


@dataclass
class _ReceiverRoom:
    """What the runtime keeps of a room besides the core's own state."""

    receiver: Receiver
    source: Source | None = None
    offered: _OfferedRows | None = None
    opened: bool = False
    """Whether the core knows the room."""


@dataclass
class _Lost:
    """A prefill rank that is gone and may still write."""

    peer: str
    link: Link
    next_try: float = 0.0
    failed: bool = False
    """Whether an error of the transport was logged."""


class DecodeSide:
    """The control thread's handler on a decode rank, and what `Receiver` calls."""

    def __init__(self, context: Context, deployment: str, destination_index: int, destinations: int) -> None:
        self._context = context
        self._deployment = deployment
        self._destination_index = destination_index
        self._destinations = destinations
        self.core = DecodeCore(context.settings.deadlines, inspect=self._inspect)
        self._lock = threading.Lock()
        self._rooms: dict[int, _ReceiverRoom] = {}
        self._sources: dict[SourceKey, Source] = {}
        self._retired: set[Source] = set()
        self._source_of_peer: dict[str, Source] = {}
        self._lost: dict[str, _Lost] = {}
        self._closing = ""
        """Why no room can begin any more; empty as long as rooms can."""
        self.malformed: Counter[str] = Counter()
        """Frames dropped because they could not be decoded, by error."""

    # Called by the engine, on any thread.

    def open_room(self, number: int, registry: str, client: RegistryClient, dp_rank: int) -> Receiver:
        """A receiver for a free room number. Raises `RoomError` if it is in use."""
        receiver = Receiver(number, self, registry)
        with self._lock:
            if number in self._rooms:
                raise RoomError(
                    f"decode: room {number} is in use ({self._rooms[number].receiver.poll().value}); close its "
                    "receiver first, and wait until its rows are released"
                )
            room = self._rooms[number] = _ReceiverRoom(receiver)
            self._post(room, lambda: self._open(room, SourceKey(registry, dp_rank), client))
        return receiver

    def offer(
        self, receiver: Receiver, rows: Mapping[str, RowsLike], tokens: int, prefix: int, aux: int | None
    ) -> None:
        """See `Receiver.offer`."""
        tokens, prefix = int(tokens), int(prefix)
        if not 0 <= prefix <= tokens <= MAX_TOKENS:
            raise RowsError(
                f"decode: room {receiver.room}: a prefix of {prefix} tokens is not within the {tokens} tokens"
            )
        layout = self._context.layout
        ranges = {component.name: needed_tokens(component, tokens, prefix) for component in layout.components}
        pages = pages_by_component(layout, rows, ranges, "decode")
        if aux is not None:
            aux = int(next(iter(aux_pages(layout, aux, "decode").values())).rows[0])
        components = {name: Rows(rows_to_bytes(value.rows), value.start) for name, value in pages.items()}
        with self._lock:
            room = self._rooms.get(receiver.room)
            if room is None or room.receiver is not receiver or receiver.closed:
                raise RoomError(f"decode: room {receiver.room} was closed; ask the manager for a new receiver")
            if room.offered is not None:
                raise RoomError(
                    f"decode: room {receiver.room} was offered already; one offer holds all of a request's rows"
                )
            room.offered = _OfferedRows(components, tokens, prefix, -1 if aux is None else aux)
            receiver.restart_clock()
            offering = room
            self._post(offering, lambda: self._send_offer(offering))

    def abort(self, receiver: Receiver, reason: str) -> None:
        """See `Receiver.abort`."""
        room = self._rooms.get(receiver.room)
        if room is not None and room.receiver is receiver:
            aborting = room
            self._post(aborting, lambda: self._fail(aborting, reason, TransferAborted))

    def close_room(self, receiver: Receiver) -> None:
        """See `Receiver.close`."""
        with self._lock:
            room = self._rooms.get(receiver.room)
            if room is None or room.receiver is not receiver or receiver.closed:
                return
            receiver.closed = True
            closing = room
            # Posted under the lock: what opens the number next is posted after it.
            self._context.control.post(lambda: self._close(closing))
            if receiver.rows_released:
                del self._rooms[receiver.room]

    def _post(self, room: _ReceiverRoom, step: Callable[[], None]) -> None:
        """Take a step on the control thread. An error in it fails the room: nobody else would hear of it."""

        def run() -> None:
            if self._rooms.get(room.receiver.room) is not room:
                return
            try:
                step()
            except Exception as error:
                self._broken(room, error)

        self._context.control.post(run)

    def _broken(self, room: _ReceiverRoom, error: Exception) -> None:
        """Fail a room because of an error on this side."""
        number = room.receiver.room
        if not isinstance(error, KVBatonError):
            logger.error("decode: room %d: an unforeseen error", number, exc_info=error)
        self._fail(room, str(error), TransferFailed)
        # Also where the core counts it as ended well.
        room.receiver.show(Status.FAILED, str(error))

    # Called by the control plane, on its thread.

    def on_frame(self, peer: str, frame: bytes) -> None:
        """A frame of a prefill rank came."""
        try:
            message = decode(frame)
        except KVBatonError as error:
            kind = type(error).__name__
            self.malformed[kind] += 1
            level = logging.WARNING if self.malformed[kind] == 1 else logging.DEBUG
            logger.log(level, "decode: a frame of %s was dropped: %s", peer, error)
            source = self._source_of_peer.get(peer)
            if source is not None and not source.ready:
                self._source_failed(source, error)
            return
        if isinstance(message, (Welcome, Refused)):
            self._on_answer(peer, message)
        else:
            self._perform(self.core.handle(peer, message, self._context.now()))

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A prefill rank is gone."""
        source = self._source_of_peer.pop(peer, None)
        if source is None:
            return
        link = source.links.pop(peer)
        self._retire(source)
        if not source.ready:
            if link.joined:
                self._part_from(peer, link, reason)
            where = f"prefill rank {link.part.registration.coords} at {link.part.registration.endpoint}"
            self._source_failed(source, PeerLost(f"{where} was lost during the handshake: {reason}"))
            return
        logger.warning("decode: prefill rank %s was lost: %s", link.part.registration.coords, reason)
        self._part_from(peer, link, reason)

    def _part_from(self, peer: str, link: Link, reason: str) -> None:
        now = self._context.now()
        self._perform(self.core.peer_lost(peer, reason, now))
        # Also where it has nothing of ours to write to: what transports keep of it goes with the fence.
        self._lost[peer] = _Lost(peer, link)
        self._fence(now)

    def on_turn(self, now: float) -> float | None:
        """Let time pass."""
        for transport in self._context.transports.values():
            transport.poll()
        self._perform(self.core.tick(now))
        self._fence(now)
        deadlines = [self.core.next_deadline(), *(lost.next_try for lost in self._lost.values())]
        for source in [source for source in self._sources.values() if not source.ready]:
            if now >= source.give_up:
                silent = [link for link in source.links.values() if not link.joined]
                names = ", ".join(str(link.part.registration.coords) for link in silent) or "the registry"
                seconds = self._context.settings.handshake_seconds
                self._source_failed(source, DeadlineExceeded(f"no answer within {seconds:g} s from {names}"))
            else:
                deadlines.append(source.give_up)
        return min((when for when in deadlines if when is not None), default=None)

    def fail_all(self, reason: str) -> None:
        """Abort every room, and let none begin: the manager closes."""
        self._closing = reason
        for room in list(self._rooms.values()):
            self._fail(room, reason, TransferAborted)

    # Sources.

    def _open(self, room: _ReceiverRoom, key: SourceKey, client: RegistryClient) -> None:
        if self._closing:
            self._fail(room, self._closing, TransferAborted)
        if room.receiver.poll().terminal:
            return
        source = self._sources.get(key)
        if source is None:
            source = self._find(key, client)
        if source.failure is not None:
            # The look-up could not even begin.
            self._fail(room, *_words(source, source.failure))
            return
        room.source = source
        source.rooms.add(room.receiver.room)
        if source.ready:
            self._open_in_core(room)

    def _find(self, key: SourceKey, client: RegistryClient) -> Source:
        context = self._context
        source = Source(key, client, context.now() + context.settings.handshake_seconds)
        self._sources[key] = source
        context.in_background(
            lambda: look_up(
                client,
                self._deployment,
                key.dp_rank,
                context.layout,
                self._destination_index,
                context.settings.striped,
            ),
            lambda parts: self._greet(source, parts),
            lambda error: self._source_failed(source, error),
        )
        return source

    def _greet(self, source: Source, parts: list[Part]) -> None:
        if source.failure is not None:
            return
        context = self._context
        source.grid = tuple(part.registration.layout for part in parts)
        descriptors = {name: transport.describe() for name, transport in context.transports.items()}
        lost = {each.link.part.registration.instance for each in self._lost.values()}
        for index, part in enumerate(parts):
            if part.registration.instance not in lost:
                # It may have been cut off before, and live: it greets us anew, and what it had stays cut off.
                for transport in context.transports.values():
                    transport.readmit(part.registration.instance)
            peer = context.control.dial(part.registration.endpoint)
            hello = make_hello(
                instance=context.instance,
                model=context.model,
                layout=context.layout,
                destination_index=self._destination_index,
                destinations=self._destinations,
                sources=source.grid,
                source_index=index,
                transports=descriptors,
                striped=context.settings.striped,
            )
            source.links[peer] = Link(peer, index, part, hello)
            self._source_of_peer[peer] = source
            self._send(peer, hello)

    def _on_answer(self, peer: str, message: Welcome | Refused) -> None:
        source = self._source_of_peer.get(peer)
        link = source.links[peer] if source is not None else None
        if source is not None and link is not None and link.joined and isinstance(message, Refused):
            # It gave this connection up: rooms in flight fail, and the next one begins with a new handshake.
            self._context.control.hang_up(peer)
            self.on_disconnected(peer, message.reason)
            return
        if source is None or link is None or link.joined or source.failure is not None:
            self.core.unexpected["second answer to Hello"] += 1
            return
        try:
            if isinstance(message, Refused):
                raise refusal(link.hello, message)
            self._join(link, message)
        except KVBatonError as error:
            self._source_failed(source, error)
            return
        if all(each.joined for each in source.links.values()):
            source.ready = True
            self._tell_withdrawn(source)
            for number in list(source.rooms):
                self._open_in_core(self._rooms[number])

    def _tell_withdrawn(self, source: Source) -> None:
        """Tell the prefill ranks of rooms that failed during the handshake: they would wait for an Offer."""
        withdrawn, source.withdrawn = source.withdrawn, []
        for number, reason in withdrawn:
            now = self._context.now()
            try:
                actions = [
                    *self.core.open(number, source.peers, now),
                    *self.core.abort(number, reason, now),
                    *self.core.close(number, now),
                ]
            except KVBatonError as error:
                logger.error("decode: room %d could not be withdrawn: %s", number, error)
                continue
            # The rest is about a room that the engine may have forgotten, or opened anew.
            self._perform([action for action in actions if isinstance(action, Send)])

    def _join(self, link: Link, welcome: Welcome) -> None:
        context = self._context
        check_welcome(link.hello, welcome)
        registered = link.part.registration
        if welcome.instance != registered.instance:
            raise PeerLost(
                f"prefill rank {registered.coords} at {registered.endpoint} was replaced: the registry names instance "
                f"{registered.instance}, {welcome.instance} answered; the next request looks it up again"
            )
        transport = context.transports[welcome.transport]
        transport.admit(welcome.descriptor)
        for lost in list(self._lost.values()):
            if lost.link.part.registration.instance == registered.instance and not self.core.may_write(lost.peer):
                # It lives, and no room waits for the end of its earlier connection.
                del self._lost[lost.peer]
        self._perform(self.core.peer_joined(link.peer, link.index, welcome.parts))
        link.transport = transport
        link.joined = True

    def _source_failed(self, source: Source, error: Exception) -> None:
        if source.failure is not None or source.ready:
            return
        if not isinstance(error, KVBatonError):
            logger.error("decode: a source failed in an unforeseen way", exc_info=error)
        source.withdrawn.clear()
        source.failure = error if isinstance(error, KVBatonError) else KVBatonError(str(error))
        logger.warning("decode: prefill source %s: %s", source.key.registry, error)
        self._retire(source)
        for number in list(source.rooms):
            self._fail(self._rooms[number], *_words(source, error))

    def _retire(self, source: Source) -> None:
        """Let no new room use it: the next one looks its ranks up again."""
        if self._sources.get(source.key) is source:
            del self._sources[source.key]
            self._retired.add(source)
            self._hang_up_if_idle(source)

    def _hang_up_if_idle(self, source: Source) -> None:
        if source.rooms or source not in self._retired:
            return
        self._retired.discard(source)
        for peer, link in list(source.links.items()):
            self._context.control.hang_up(peer)
            del self._source_of_peer[peer]
            if link.joined:
                self._perform(self.core.peer_lost(peer, "its source was given up", self._context.now()))
        source.links.clear()

    # Fencing.

    def _fence(self, now: float) -> None:
        for lost in list(self._lost.values()):
            transport = lost.link.transport
            if now < lost.next_try:
                continue
            lost.next_try = now + self._context.settings.fence_retry_seconds
            if transport is None or self._is_fenced(transport, lost):
                del self._lost[lost.peer]
                self._perform(self.core.peer_fenced(lost.peer, now))

    @staticmethod
    def _is_fenced(transport: Transport, lost: _Lost) -> bool:
        try:
            return transport.fence(lost.link.part.registration.instance)
        except Exception as error:
            # Not proven: the rows stay where they are.
            if not lost.failed:
                logger.error("decode: fencing %s failed", lost.link.part.registration.instance, exc_info=error)
            lost.failed = True
            return False

    # Rooms.

    def _open_in_core(self, room: _ReceiverRoom) -> None:
        if room.opened or room.receiver.poll().terminal or room.source is None:
            return
        try:
            actions = self.core.open(room.receiver.room, room.source.peers, self._context.now())
        except Exception as error:
            self._broken(room, error)
            return
        room.opened = True
        self._perform(actions)
        self._send_offer(room)

    def _send_offer(self, room: _ReceiverRoom) -> None:
        receiver = room.receiver
        if room.offered is None or not room.opened or receiver.poll() is not Status.WAITING:
            return
        offered = room.offered
        try:
            actions = self.core.offer(
                receiver.room,
                offered.components,
                offered.tokens,
                self._context.now(),
                prefix=offered.prefix,
                aux_row=offered.aux,
            )
        except Exception as error:
            self._broken(room, error)
            return
        self._perform(actions)

    def _fail(self, room: _ReceiverRoom, reason: str, error: type[TransferFailed]) -> None:
        receiver = room.receiver
        if room.opened:
            self._perform(self.core.abort(receiver.room, reason, self._context.now()))
        elif not receiver.rows_released:
            # Nothing was ever offered, so nothing can be written.
            receiver.show(Status.FAILED, reason, error)
            self._log_failure(receiver.room, reason, error)
            if room.source is not None:
                room.source.withdrawn.append(Withdrawn(receiver.room, reason))
            self._end(room)

    def _close(self, room: _ReceiverRoom) -> None:
        if room.opened:
            self._perform(self.core.close(room.receiver.room, self._context.now()))
        else:
            self._fail(room, "the receiver was closed before the room had ended", TransferAborted)

    def _released(self, number: int) -> None:
        room = self._rooms.get(number)
        if room is not None:
            self._end(room)

    def _end(self, room: _ReceiverRoom) -> None:
        self._leave_source(room)
        room.receiver.show_released()
        with self._lock:
            # A receiver that was not closed before may be closed, and its number be used again, by now.
            if room.receiver.closed and self._rooms.get(room.receiver.room) is room:
                del self._rooms[room.receiver.room]

    def _leave_source(self, room: _ReceiverRoom) -> None:
        source, room.source = room.source, None
        if source is not None:
            source.rooms.discard(room.receiver.room)
            self._hang_up_if_idle(source)

    # Actions of the core.

    def _send(self, peer: str, message: Message) -> None:
        self._context.control.send(peer, encode(message))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._carry_out(action)
            except Exception as error:
                number = getattr(action.message if isinstance(action, Send) else action, "room", None)
                room = None if number is None else self._rooms.get(number)
                if room is not None:
                    self._broken(room, error)
                else:
                    logger.error("decode: %s could not be carried out", type(action).__name__, exc_info=error)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.peer, action.message)
        elif isinstance(action, Deliver):
            self._deliver(action)
        elif isinstance(action, RoomChanged):
            self._show(action)
        elif isinstance(action, RowsReleased):
            self._released(action.room)
        elif isinstance(action, FencePeer):
            self._context.control.hang_up(action.peer)
            self.on_disconnected(action.peer, action.reason)

    def _show(self, action: RoomChanged) -> None:
        room = self._rooms.get(action.room)
        if room is None:
            return
        room.receiver.show(action.status, action.reason, action.error)
        if action.status is Status.FAILED:
            self._log_failure(action.room, action.reason, action.error)

    @staticmethod
    def _log_failure(number: int, reason: str, error: type[TransferFailed]) -> None:
        # An engine that aborts knows why: that is part of every day's work.
        level = logging.INFO if error is TransferAborted else logging.WARNING
        logger.log(level, "decode: room %d failed: %s", number, reason)

    def _aux_transfers(self, room: _ReceiverRoom, part: int) -> list[tuple[str, Transfer]]:
        if room.source is None or room.offered is None or room.offered.aux < 0:
            return []
        link = next(link for link in room.source.links.values() if link.index == part)
        row = np.array([room.offered.aux], np.int64)
        names = [component.name for component in self._context.aux_components]
        return [
            (name, transfer)
            for name in names
            if name in link.part.plan.components
            for transfer in link.part.plan.bind_slots(name, row * 0, row)
        ]

    def _inspect(self, number: int, done: Done) -> str:
        expected = sum(transfer.nbytes for _, transfer in self._aux_transfers(self._rooms[number], done.part))
        if expected != len(done.aux):
            return (
                f"{len(done.aux)} bytes of aux data came where {expected} belong: "
                "give an aux slot on both sides, or on neither"
            )
        return ""

    def _deliver(self, action: Deliver) -> None:
        room = self._rooms[action.room]
        at = 0
        for _, transfer in self._aux_transfers(room, action.part):
            packed = action.done.aux[at : at + transfer.nbytes]
            copy.scatter(
                transfer.boxes.shape,
                transfer.boxes.destination,
                transfer.destination_units,
                self._context.bases(),
                packed,
            )
            at += transfer.nbytes
        for name, nbytes in action.done.bytes.items():
            room.receiver.count(name, nbytes)


def _words(source: Source, error: Exception) -> tuple[str, type[TransferFailed]]:
    """Why the rooms of a source fail, and the class of it."""
    kind = type(error) if isinstance(error, TransferFailed) else TransferFailed
    return f"prefill source {source.key.registry}: {error}", kind
