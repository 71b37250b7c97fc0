"""The rooms of the prefill side in themselves: chunks become writes, writes end, rooms end, and rows are released.

Who asks for a room, and with what right, is the matter of `kvbaton.protocol.prefill_core`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from kvbaton.errors import RoomError, TransferAborted, TransferFailed
from kvbaton.protocol.account import RoomAccount
from kvbaton.protocol.actions import Action, RoomChanged, RowsReleased, Send, SendDone, StartWrite
from kvbaton.protocol.core import Core
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.messages import AbortAck, Message, Offer
from kvbaton.protocol.prefill_peer import PrefillPeer
from kvbaton.protocol.prefill_room import Destination, Finish, PrefillRoom, Submission, check_ranges, merge
from kvbaton.protocol.status import Status


class PrefillRooms(Core[PrefillRoom]):
    """Rooms that are open or still drain, the tickets of their writes, and the decode ranks that they are for."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        super().__init__(deadlines)
        self._peers: dict[str, PrefillPeer] = {}
        self._tickets: dict[int, tuple[PrefillRoom, Destination]] = {}
        self._numbers = itertools.count(1)

    # Calls of the engine.

    def submit(self, room: int, handle: int, ranges: Mapping[str, tuple[int, int]], now: float) -> list[Action]:
        """A chunk is ready: tokens ``[first, last)`` by component; ``handle`` is the runtime's key to its rows.

        Does nothing once the room has failed. Raises `RoomError` for a room that is not open or is finished, and
        `RowsError` for a range that is none.
        """
        state = self._open_room(room)
        if state.finish is not None:
            raise RoomError(f"sender: room {room} is finished; nothing can be sent after finish")
        check_ranges(ranges, None)
        if state.status.terminal:
            return []
        return self._submit(state, Submission(handle, dict(ranges)), now)

    def finish(
        self,
        room: int,
        handle: int,
        tokens: int,
        ranges: Mapping[str, tuple[int, int]],
        slots: Collection[str],
        aux: bool,
        now: float,
    ) -> list[Action]:
        """The last chunk is ready: the request has ``tokens`` tokens, and these slot components. Raises as `submit`."""
        state = self._open_room(room)
        if state.finish is not None:
            raise RoomError(f"sender: room {room} is finished already")
        check_ranges(ranges, tokens)
        for submission in state.submissions:
            check_ranges(submission.ranges, tokens)
        if state.status.terminal:
            return []
        last = Submission(handle, dict(ranges), frozenset(slots), aux)
        state.finish = Finish(tokens, last.slots, aux, merge([*state.submissions, last]))
        for destination in state.destinations.values():
            missing = destination.missing(state.finish)
            if missing:
                return self._fail(state, Failure(TransferFailed, missing))
        actions = self._submit(state, last, now)
        for destination in list(state.destinations.values()):
            actions += self._advance(state, destination)
        return actions

    def abort(self, room: int, reason: str, now: float) -> list[Action]:
        """Fail the room, if it is open and has not ended."""
        state = self._rooms.get(room)
        return [] if state is None else self._fail(state, Failure(TransferAborted, reason))

    # Questions.

    def account(self, room: int) -> RoomAccount | None:
        """What there is to tell of a room; None if the number is free."""
        state = self._rooms.get(room)
        return None if state is None else state.account()

    def offer(self, room: int, peer: str) -> Offer:
        """The Offer that a `StartWrite` is for. Raises `RoomError` if there is none."""
        state = self._rooms.get(room)
        if state is None or peer not in state.destinations:
            raise RoomError(f"sender: room {room} has no offer of that peer")
        return state.destinations[peer].offer

    # Events.

    def written(self, ticket: int, error: str, now: float, moved: Mapping[str, int] | None = None) -> list[Action]:
        """A ticket ended: with ``error``, or with every byte visible. ``moved`` counts its bytes by component."""
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            return self._ignore("unknown ticket")
        room, destination = entry
        room.outstanding -= 1
        destination.outstanding -= 1
        room.progress = now
        if error:
            reason = f"write to decode rank {destination.share.destination_index} failed: {error}"
            actions = self._fail(room, Failure(TransferFailed, reason))
        else:
            destination.chunks += 1
            for name, nbytes in (moved or {}).items():
                destination.moved[name] = destination.moved.get(name, 0) + nbytes
            actions = self._advance(room, destination)
        if room.status is Status.FAILED:
            actions += self._settle(room, destination)
        return actions

    # Below: how it is done.

    def _open_room(self, room: int) -> PrefillRoom:
        state = self._rooms.get(room)
        if state is None or state.closed:
            raise RoomError(f"sender: room {room} is not open")
        return state

    def _send(self, peer: str, message: Message) -> list[Action]:
        return [Send(peer, message)] if peer in self._peers else []

    def _submit(self, room: PrefillRoom, submission: Submission, now: float) -> list[Action]:
        room.submissions.append(submission)
        room.progress = now
        return [
            action
            for destination in room.destinations.values()
            for action in self._start(room, destination, submission)
        ]

    def _start(self, room: PrefillRoom, destination: Destination, submission: Submission) -> list[Action]:
        pieces, slots = destination.pieces(submission)
        aux = destination.takes_aux(submission)
        if not pieces and not slots and not aux:
            return []
        ticket = next(self._numbers)
        self._tickets[ticket] = (room, destination)
        room.outstanding += 1
        destination.outstanding += 1
        epoch, handle = destination.offer.epoch, submission.handle
        return [StartWrite(destination.peer, ticket, room.number, epoch, handle, pieces, slots, aux)]

    def _advance(self, room: PrefillRoom, destination: Destination) -> list[Action]:
        """See whether ``destination``, and with it the room, is through."""
        if room.status.terminal or room.finish is None or destination.outstanding or destination.served:
            return []
        destination.served = True
        room.served += 1
        actions: list[Action] = []
        if destination.share.sends:
            actions.append(SendDone(destination.peer, destination.done(), destination.aux_in_done))
        if room.complete:
            room.status = Status.SUCCESS
            self._timers.cancel(room)
            actions.append(RoomChanged(room.number, room.status))
            actions += self._release_if_quiet(room)
        return actions

    def _fail(self, room: PrefillRoom, failure: Failure, heard_by: str = "") -> list[Action]:
        """End the room, and tell every destination but ``heard_by``, who told us."""
        if room.status.terminal:
            return []
        room.status = Status.FAILED
        room.failure = failure
        self._timers.cancel(room)
        actions: list[Action] = [RoomChanged(room.number, room.status, failure.reason, failure.error)]
        for destination in room.destinations.values():
            if destination.served or destination.peer == heard_by:
                continue
            actions += self._send(destination.peer, failure.message(room.number, destination.offer.epoch))
            destination.owes_ack = True
            actions += self._settle(room, destination)
        return actions + self._release_if_quiet(room)

    def _settle(self, room: PrefillRoom, destination: Destination) -> list[Action]:
        """Confirm that nothing is under way to ``destination``, if that is owed and true."""
        actions: list[Action] = []
        if destination.owes_ack and destination.outstanding == 0:
            destination.owes_ack = False
            ack = AbortAck(room.number, destination.offer.epoch, destination.share.part, drained=True)
            actions = self._send(destination.peer, ack)
        return actions + self._release_if_quiet(room)

    def _release_if_quiet(self, room: PrefillRoom) -> list[Action]:
        if room.released or not room.status.terminal or room.outstanding:
            return []
        room.released = True
        self._forget_if_over(room)
        return [RowsReleased(room.number)]

    def _forget_if_over(self, room: PrefillRoom) -> None:
        if not room.closed or not room.released:
            return
        del self._rooms[room.number]
        for peer in room.destinations:
            if peer in self._peers:
                self._peers[peer].rooms.discard(room)
