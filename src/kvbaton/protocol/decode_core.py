"""The decode side of every room of one rank, without any I/O: events go in, actions come out.

The driver calls one method for each event, with the time, and carries out the actions in order before the next event.
`DecodeCore.handle` never raises, whatever a peer sends: what does not fit is counted in ``unexpected`` and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvbaton.errors import (
    HandshakeError,
    PeerLost,
    RoomError,
    RowsError,
    TransferAborted,
    TransferFailed,
)
from kvbaton.protocol.account import RoomAccount
from kvbaton.protocol.actions import Action, CheckDigests, Deliver, FencePeer, RoomChanged, RowsReleased, Send
from kvbaton.protocol.core import Core
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.decode_room import DecodeRoom, Link
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.messages import Abort, AbortAck, Done, Message, Offer, Ping, Pong, Rows
from kvbaton.protocol.shares import find_fault
from kvbaton.protocol.status import Status


class _Peer:
    """A prefill rank that is connected, or that was and may still write."""

    def __init__(self, part: int, parts: tuple[int, ...], name: str) -> None:
        self.part = part
        self.parts = parts
        self.name = name
        self.epochs = 0
        self.lost = False
        self.fencing = False
        self.rooms: set[DecodeRoom] = set()

    def next_epoch(self) -> int:
        self.epochs += 1
        return self.epochs


def _accept(room: int, done: Done) -> str:
    return ""


class DecodeCore(Core[DecodeRoom]):
    """All rooms of one decode rank.

    ``inspect(room, done)`` may look at a Done before it counts, and says why its content does not fit (the room then
    fails), or "".
    """

    def __init__(self, deadlines: Deadlines | None = None, *, inspect: Callable[[int, Done], str] = _accept) -> None:
        super().__init__(deadlines)
        self._inspect = inspect
        self._peers: dict[str, _Peer] = {}

    # Peers.

    def peer_joined(self, peer: str, part: int, parts: Sequence[int], name: str = "") -> list[Action]:
        """A prefill rank passed the handshake: it is source ``part``, and ``parts`` (of its Welcome) send to this rank.

        ``name`` is what it is called in the reasons of rooms that fail: "part 3" unless something better is given.
        A key must not be used again for another connection. Raises `HandshakeError` if it is, with another answer.
        """
        known = self._peers.get(peer)
        if known is not None and (known.lost or (known.part, known.parts) != (part, tuple(parts))):
            raise HandshakeError(f"prefill part {part}: a second handshake on one connection differs from the first")
        if known is None:
            self._peers[peer] = _Peer(part, tuple(parts), name or f"part {part}")
        return []

    def peer_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The connection is gone: rooms that still need this peer fail at once. Their rows wait for `peer_fenced`."""
        state = self._peers.get(peer)
        if state is None or state.lost:
            return []
        state.lost = True
        lost = Failure(PeerLost, f"{state.name} was lost: {reason}")
        actions: list[Action] = []
        for room in sorted(state.rooms, key=lambda room: room.number):
            link = room.links[peer]
            if link.expected and not link.done:
                actions += self._fail(room, lost, now)
        self._forget_peer_if_over(peer)
        return actions

    def may_write(self, peer: str) -> bool:
        """Whether this peer may still write rows of some room: a lost peer of which this is true must be fenced."""
        state = self._peers.get(peer)
        return state is not None and any(room.offered and not room.links[peer].quiet for room in state.rooms)

    def peer_fenced(self, peer: str, now: float) -> list[Action]:
        """It is proven that no write of this peer can reach our memory any more."""
        state = self._peers.get(peer)
        if state is None:
            return []
        actions = self.peer_lost(peer, "it was cut off", now)
        for room in sorted(state.rooms, key=lambda room: room.number):
            room.links[peer].drained = True
            actions += self._release_if_quiet(room)
        self._forget_peer_if_over(peer)
        return actions

    # Calls of the engine.

    def open(self, room: int, peers: Sequence[str], now: float) -> list[Action]:
        """Begin a room whose data come from ``peers``: every prefill rank of the grid.

        A room with a peer that is not connected fails at once. Raises `RoomError` while the number is in use, or still
        drains after `close`, and if ``peers`` are not the parts that their own handshakes named.
        """
        if room in self._rooms:
            draining = " (its rows are not released)" if self._rooms[room].closed else ""
            raise RoomError(f"receiver: room {room} is in use{draining}")
        state = DecodeRoom(room, opened=now, progress=now)
        absent = [peer for peer in peers if peer not in self._peers or self._peers[peer].lost]
        if not absent:
            self._check_parts(room, peers)
        self._rooms[room] = state
        if absent:
            return self._fail(state, Failure(PeerLost, f"prefill rank {absent[0]} is not connected"), now)
        for peer in peers:
            known = self._peers[peer]
            state.links[peer] = Link(peer, known.part, known.next_epoch(), known.part in known.parts, known.name)
            known.rooms.add(state)
        state.remaining = sum(link.expected for link in state.links.values())
        self._timers.set(state, now + self._deadlines.offer_wait)
        return []

    def offer(
        self,
        room: int,
        components: Mapping[str, Rows],
        tokens: int,
        now: float,
        *,
        prefix: int = 0,
        aux_row: int = -1,
        digest: bool = False,
        trace: str = "",
    ) -> list[Action]:
        """Tell every peer where tokens ``[prefix, tokens)`` of the room belong.

        ``digest``: what every part sent is checked by its digests (`CheckDigests`) before it counts. ``trace`` goes
        along.

        Does nothing once the room has failed: its rows were never given away. Raises `RoomError` for a room that is not
        open or was offered before, and `RowsError` for rows or counts that do not hold together.
        """
        state = self._rooms.get(room)
        if state is None or state.closed:
            raise RoomError(f"receiver: room {room} is not open")
        if state.offered:
            raise RoomError(f"receiver: room {room} was offered already")
        terms = Offer(room, 1, tokens, dict(components), prefix, aux_row, digest, trace)
        fault = find_fault(terms)
        if fault:
            raise RowsError(f"receiver: {fault}")
        if state.status.terminal:
            return []
        state.offered = True
        state.digest = digest
        state.terms = terms
        state.progress = now
        state.status = Status.TRANSFERRING
        self._timers.set(state, state.deadline(self._deadlines)[0])
        actions: list[Action] = [RoomChanged(room, state.status)]
        for link in state.links.values():
            actions += self._send(link.peer, msgspec.structs.replace(terms, epoch=link.epoch))
        return actions

    def abort(self, room: int, reason: str, now: float) -> list[Action]:
        """Fail the room, if it is open and has not ended."""
        state = self._rooms.get(room)
        return [] if state is None else self._fail(state, Failure(TransferAborted, reason), now)

    def close(self, room: int, now: float) -> list[Action]:
        """Forget the room; one that has not ended is aborted. Its number is free again once its rows are released."""
        state = self._rooms.get(room)
        if state is None:
            return []
        actions = self._fail(state, Failure(TransferAborted, "the receiver was closed before the room had ended"), now)
        state.closed = True
        self._forget_if_over(state)
        return actions

    # Questions.

    def account(self, room: int) -> RoomAccount | None:
        """What there is to tell of a room; None if the number is free."""
        state = self._rooms.get(room)
        return None if state is None else state.account()

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None if never."""
        return self._timers.next()

    def table_sizes(self) -> dict[str, int]:
        """How much is kept, by table: all zero, but for peers, when no room is open and nothing may be written."""
        return {
            "peers": len(self._peers),
            "rooms": len(self._rooms),
            "timers": len(self._timers),
            "rooms_of_peers": sum(len(peer.rooms) for peer in self._peers.values()),
        }

    # Events.

    def handle(self, peer: str, message: Message, now: float) -> list[Action]:
        """A message of ``peer`` came."""
        state = self._peers.get(peer)
        if state is None or state.lost:
            return self._ignore(f"{type(message).__name__} of an unknown peer")
        if isinstance(message, Ping):
            return [Send(peer, Pong(message.number))]
        if isinstance(message, Pong):
            return []
        if not isinstance(message, (Done, Abort, AbortAck)):
            return self._ignore(type(message).__name__)
        room = self._rooms.get(message.room)
        link = room.links.get(peer) if room else None
        if room is None or link is None:
            return self._ignore(f"{type(message).__name__} for an unknown room")
        if link.epoch != message.epoch or not room.offered:
            return self._ignore(f"stale {type(message).__name__}")
        if isinstance(message, Done):
            return self._on_done(room, link, message, now)
        if isinstance(message, AbortAck):
            return self._on_ack(room, link, message)
        failure = Failure.named(message.error, f"{link.name}: {message.reason}")
        return self._fail(room, failure, now)

    def checked(self, check: CheckDigests, failure: Failure | None, now: float) -> list[Action]:
        """The digests of a part were compared: they are right, or ``failure`` says what is not."""
        room = self._rooms.get(check.room)
        link = room.links.get(check.peer) if room else None
        if room is None or link is None or link.checking is not check.done:
            return self._ignore("result of an unknown check")
        link.checking = None
        if room.status.terminal:
            return self._release_if_quiet(room)
        room.progress = now
        if failure is not None:
            return self._fail(room, failure._replace(reason=f"{link.name}: {failure.reason}"), now)
        return self._on_right(room, link, check.done)

    def tick(self, now: float) -> list[Action]:
        """Let time pass: fail what has lasted too long, and have peers cut off that do not confirm an abort."""
        actions: list[Action] = []
        for room in self._timers.due(now):
            if room.status is Status.FAILED:
                actions += self._fence(room)
                continue
            when, failure = room.deadline(self._deadlines)
            if when > now:
                self._timers.set(room, when)
            else:
                actions += self._fail(room, failure, now)
        return actions

    # Below: how it is done.

    def _check_parts(self, room: int, peers: Sequence[str]) -> None:
        known = [self._peers[peer] for peer in peers]
        present = sorted(state.part for state in known)
        if not peers or len(set(present)) != len(present):
            raise RoomError(f"receiver: room {room}: the peers are the parts {present}; each part must be there once")
        expected = known[0].parts
        if any(state.parts != expected for state in known):
            raise RoomError(f"receiver: room {room}: the prefill ranks do not agree which of them send")
        if not set(expected) <= set(present):
            raise RoomError(f"receiver: room {room}: parts {list(expected)} send, its peers are parts {present}")

    def _send(self, peer: str, message: Message) -> list[Action]:
        known = self._peers.get(peer)
        return [] if known is None or known.lost else [Send(peer, message)]

    def _on_done(self, room: DecodeRoom, link: Link, done: Done, now: float) -> list[Action]:
        if done.part != link.part or not link.expected:
            return self._ignore("Done of an unexpected part")
        if link.done:
            return self._ignore("repeated Done")
        if room.status.terminal:
            link.done = True
            return self._release_if_quiet(room)
        try:
            fault = self._inspect(room.number, done)
        except Exception as error:
            # What a peer sent must never stop the loop that drives this core.
            fault = f"its content could not be inspected: {error!r}"
        link.done = True
        room.progress = now
        if fault:
            return self._fail(room, Failure(TransferFailed, f"{link.name}: {fault}"), now)
        if room.digest:
            link.checking = done
            return [CheckDigests(link.peer, room.number, link.epoch, done)]
        return self._on_right(room, link, done)

    def _on_right(self, room: DecodeRoom, link: Link, done: Done) -> list[Action]:
        """A part is in place."""
        room.remaining -= 1
        actions: list[Action] = [Deliver(room.number, link.part, done)]
        if room.remaining == 0:
            room.status = Status.SUCCESS
            self._timers.cancel(room)
            actions.append(RoomChanged(room.number, room.status))
            actions += self._release_if_quiet(room)
        return actions

    def _on_ack(self, room: DecodeRoom, link: Link, ack: AbortAck) -> list[Action]:
        if ack.part != link.part:
            return self._ignore("AbortAck of an unexpected part")
        if not ack.drained or link.quiet:
            return []
        # Also before the Abort that goes with it: its sender has ended this epoch for good.
        link.drained = True
        return self._release_if_quiet(room)

    def _fail(self, room: DecodeRoom, failure: Failure, now: float) -> list[Action]:
        """End the room, and tell every peer: also the one that told us, so that it confirms when it is quiet."""
        if room.status.terminal:
            return []
        room.status = Status.FAILED
        room.failure = failure
        actions: list[Action] = [RoomChanged(room.number, room.status, failure.reason, failure.error)]
        for link in room.links.values():
            actions += self._send(link.peer, failure.message(room.number, link.epoch, offered=room.offered))
        released = self._release_if_quiet(room)
        if not released:
            self._timers.set(room, now + self._deadlines.drain)
        return actions + released

    def _fence(self, room: DecodeRoom) -> list[Action]:
        actions: list[Action] = []
        for link in room.unquiet():
            peer = self._peers[link.peer]
            if not peer.lost and not peer.fencing:
                peer.fencing = True
                reason = (
                    f"{link.name} did not confirm within {self._deadlines.drain:g} s that it stopped writing "
                    f"room {room.number}"
                )
                actions.append(FencePeer(link.peer, reason))
        return actions

    def _release_if_quiet(self, room: DecodeRoom) -> list[Action]:
        if room.released or not room.status.terminal or room.in_use:
            return []
        room.released = True
        self._timers.cancel(room)
        for link in room.links.values():
            peer = self._peers.get(link.peer)
            if peer is not None:
                peer.rooms.discard(room)
                self._forget_peer_if_over(link.peer)
        self._forget_if_over(room)
        return [RowsReleased(room.number)]

    def _forget_peer_if_over(self, peer: str) -> None:
        state = self._peers.get(peer)
        if state is not None and state.lost and not state.rooms:
            del self._peers[peer]

    def _forget_if_over(self, room: DecodeRoom) -> None:
        if room.closed and room.released:
            del self._rooms[room.number]
