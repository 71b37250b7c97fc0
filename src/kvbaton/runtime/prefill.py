"""The prefill side of a manager: drives `PrefillCore`, answers handshakes, binds chunks to rows and starts writes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvbaton import copy
from kvbaton.errors import KVBatonError, RoomError, RowsError, TransferAborted, TransportError
from kvbaton.plan import Pages, PairPlan, Transfer
from kvbaton.protocol import (
    Abort,
    Action,
    Done,
    Hello,
    Message,
    PrefillCore,
    Refused,
    RoomChanged,
    RowsReleased,
    Send,
    SendDone,
    StartWrite,
    Status,
    Welcome,
    decode,
    encode,
    rows_from_bytes,
)
from kvbaton.protocol.handshake import Accepted, answer_hello, refuse
from kvbaton.protocol.messages import MAX_TOKENS, short_reason
from kvbaton.runtime.context import Context
from kvbaton.runtime.rooms import Sender
from kvbaton.runtime.rows import RowsLike, aux_pages, pages_by_component
from kvbaton.transport.base import Completion, RemotePeer, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Destination:
    """A decode rank that this rank writes to."""

    plan: PairPlan
    transport: Transport
    remote: RemotePeer


@dataclass
class _Chunk:
    """Rows that the engine handed over with one `send` or `finish`."""

    pages: dict[str, Pages]


@dataclass
class _SenderRoom:
    """What the runtime keeps of a room besides the core's own state."""

    sender: Sender
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    """Touched by the control thread only; empty once the rows are released."""
    aux: _Chunk | None = None
    """The chunk that holds the aux slot."""
    last_token: int = 0
    finished: bool = False


class PrefillSide:
    """The control thread's handler on a prefill rank, and what `Sender` calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.core = PrefillCore(context.settings.deadlines)
        self._lock = threading.Lock()
        self._rooms: dict[int, _SenderRoom] = {}
        self._destinations: dict[str, _Destination] = {}
        self._gone: set[str] = set()
        self._handshaking: set[str] = set()
        self._moved: dict[int, tuple[int, str, Counter[str]]] = {}
        self._handles = itertools.count(1)
        self._closing = ""
        """Why no room can begin any more; empty as long as rooms can."""
        self.malformed: Counter[str] = Counter()
        """Frames dropped because they could not be decoded, by error."""

    # Called by the engine, on any thread.

    def open_room(self, number: int) -> Sender:
        """A sender for a free room number. Raises `RoomError` if it is in use."""
        sender = Sender(number, self)
        with self._lock:
            if number in self._rooms:
                raise RoomError(
                    f"prefill: room {number} is in use ({self._rooms[number].sender.poll().value}); close its sender "
                    "first, and wait until its rows are released"
                )
            room = self._rooms[number] = _SenderRoom(sender)
            self._post(room, lambda: self._open(number))
        return sender

    def submit(self, sender: Sender, rows: Mapping[str, RowsLike], tokens: tuple[int, int]) -> None:
        """See `Sender.send`."""
        with self._lock:
            room = self._own(sender)
            span = self._range(room, tokens)
            chunk = _Chunk(self._pages(rows, span))
            ranges, slots = self._split(chunk.pages, span)
            if slots:
                raise RowsError(
                    f"prefill: room {sender.room}: component {min(slots)} has rows of no token: pass them to finish"
                )
            room.last_token = max(room.last_token, span[1])
            handle = next(self._handles)

            def step() -> list[Action]:
                room.chunks[handle] = chunk
                return self.core.submit(sender.room, handle, ranges, self._context.now())

            self._post(room, step)

    def finish(
        self, sender: Sender, rows: Mapping[str, RowsLike], tokens: tuple[int, int] | None, aux: int | None
    ) -> None:
        """See `Sender.finish`."""
        with self._lock:
            room = self._own(sender)
            span = (room.last_token, room.last_token) if tokens is None else self._range(room, tokens)
            pages = self._pages(rows, span)
            if aux is not None:
                pages |= aux_pages(self._context.layout, aux, "prefill")
            chunk = _Chunk(pages)
            ranges, slots = self._split(pages, span)
            room.last_token = total = max(room.last_token, span[1])
            room.finished = True
            handle = next(self._handles)

            def step() -> list[Action]:
                room.chunks[handle] = chunk
                room.aux = chunk if aux is not None else None
                return self.core.finish(sender.room, handle, total, ranges, slots, aux is not None, self._context.now())

            self._post(room, step)

    def abort(self, sender: Sender, reason: str) -> None:
        """See `Sender.abort`."""
        room = self._rooms.get(sender.room)
        if room is not None and room.sender is sender:
            self._post(room, lambda: self.core.abort(sender.room, reason, self._context.now()))

    def close_room(self, sender: Sender) -> None:
        """See `Sender.close`."""
        with self._lock:
            room = self._rooms.get(sender.room)
            if room is None or room.sender is not sender or sender.closed:
                return
            sender.closed = True
            # Posted under the lock: what opens the number next is posted after it.
            self._context.control.post(lambda: self._perform(self.core.close(sender.room)))
            if sender.rows_released:
                del self._rooms[sender.room]

    def _post(self, room: _SenderRoom, step: Callable[[], list[Action]]) -> None:
        """Take a step of the core on the control thread. An error in it fails the room: nobody else would hear."""

        def run() -> None:
            number = room.sender.room
            if self._rooms.get(number) is not room:
                return
            try:
                actions = step()
            except Exception as error:
                actions = self._broken(number, error)
            self._perform(actions)
            if room.sender.rows_released:
                room.chunks.clear()

        self._context.control.post(run)

    def _open(self, number: int) -> list[Action]:
        actions = self.core.open(number, self._context.now())
        if self._closing:
            actions += self.core.abort(number, self._closing, self._context.now())
        return actions

    def _own(self, sender: Sender) -> _SenderRoom:
        room = self._rooms.get(sender.room)
        if room is None or room.sender is not sender or sender.closed:
            raise RoomError(f"prefill: room {sender.room} was closed; ask the manager for a new sender")
        if room.finished:
            raise RoomError(f"prefill: room {sender.room} is finished; nothing can be sent after finish")
        return room

    def _range(self, room: _SenderRoom, tokens: tuple[int, int]) -> tuple[int, int]:
        first, last = int(tokens[0]), int(tokens[1])
        if not 0 <= first <= last <= MAX_TOKENS:
            raise RowsError(f"prefill: room {room.sender.room}: tokens {first}..{last} are no range of tokens")
        return first, last

    def _pages(self, rows: Mapping[str, RowsLike], tokens: tuple[int, int]) -> dict[str, Pages]:
        layout = self._context.layout
        ranges = {component.name: tokens for component in layout.components}
        return pages_by_component(layout, rows, ranges, "prefill")

    def _split(
        self, pages: Mapping[str, Pages], tokens: tuple[int, int]
    ) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
        """Token ranges of the paged components, and the names of the slot components."""
        ranges, slots = {}, set()
        for component in self._context.layout.components:
            if component.name not in pages:
                continue
            if component.kind == "slot":
                slots.add(component.name)
            elif component.kind != "aux":
                # Pages that begin later than the chunk hold only its end: a window's rows, for instance.
                first = max(tokens[0], self._context.layout.owned.global_token(pages[component.name].start))
                if first < tokens[1]:
                    ranges[component.name] = (first, tokens[1])
        return ranges, frozenset(slots)

    # Called by the control plane, on its thread.

    def on_frame(self, peer: str, frame: bytes) -> None:
        """A frame of a decode rank came."""
        try:
            message = decode(frame)
        except KVBatonError as error:
            self._drop(peer, error)
            return
        if isinstance(message, Hello):
            self._on_hello(peer, message)
        else:
            self._perform(self.core.handle(peer, message, self._context.now()))

    def _drop(self, peer: str, error: KVBatonError) -> None:
        kind = type(error).__name__
        self.malformed[kind] += 1
        # The first of each kind is worth a line; strangers could fill the log with the rest.
        level = logging.WARNING if self.malformed[kind] == 1 else logging.DEBUG
        logger.log(level, "prefill: a frame of %s was dropped: %s", peer, error)
        if peer not in self._destinations and peer not in self._handshaking:
            # Perhaps a Hello of another release: better refused now than waited for.
            self._send(peer, refuse(self._context.instance, error))

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A decode rank is gone."""
        if peer in self._handshaking:
            self._gone.add(peer)
        destination = self._destinations.pop(peer, None)
        self._perform(self.core.peer_lost(peer, reason, self._context.now()))
        if destination is not None:
            self._disconnect(destination)

    def _disconnect(self, destination: _Destination) -> None:
        # It may wait for copies that are under way.
        self._context.in_background(
            lambda: destination.transport.disconnect(destination.remote),
            lambda result: None,
            lambda error: logger.debug("prefill: disconnecting from %s: %s", destination.remote.instance, error),
        )

    def on_turn(self, now: float) -> float | None:
        """Take in finished writes and let time pass."""
        for transport in self._context.transports.values():
            for completion in transport.poll():
                self._written(completion, now)
        self._perform(self.core.tick(now))
        return self.core.next_deadline()

    def _written(self, completion: Completion, now: float) -> None:
        number, peer, moved = self._moved.pop(completion.ticket, (0, "", Counter()))
        if not completion.error:
            self._count(number, moved)
        else:
            self._give_up_if_dead(peer, completion.error)
        self._perform(self.core.written(completion.ticket, completion.error, now, moved))

    def _give_up_if_dead(self, peer: str, error: str) -> None:
        """Part from a decode rank whose control connection lives while its data connection does not.

        Before anything else is said of its rooms: it shall begin its next one with a new handshake.
        """
        destination = self._destinations.get(peer)
        if destination is None or destination.remote.alive:
            return
        self._send(peer, Refused(self._context.instance, short_reason(f"the data connection ended: {error}")))
        self.on_disconnected(peer, error)

    def fail_all(self, reason: str) -> None:
        """Abort every room, and let none begin: the manager closes."""
        self._closing = reason
        for number in list(self._rooms):
            self._perform(self.core.abort(number, reason, self._context.now()))

    # Handshake.

    def _on_hello(self, peer: str, hello: Hello) -> None:
        if peer in self._destinations or peer in self._handshaking:
            self.core.unexpected["second Hello"] += 1
            return
        self._handshaking.add(peer)
        context = self._context

        def work() -> tuple[Accepted, _Destination, Welcome]:
            accepted = answer_hello(
                hello,
                instance=context.instance,
                model=context.model,
                layout=context.layout,
                transports=tuple(context.transports),
            )
            destination = self._connect(hello, accepted)
            transport = destination.transport
            try:
                welcome = accepted.welcome(context.instance, transport.name, transport.describe())
            except BaseException:
                transport.disconnect(destination.remote)
                raise
            return accepted, destination, welcome

        context.in_background(
            work, lambda result: self._joined(peer, *result), lambda error: self._refused(peer, error)
        )

    def _connect(self, hello: Hello, accepted: Accepted) -> _Destination:
        """Reach the decode rank by the first transport that works, in our order of preference."""
        tried = []
        for name in accepted.transports:
            transport = self._context.transports[name]
            try:
                remote = transport.connect(hello.transports[name])
            except TransportError as error:
                tried.append(f"{name}: {error}")
                continue
            if tried:
                logger.info("prefill: decode rank %s is reached by %s (%s)", hello.instance, name, "; ".join(tried))
            return _Destination(accepted.plan, transport, remote)
        raise TransportError(
            f"prefill rank {self._context.layout.coords} cannot reach decode rank {hello.layout.coords}: "
            + "; ".join(tried)
        )

    def _joined(self, peer: str, accepted: Accepted, destination: _Destination, welcome: Welcome) -> None:
        self._handshaking.discard(peer)
        if peer in self._gone:
            self._gone.discard(peer)
            self._disconnect(destination)
            return
        self._destinations[peer] = destination
        self._perform(self.core.peer_joined(peer, accepted.share))
        self._send(peer, welcome)

    def _refused(self, peer: str, error: Exception) -> None:
        self._handshaking.discard(peer)
        if peer in self._gone:
            self._gone.discard(peer)
            return
        if not isinstance(error, KVBatonError):
            logger.error("prefill: a handshake failed in an unforeseen way", exc_info=error)
        logger.warning("prefill: %s was refused: %s", peer, error)
        self._send(peer, refuse(self._context.instance, error))

    # Actions of the core.

    def _send(self, peer: str, message: Message) -> None:
        self._context.control.send(peer, encode(message))

    def _perform(self, actions: list[Action]) -> None:
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            try:
                queue.extend(self._carry_out(action))
            except Exception as error:
                queue.extend(self._failed(action, error))

    def _carry_out(self, action: Action) -> list[Action]:
        if isinstance(action, Send):
            self._send(action.peer, action.message)
        elif isinstance(action, StartWrite):
            return self._start_write(action)
        elif isinstance(action, SendDone):
            self._send_done(action)
        elif isinstance(action, RoomChanged):
            self._show(action)
        elif isinstance(action, RowsReleased):
            self._released(action.room)
        return []

    def _failed(self, action: Action, error: Exception) -> list[Action]:
        """An action could not be carried out: the room that it belongs to fails."""
        if isinstance(action, StartWrite):
            self._moved.pop(action.ticket, None)
            if not isinstance(error, KVBatonError):
                logger.error("prefill: room %d: an unforeseen error", action.room, exc_info=error)
            self._give_up_if_dead(action.peer, str(error))
            return self.core.written(action.ticket, str(error), self._context.now())
        if isinstance(action, SendDone):
            # For the core this destination is served already: only this message can tell it otherwise.
            done = action.done
            abort = Abort(done.room, done.epoch, short_reason(f"the Done could not be sent: {error}"))
            return [*self._broken(done.room, error), Send(action.peer, abort)]
        number = getattr(action.message if isinstance(action, Send) else action, "room", None)
        if number is None:
            logger.error("prefill: %s could not be carried out", type(action).__name__, exc_info=error)
            return []
        return self._broken(number, error)

    def _broken(self, number: int, error: Exception) -> list[Action]:
        """Fail a room because of an error on this side."""
        if not isinstance(error, KVBatonError):
            logger.error("prefill: room %d: an unforeseen error", number, exc_info=error)
        actions = self.core.abort(number, str(error), self._context.now())
        room = self._rooms.get(number)
        if room is not None:
            room.sender.show(Status.FAILED, str(error))
            if self.core.rows_released(number):
                room.sender.show_released()
        return actions

    def _start_write(self, action: StartWrite) -> list[Action]:
        destination = self._destinations.get(action.peer)
        room = self._rooms.get(action.room)
        if destination is None or room is None:
            return self.core.written(action.ticket, "the decode rank is gone", self._context.now())
        transfers, moved = self._bind(destination, room.chunks[action.handle], action)
        self._moved[action.ticket] = (action.room, action.peer, moved)
        destination.transport.write(destination.remote, transfers, action.ticket)
        return []

    def _bind(
        self, destination: _Destination, chunk: _Chunk, action: StartWrite
    ) -> tuple[list[Transfer], Counter[str]]:
        offered = self.core.offer(action.room, action.peer).components
        transfers: list[Transfer] = []
        moved: Counter[str] = Counter()
        for name, tokens in action.pieces.items():
            target = Pages(rows_from_bytes(offered[name].rows), offered[name].start)
            bound = destination.plan.bind(name, tokens, chunk.pages[name], target)
            moved[name] = sum(transfer.nbytes for transfer in bound)
            transfers += bound
        for name in action.slots:
            bound = destination.plan.bind_slots(name, chunk.pages[name].rows, rows_from_bytes(offered[name].rows))
            moved[name] = sum(transfer.nbytes for transfer in bound)
            transfers += bound
        return transfers, moved

    def _send_done(self, action: SendDone) -> None:
        done = action.done
        if action.aux:
            done = self._with_aux(action.peer, done)
        self._send(action.peer, done)

    def _with_aux(self, peer: str, done: Done) -> Done:
        """Put the aux slot's bytes into Done, in the order in which the receiver's plan takes them out."""
        destination, room = self._destinations.get(peer), self._rooms.get(done.room)
        if destination is None or room is None or room.aux is None:
            return done
        packed = bytearray()
        moved = dict(done.bytes)
        for component in self._context.aux_components:
            if component.name not in destination.plan.components:
                continue
            rows = room.aux.pages[component.name].rows
            # Only the source side of the transfer is used: the destination's row is the receiver's own business.
            for transfer in destination.plan.bind_slots(component.name, rows, rows * 0):
                part = bytearray(transfer.nbytes)
                copy.gather(
                    transfer.boxes.shape, transfer.boxes.source, transfer.source_units, self._context.bases(), part
                )
                packed += part
                moved[component.name] = moved.get(component.name, 0) + len(part)
        self._count(done.room, Counter({name: moved[name] for name in moved.keys() - done.bytes.keys()}))
        return msgspec.structs.replace(done, bytes=moved, aux=bytes(packed))

    def _count(self, number: int, moved: Counter[str]) -> None:
        room = self._rooms.get(number)
        if room is not None:
            for name, nbytes in moved.items():
                room.sender.count(name, nbytes)

    def _show(self, action: RoomChanged) -> None:
        room = self._rooms.get(action.room)
        if room is None:
            return
        room.sender.show(action.status, action.reason, action.error)
        if action.status is Status.FAILED:
            # An engine that aborts knows why: that is part of every day's work.
            level = logging.INFO if action.error is TransferAborted else logging.WARNING
            logger.log(level, "prefill: room %d failed: %s", action.room, action.reason)

    def _released(self, number: int) -> None:
        room = self._rooms.get(number)
        if room is None:
            return
        room.chunks.clear()
        room.aux = None
        room.sender.show_released()
        with self._lock:
            # A sender that was not closed before may be closed, and its number be used again, by now.
            if room.sender.closed and self._rooms.get(number) is room:
                del self._rooms[number]
