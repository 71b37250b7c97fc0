"""The prefill side of every room of one rank, without any I/O: events go in, actions come out.

The driver calls one method for each event, with the time, and carries out the actions in order before the next event.
`PrefillCore.handle` never raises, whatever a peer sends: what does not fit is counted in ``unexpected`` and ignored.
"""

from __future__ import annotations

from kvbaton.errors import DeadlineExceeded, HandshakeError, PeerLost, RoomError, TransferAborted, TransferFailed
from kvbaton.protocol.actions import Action, RoomChanged, Send
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.early_ends import EarlyEnds
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.messages import Abort, AbortAck, Message, Offer, Ping, Pong
from kvbaton.protocol.parking import Parking
from kvbaton.protocol.prefill_peer import PrefillPeer
from kvbaton.protocol.prefill_room import Destination, PrefillRoom
from kvbaton.protocol.prefill_rooms import PrefillRooms
from kvbaton.protocol.shares import PeerShare, find_fault, needed
from kvbaton.protocol.status import Status


class PrefillCore(PrefillRooms):
    """All rooms of one prefill rank, and all that decode ranks say to it."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        super().__init__(deadlines)
        self._parking = Parking(self._deadlines)
        self._early = EarlyEnds(self._deadlines.recent_seconds)

    # Peers.

    def peer_joined(self, peer: str, share: PeerShare) -> list[Action]:
        """A decode rank passed the handshake. A key must not be used again for another connection.

        Raises `HandshakeError` if the same connection settles on another share than before.
        """
        known = self._peers.get(peer)
        if known is not None and known.share != share:
            raise HandshakeError(
                f"decode rank {share.destination_index}: a second handshake on one connection differs from the first"
            )
        if known is None:
            self._peers[peer] = PrefillPeer(share)
        return []

    def peer_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The connection is gone: what it asked for fails at once. Its tickets must still end, each by `written`."""
        state = self._peers.pop(peer, None)
        if state is None:
            return []
        self._parking.drop_peer(peer)
        lost = Failure(PeerLost, f"decode rank {state.share.destination_index} was lost: {reason}")
        actions: list[Action] = []
        for room in sorted(state.rooms, key=lambda room: room.number):
            actions += self._fail(room, lost)
        return actions

    def withdrawn(self, abort: Abort, now: float, *, rank: int = -1) -> list[Action]:
        """A decode rank that did not pass the handshake will not offer its rows: the room that waits for it fails.

        Also if it is opened soon afterwards: the engine hears of a request at another time than its peer. ``rank`` is
        the index that it gave itself.
        """
        failure = Failure.named(abort.error, f"a decode rank did not pass the handshake: {abort.reason}")
        has_ended = self._early.gave_up(abort.room, rank, now)
        room = self._rooms.get(abort.room)
        if room is None:
            if not has_ended:
                self._early.withdraw(abort.room, failure, rank, now)
            return []
        room.withdrawn.add(rank)
        return self._ignore("Abort of a rank that did not join") if room.all_offered else self._fail(room, failure)

    # Calls of the engine.

    def open(self, room: int, now: float) -> list[Action]:
        """Begin a room. Raises `RoomError` while the number is in use, or still drains after `close`."""
        if room in self._rooms:
            draining = " (its last writes have not ended)" if self._rooms[room].closed else ""
            raise RoomError(f"sender: room {room} is in use{draining}")
        state = PrefillRoom(room, opened=now, progress=now)
        self._rooms[room] = state
        self._timers.set(state, now + self._deadlines.offer_wait)
        actions: list[Action] = []
        withdrawn = self._early.begin(room, now)
        if withdrawn is not None:
            state.withdrawn |= withdrawn.ranks
            actions += self._fail(state, withdrawn.failure)
        for parked in self._parking.take(room):
            actions += self._place(state, parked.peer, parked.offer, now)
        return actions

    def cancelled(self, room: int, reason: str, now: float) -> list[Action]:
        """The engine gave a room up before it was opened here: Offers that came, or will come, are refused."""
        failure = Failure(TransferAborted, reason)
        parked = self._parking.take(room)
        self._early.end(room, failure, [self._peers[each.peer].share.destination_index for each in parked], now)
        return [action for each in parked for action in self._refuse(each.peer, each.offer, failure)]

    def close(self, room: int, now: float) -> list[Action]:
        """Forget the room; one that has not ended is aborted. Its number is free again once its writes have ended."""
        state = self._rooms.get(room)
        if state is None:
            return []
        actions = self._fail(state, Failure(TransferAborted, "the sender was closed before the room had ended"))
        state.closed = True
        if state.failure is not None and not state.all_offered:
            self._early.end(room, state.failure, state.indices | state.withdrawn, now)
        self._forget_if_over(state)
        return actions

    # Questions.

    @property
    def parked_offers(self) -> int:
        """How many offers wait for a room that is not open."""
        return len(self._parking)

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None if never."""
        return min((when for when in (self._timers.next(), self._parking.next()) if when is not None), default=None)

    def table_sizes(self) -> dict[str, int]:
        """How much is kept, by table: all zero when no room is open and nothing is on its way.

        But for peers, and for what is remembered of rooms for `Deadlines.recent_seconds`.
        """
        return {
            "peers": len(self._peers),
            "rooms": len(self._rooms),
            "tickets": len(self._tickets),
            "timers": len(self._timers),
            "parked": len(self._parking),
            "remembered": len(self._early),
            "epochs": sum(peer.pending_epochs for peer in self._peers.values()),
            "rooms_of_peers": sum(len(peer.rooms) for peer in self._peers.values()),
        }

    # Events.

    def handle(self, peer: str, message: Message, now: float) -> list[Action]:
        """A message of ``peer`` came."""
        state = self._peers.get(peer)
        if state is None:
            return self._ignore(f"{type(message).__name__} of an unknown peer")
        if isinstance(message, Offer):
            return self._on_offer(peer, state, message, now)
        if isinstance(message, Abort):
            return self._on_abort(peer, state, message, now)
        if isinstance(message, Ping):
            return [Send(peer, Pong(message.number))]
        if isinstance(message, Pong):
            return []
        return self._ignore(type(message).__name__)

    def tick(self, now: float) -> list[Action]:
        """Let time pass: fail what has lasted too long."""
        actions: list[Action] = []
        self._early.expire(now)
        for room in self._timers.due(now):
            when, failure = room.deadline(self._deadlines)
            if when > now:
                self._timers.set(room, when)
            else:
                actions += self._fail(room, failure)
        for parked in self._parking.expired(now):
            reason = (
                f"the prefill side did not open room {parked.offer.room} within {self._deadlines.parked_seconds:g} s"
            )
            actions += self._refuse(parked.peer, parked.offer, Failure(DeadlineExceeded, reason))
        return actions

    # Below: how it is done.

    def _refuse(self, peer: str, offer: Offer, failure: Failure) -> list[Action]:
        """Tell ``peer`` that nothing will come of its Offer, and that its rows were never touched."""
        part = self._peers[peer].share.part
        return [
            Send(peer, failure.message(offer.room, offer.epoch)),
            Send(peer, AbortAck(offer.room, offer.epoch, part, drained=True)),
        ]

    def _on_offer(self, peer: str, state: PrefillPeer, offer: Offer, now: float) -> list[Action]:
        if not state.seen.add(offer.epoch):
            return self._ignore("repeated Offer")
        if state.was_aborted_early(offer.epoch):
            return []
        fault = find_fault(offer)
        if fault:
            self.unexpected["malformed Offer"] += 1
            return self._reject(peer, offer, fault)
        room = self._rooms.get(offer.room)
        rank = state.share.destination_index
        late = self._early.refusal(offer.room, rank, now) if room is None or room.closed else None
        if late is not None:
            return self._refuse(peer, offer, late)
        if room is None or room.is_over_for(peer, rank, offer.epoch):
            refusal = self._parking.put(peer, offer, now)
            return self._refuse(peer, offer, Failure(TransferFailed, refusal)) if refusal else []
        return self._place(room, peer, offer, now)

    def _reject(self, peer: str, offer: Offer, reason: str) -> list[Action]:
        """Refuse an Offer that nobody can serve; the room that waits for it cannot succeed any more."""
        actions = self._refuse(peer, offer, Failure(TransferFailed, reason))
        room = self._rooms.get(offer.room)
        if room is not None and peer not in room.destinations and room.waits_for(self._peers[peer].share):
            index = self._peers[peer].share.destination_index
            refused = f"the offer of decode rank {index} was refused: {reason}"
            actions += self._fail(room, Failure(TransferFailed, refused))
        return actions

    def _place(self, room: PrefillRoom, peer: str, offer: Offer, now: float) -> list[Action]:
        """Take an Offer into a room."""
        share = self._peers[peer].share
        if peer in room.destinations:
            return self._ignore("stale Offer")
        if room.status.terminal:
            # It knows now: what it offers next is for a later life of the number.
            room.withdrawn.add(share.destination_index)
            failure = room.failure or Failure(TransferFailed, f"room {room.number} has ended")
            return self._refuse(peer, offer, failure)
        if not room.waits_for(share):
            self.unexpected["Offer for a room of others"] += 1
            reason = (
                f"room {room.number} is in use by other decode ranks: it has ranks {sorted(room.indices)} of "
                f"{room.expected}, and this is rank {share.destination_index} of {share.destinations}"
            )
            return self._refuse(peer, offer, Failure(TransferFailed, reason))
        needs, slots, fault = needed(offer, share)
        if fault:
            return self._reject(peer, offer, fault)
        destination = Destination(peer, share, offer, needs, slots)
        room.expected = share.destinations
        room.indices.add(share.destination_index)
        room.destinations[peer] = destination
        room.progress = now
        self._peers[peer].rooms.add(room)
        actions: list[Action] = []
        if room.status is Status.WAITING:
            room.status = Status.TRANSFERRING
            actions.append(RoomChanged(room.number, room.status))
        if room.all_offered:
            self._timers.set(room, room.deadline(self._deadlines)[0])
        missing = destination.missing(room.finish) if room.finish else ""
        if missing:
            return actions + self._fail(room, Failure(TransferFailed, missing))
        for submission in room.submissions:
            actions += self._start(room, destination, submission)
        return actions + self._advance(room, destination)

    def _on_abort(self, peer: str, state: PrefillPeer, abort: Abort, now: float) -> list[Action]:
        ack = AbortAck(abort.room, abort.epoch, state.share.part, drained=True)
        failure = Failure.named(abort.error, f"decode rank {state.share.destination_index}: {abort.reason}")
        has_ended = self._early.gave_up(abort.room, state.share.destination_index, now)
        room = self._rooms.get(abort.room)
        destination = room.destinations.get(peer) if room else None
        if abort.epoch in state.seen:
            parked = self._parking.get(abort.room, peer)
            if parked is not None and parked.epoch == abort.epoch:
                self._parking.remove(abort.room, peer)
                if room is None:
                    self._early.withdraw(abort.room, failure, state.share.destination_index, now)
            if room is None or destination is None or destination.offer.epoch != abort.epoch:
                return [Send(peer, ack)]
            actions = self._fail(room, failure, heard_by=peer)
            quiet = destination.outstanding == 0
            destination.owes_ack = not quiet
            return [*actions, Send(peer, AbortAck(abort.room, abort.epoch, ack.part, drained=quiet))]
        if abort.offered:
            if not state.abort_early(abort.epoch):
                return self._ignore("too many early Aborts")
        else:
            state.seen.add(abort.epoch)
        actions = []
        if room is None and not has_ended and not abort.offered:
            self._early.withdraw(abort.room, failure, state.share.destination_index, now)
        if room is not None and destination is None and room.waits_for(state.share):
            room.withdrawn.add(state.share.destination_index)
            actions = self._fail(room, failure)
        return [*actions, Send(peer, ack)]
