"""What both sides of a manager do alike: keep rooms, take in frames, carry out what a core asks for, fail a room.

Who may touch what:

* The *engine's threads* call `Sender` and `Receiver`. These calls come out at the methods of a side that are marked
  "called by the engine": they check arguments, touch the table of rooms under its lock, and post the rest.
* The *control thread* does everything else, here and in the parts of a side (`Sources`, `LostPeers`, `Destinations`,
  `Writes`, and the cores). None of that needs a lock.
* *Background threads* run the work given to `Context.in_background`, which may block. It touches no state of a side;
  its result comes back to the control thread.

What an engine reads from a room (`poll`, `reason`...) is replaced as a whole, and may be read by any thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol

from kvbaton.errors import KVBatonError, TransferAborted, TransferFailed
from kvbaton.observe.base import Figures
from kvbaton.protocol import Action, Message, RoomAccount, RoomChanged, RowsReleased, Send, Status, decode
from kvbaton.runtime.aux_data import aux_nbytes
from kvbaton.runtime.context import Context
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.rooms import Room
from kvbaton.runtime.table import Entry, RoomTable

logger = logging.getLogger(__name__)


class RoomCore(Protocol):
    """What `Side` asks of a core by itself."""

    unexpected: Counter[str]

    def abort(self, room: int, reason: str, now: float) -> list[Action]:
        """Fail a room, if it has not ended."""

    def account(self, room: int) -> RoomAccount | None:
        """What there is to tell of a room."""


class Side(ABC, Generic[Entry]):
    """The control thread's handler (see `ControlHandler`) and the engine's way to it. One for each manager.

    ``name`` is the side's word in every message, ``noun`` what its rooms are to the engine.
    """

    core: RoomCore

    def __init__(self, context: Context, name: str, noun: str) -> None:
        self.context = context
        self.rooms: RoomTable[Entry] = RoomTable(name, noun)
        self.malformed: Counter[str] = Counter()
        """Frames dropped because they could not be decoded, by error."""
        self._name = name
        self._noun = noun

    # Called by the engine, on any thread.

    def abort(self, room: Room, reason: str) -> None:
        """See `Sender.abort` and `Receiver.abort`."""
        entry = self.rooms.get(room.room)
        if entry is not None and entry.room is room:
            self._post(entry, lambda: self._fail(entry, reason, TransferAborted))

    def shut_down(self) -> None:
        """The manager closes: let no room begin any more, fail those that there are, and tell the peers why.

        `RoomTable.quiet` of ``rooms`` says when every row is back.
        """
        self.rooms.shut()
        self.context.control.post(lambda: self.fail_all(f"the {self._name} rank shut down"))
        self.context.control.post(self.stop_looking)

    def close_room(self, room: Room) -> None:
        """See `Sender.close` and `Receiver.close`."""
        with self.rooms.lock:
            entry = self.rooms.held_by(room)
            if entry is None:
                return
            room.closed = True
            self._on_close(room)
            # Posted under the lock: what opens the number next is posted after it.
            self.context.control.post(lambda: self.perform(self._close(entry)))
            self.rooms.remove_if_over(entry)

    def _begin(self, entry: Entry, step: Callable[[], list[Action]]) -> None:
        """Enter a room and take its first step. Raises `RoomError` if its number is in use."""
        with self.rooms.lock:
            self.rooms.add(entry)
            self.context.observation.room_opened(entry.record)
            self._post(entry, step)

    def _post(self, entry: Entry, step: Callable[[], list[Action]]) -> None:
        """`_take` a step, on the control thread."""
        self.context.control.post(lambda: self._take(entry, step))

    # Called by the control plane and the manager, on the control thread.

    def on_frame(self, peer: str, frame: bytes) -> None:
        """A frame came from a peer, or from a stranger."""
        try:
            messages = decode(frame)
        except KVBatonError as error:
            kind = type(error).__name__
            self.malformed[kind] += 1
            # The first of each kind is worth a line; strangers could fill the log with the rest.
            level = logging.WARNING if self.malformed[kind] == 1 else logging.DEBUG
            logger.log(level, "%s: a frame of %s was dropped: %s", self._name, peer, error)
            self.context.observation.frame_dropped(kind, str(error))
            self._on_malformed(peer, error)
            return
        for message in messages:
            self._on_message(peer, message)

    @abstractmethod
    def on_disconnected(self, peer: str, reason: str) -> None:
        """A peer is gone."""

    def on_refused(self, peer: str, reason: str) -> None:
        """A peer that we dialled does not share our secret."""
        self.on_disconnected(peer, reason)

    @abstractmethod
    def peers(self) -> tuple[PeerRank, ...]:
        """The ranks of the other side that passed the handshake. On any thread."""

    def figures(self) -> Figures:
        """How things stand, but for the control plane. On any thread."""
        rooms: Counter[str] = Counter()
        quarantined = []
        for entry in self.rooms.entries():
            status = entry.room.poll()
            rooms[status.value] += 1
            if status is Status.FAILED and not entry.room.rows_released:
                quarantined.append(self._count_rows(entry))
        return Figures(
            rooms=rooms,
            quarantined_rooms=len(quarantined),
            quarantined_rows=sum(quarantined),
            peers=Counter(peer.transport for peer in self.peers()),
            dropped_frames=dict(self.malformed),
            ignored_messages=dict(self.core.unexpected),
        )

    def on_turn(self, now: float) -> float | None:
        """Let time pass, and send what this turn had to say; returns when the next turn is due at the latest."""
        try:
            return self._let_pass(now)
        finally:
            self.context.outbox.flush()

    def stop_looking(self) -> None:
        """Drop what is not a room's any more: the manager closes."""

    def fail_all(self, reason: str) -> None:
        """Abort every room: the manager closes, and lets none begin any more."""
        for entry in self.rooms.entries():
            self.perform(self._fail(entry, reason, TransferAborted))

    def perform(self, actions: list[Action]) -> None:
        """Carry out what the core asks for, in order. Never raises: an error fails the room that it belongs to."""
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            try:
                queue.extend(self._carry_out(action))
            except Exception as error:
                queue.extend(self._not_carried_out(action, error))

    # Each side's own part; all on the control thread. Actions that are returned will be performed.

    @abstractmethod
    def _let_pass(self, now: float) -> float | None:
        """Let time pass; returns when that is due again at the latest."""

    @abstractmethod
    def _on_message(self, peer: str, message: Message) -> None:
        """A message came."""

    @abstractmethod
    def _on_malformed(self, peer: str, error: KVBatonError) -> None:
        """A frame came that could not be decoded."""

    @abstractmethod
    def _close_in_core(self, number: int) -> list[Action]:
        """The core shall forget a room that it knows."""

    def _on_close(self, room: Room) -> None:
        """The engine closed a room. On the engine's thread, under the lock of the table."""

    @abstractmethod
    def _let_go(self, entry: Entry) -> None:
        """Drop what is kept for a room whose rows are released."""

    @abstractmethod
    def _count_rows(self, entry: Entry) -> int:
        """The rows that belong to a room's transfer. On any thread."""

    def _carry_out(self, action: Action) -> list[Action]:
        """Carry out one action; subclasses add those of their own core. Returns what follows from it."""
        if isinstance(action, Send):
            self.context.send(action.peer, action.message)
        elif isinstance(action, RoomChanged):
            entry = self.rooms.get(action.room)
            if entry is not None:
                self._show(entry, action.status, action.reason, action.error)
        elif isinstance(action, RowsReleased):
            entry = self.rooms.get(action.room)
            if entry is not None:
                self._release(entry)
        return []

    def _not_carried_out(self, action: Action, error: Exception) -> list[Action]:
        """An action raised ``error``: the room that it belongs to fails. Returns what follows from that."""
        number = getattr(action.message if isinstance(action, Send) else action, "room", None)
        return self._broken(number, error, type(action).__name__)

    # Steps and ends of a room.

    def _take(self, entry: Entry, step: Callable[[], list[Action]]) -> None:
        """Take a step of a room that is still there. An error in it fails the room: nobody else would hear of it."""
        number = entry.room.room
        if self.rooms.get(number) is not entry:
            return
        try:
            actions = step()
        except Exception as error:
            actions = self._broken(number, error, "a step")
        self.perform(actions)

    def _close(self, entry: Entry) -> list[Action]:
        if entry.opened:
            if not entry.room.poll().terminal:
                # The core may forget it before we can tell how it ended.
                self._take_account(entry)
            return self._close_in_core(entry.room.room)
        return self._fail(entry, f"the {self._noun} was closed before the room had ended", TransferAborted)

    def _fail(self, entry: Entry, reason: str, error: type[TransferFailed]) -> list[Action]:
        """Fail a room, if it has not ended."""
        if entry.opened:
            return self.core.abort(entry.room.room, reason, self.context.now())
        if not entry.room.rows_released:
            # No peer ever heard of its rows, so nothing touches them.
            self._show(entry, Status.FAILED, reason, error)
            self._release(entry)
        return []

    def _broken(self, number: int | None, error: Exception, what: str) -> list[Action]:
        """Fail a room because ``what`` raised an error on this side."""
        entry = None if number is None else self.rooms.get(number)
        if entry is None:
            logger.error("%s: %s could not be carried out", self._name, what, exc_info=error)
            return []
        if not isinstance(error, KVBatonError):
            logger.error("%s: room %d: an unforeseen error", self._name, number, exc_info=error)
        actions = self._fail(entry, str(error), TransferFailed)
        # Also where the core counts it as ended well.
        self._show(entry, Status.FAILED, str(error), TransferFailed)
        return actions

    def _show(self, entry: Entry, status: Status, reason: str, error: type[TransferFailed]) -> None:
        observation, room, record = self.context.observation, entry.room, entry.record
        if room.poll().terminal:
            return
        if observation.detailed or status is Status.FAILED:
            self._take_account(entry)
        room.show(status, reason, error)
        if status.terminal:
            observation.room_ended(record, status, reason, error, room.bytes_by_component)
        else:
            observation.room_transferring(record)

    def _take_account(self, entry: Entry) -> None:
        """Put what the core knows of a room into its record."""
        number = entry.room.room
        account = self.core.account(number) if entry.opened else None
        entry.record.rows = self._count_rows(entry)
        self.context.observation.take_in(entry.record, account, partial(aux_nbytes, self.context))

    def _release(self, entry: Entry) -> None:
        self._let_go(entry)
        entry.room.show_released()
        self.context.observation.rows_released(entry.record)
        with self.rooms.lock:
            self.rooms.remove_if_over(entry)
