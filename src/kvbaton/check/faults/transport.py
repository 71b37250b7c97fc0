"""Simulated transports: what `transport.base` promises, and everything that it leaves open.

Both copy real bytes, in pieces that land one after the other in any order of tickets. ``mapped`` addresses the memory
of a peer, as shared memory does: its writes stand still with their process, end with it, and nothing but its end proves
a fence. ``stream`` is like sockets: what was sent may land after its process is gone, a cut network holds it up, and
the receiver can cut a connection off, which is the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import msgspec

from kvbaton import copy
from kvbaton.check.faults.memory import Memory
from kvbaton.check.faults.timeline import Timeline
from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Transfer
from kvbaton.transport.base import Capabilities, Completion, RemotePeer, Transport
from kvbaton.transport.chunks import chunks
from kvbaton.transport.table import RegionTable, check_write

HOST = frozenset({"host"})
CAPABILITIES = {
    "mapped": Capabilities(mapped=True, cross_host=False, memory_kinds=HOST, needs_shared_memory=False, lets_go=True),
    "stream": Capabilities(mapped=False, cross_host=True, memory_kinds=HOST, needs_shared_memory=False),
}


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Where a simulated transport is found."""

    name: str
    instance: str


class Owner(Protocol):
    """The process of a transport."""

    slot: int
    alive: bool
    stopped: bool
    memory: Memory

    def when_running(self, event: Callable[[], None]) -> None:
        """Run an event now, or when the process goes on; never if it is gone."""


class World(Protocol):
    """What the transports of a world share."""

    timeline: Timeline

    def transport_of(self, name: str, instance: str) -> SimulatedTransport | None:
        """The transport of that name of an instance, dead or alive."""

    def is_cut(self, source: int, destination: int) -> bool:
        """Whether nothing gets from one place to another."""

    def struck(self, kind: str, slot: int) -> float | None:
        """Whether a fault of this kind waits for this place; it strikes now, and lasts so many seconds."""


class SimulatedPeer(RemotePeer):
    """A connection to another transport."""

    def __init__(self, target: SimulatedTransport, writer: SimulatedTransport) -> None:
        self.instance = target.instance
        self.target = target
        self.writer = writer
        self.connected = True
        self.revoked = False
        """Whether the other side takes nothing of it any more."""

    @property
    def alive(self) -> bool:
        """Whether writes may still arrive, as far as the writer knows."""
        return self.connected


@dataclass(eq=False)
class Writing:
    """A write that is under way."""

    ticket: int
    peer: SimulatedPeer
    left: int
    """Pieces that have not landed."""
    error: str = ""
    over: bool = False
    flip: bool = False
    """Whether one bit of it shall change on its way."""
    mute: bool = False
    """Whether its end is never reported, unless the connection ends."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """Pieces that wait for the network."""


class SimulatedTransport(Transport):
    """One endpoint."""

    def __init__(self, name: str, instance: str, owner: Owner, world: World, chance: Random, pace: float) -> None:
        self._pace = pace
        self.name = name
        self.instance = instance
        self.capabilities = CAPABILITIES[name]
        self.table = RegionTable()
        self.owner = owner
        self._world = world
        self._chance = chance
        self._writings: dict[int, Writing] = {}
        self._ended: list[Completion] = []
        self._wake: Callable[[], None] = lambda: None
        self._incoming: list[SimulatedPeer] = []
        self._refused: set[str] = set()
        self._closed = False
        self._revoking: dict[str, float] = {}
        """When connections of an instance are certainly cut off."""

    # The contract.

    def register(self, regions: Sequence[Region]) -> None:
        """As `Transport.register`."""
        self.table = RegionTable(regions)

    def describe(self) -> bytes:
        """As `Transport.describe`."""
        return msgspec.msgpack.encode(Descriptor(self.name, self.instance))

    def connect(self, descriptor: bytes) -> RemotePeer:
        """As `Transport.connect`."""
        target = self._find(descriptor)
        if not target.owner.alive or target._closed:
            raise TransportUnavailable(f"instance {target.instance} is gone")
        if self.name == "stream" and self._is_cut(target):
            raise TransportUnavailable(f"nothing answers at the data port of {target.instance}")
        if self.instance in target._refused:
            raise TransportUnavailable(f"instance {target.instance} takes nothing of {self.instance} any more")
        peer = SimulatedPeer(target, self)
        target._incoming.append(peer)
        return peer

    def admit(self, descriptor: bytes) -> None:
        """As `Transport.admit`."""
        target = self._find(descriptor)
        if self._world.struck("admit_refused", self.owner.slot) is not None:
            raise TransportError(f"the process of {target.instance} cannot be watched from here")

    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """As `Transport.write`."""
        assert isinstance(peer, SimulatedPeer)
        checked = check_write(transfers, self.table.nbytes, peer.target.table.nbytes, peer.instance)
        if not peer.connected:
            raise TransportError(f"peer {peer.instance} is disconnected; connect again")
        pieces = list(chunks(checked, self._chance.choice((16, 48, 1 << 20))))
        writing = self._writings[ticket] = Writing(ticket, peer, len(pieces))
        slow = self._world.struck("slow_write", self.owner.slot) or 0.0
        writing.mute = self._world.struck("completion_lost", self.owner.slot) is not None
        writing.flip = self._world.struck("flip", self.owner.slot) is not None
        if self._world.struck("write_error", self.owner.slot) is not None:
            pieces, writing.error = [], "the network card says no"
        elif self._world.struck("piece_lost", self.owner.slot) is not None and pieces:
            pieces.pop(self._chance.randrange(len(pieces)))
            writing.error = "a piece was lost"
        writing.left = len(pieces)
        when = self._world.timeline.now + slow * 0.5
        for piece in pieces:
            when += (self._chance.uniform(0.0, self._pace) + slow) / len(pieces)
            self._world.timeline.at(when, lambda piece=piece: self._land(writing, piece))  # type: ignore[misc]
        if not pieces:
            self._end_soon(writing)

    def poll(self) -> list[Completion]:
        """As `Transport.poll`."""
        ended, self._ended = self._ended, []
        return ended

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Transport.set_waker`."""
        self._wake = wake

    def disconnect(self, peer: RemotePeer) -> None:
        """As `Transport.disconnect`."""
        assert isinstance(peer, SimulatedPeer)
        peer.connected = False
        peer.target._drop(peer)
        for writing in [each for each in self._writings.values() if each.peer is peer]:
            self._end(writing, f"disconnected from peer {peer.instance} before the write was over")

    def fence(self, instance: str) -> bool:
        """As `Transport.fence`."""
        if self.name == "mapped":
            writer = self._world.transport_of(self.name, instance)
            proven = writer is None or not writer.owner.alive
            if proven:
                self._incoming = [peer for peer in self._incoming if peer.writer is not writer]
            return proven
        self._refused.add(instance)
        now = self._world.timeline.now
        if instance not in self._revoking:
            self._revoking[instance] = now + (self._world.struck("slow_fence", self.owner.slot) or 0.0)
        if now < self._revoking[instance]:
            return False
        for peer in [each for each in self._incoming if each.writer.instance == instance]:
            self._revoke(peer)
        return True

    def readmit(self, instance: str) -> None:
        """As `Transport.readmit`."""
        self._refused.discard(instance)
        self._revoking.pop(instance, None)

    def close(self) -> None:
        """As `Transport.close`: nothing of its own lands any more, and nothing of others where connections carry it."""
        self._closed = True
        for writing in list(self._writings.values()):
            self._end(writing, "the transport was closed")
        if self.name == "stream":
            for peer in list(self._incoming):
                self._revoke(peer)

    # What befalls it.

    def break_off(self, instance: str) -> None:
        """The connections to a peer end, and nothing else does."""
        for writing in [each for each in self._writings.values() if each.peer.instance == instance]:
            writing.peer.connected = False
            self._end(writing, "the data connection was reset")
        for peer in list(self._peers_of(instance)):
            peer.connected = False

    def healed(self) -> None:
        """The network may carry on what it held up."""
        for writing in list(self._writings.values()):
            held, writing.held = writing.held, []
            for piece in held:
                piece()

    @property
    def outstanding(self) -> int:
        """Tickets that have not ended."""
        return len(self._writings)

    @property
    def incoming(self) -> int:
        """Connections of peers that live."""
        return sum(peer.writer.owner.alive for peer in self._incoming)

    # Below: how it is done.

    def _find(self, descriptor: bytes) -> SimulatedTransport:
        where = msgspec.msgpack.decode(descriptor, type=Descriptor)
        found = self._world.transport_of(where.name, where.instance)
        if found is None or where.name != self.name:
            raise TransportError(f"there is no transport {where.name} of instance {where.instance}")
        return found

    def _is_cut(self, target: SimulatedTransport) -> bool:
        here, there = self.owner.slot, target.owner.slot
        return self._world.is_cut(here, there) or self._world.is_cut(there, here)

    def _peers_of(self, instance: str) -> list[SimulatedPeer]:
        target = self._world.transport_of(self.name, instance)
        return [] if target is None else [peer for peer in target._incoming if peer.writer is self]

    def _drop(self, peer: SimulatedPeer) -> None:
        if peer in self._incoming:
            self._incoming.remove(peer)

    def _revoke(self, peer: SimulatedPeer) -> None:
        peer.revoked = True
        self._drop(peer)

        def notice() -> None:
            peer.connected = False
            for writing in [each for each in peer.writer._writings.values() if each.peer is peer]:
                peer.writer._end(writing, f"peer {peer.instance} cut the connection off")

        seconds = peer.writer._chance.uniform(0.001, 0.05)
        self._world.timeline.after(seconds, lambda: peer.writer.owner.when_running(notice))

    def _land(self, writing: Writing, piece: tuple[Transfer, int, int]) -> None:
        peer, target = writing.peer, writing.peer.target
        if writing.over or peer.revoked or not target.owner.alive:
            if not writing.over and not peer.revoked:
                self.owner.when_running(lambda: self._end(writing, f"peer {peer.instance} is gone"))
            return
        if self.name == "mapped":
            if self.owner.stopped or not self.owner.alive:
                self.owner.when_running(lambda: self._land(writing, piece))
                return
        elif self._is_cut(target):
            writing.held.append(lambda: self._land(writing, piece))
            return
        transfer, begin, end = piece
        memory = target.owner.memory
        before = memory.array.copy() if writing.flip else None
        copy.copy_boxes(transfer, self.table.bases, target.table.bases, begin=begin, end=end)
        if before is not None:
            writing.flip = not memory.flip(before, self._chance)
        memory.look(f"a write of {self.instance}, ticket {writing.ticket}")
        writing.left -= 1
        if not writing.left:
            self._end_soon(writing)

    def _end_soon(self, writing: Writing) -> None:
        if writing.mute:
            return
        seconds = self._chance.uniform(0.0, 0.03)
        self._world.timeline.after(seconds, lambda: self.owner.when_running(lambda: self._end(writing, writing.error)))

    def _end(self, writing: Writing, error: str) -> None:
        if writing.over:
            return
        writing.over = True
        del self._writings[writing.ticket]
        self._ended.append(Completion(writing.ticket, error))
        self._wake()
