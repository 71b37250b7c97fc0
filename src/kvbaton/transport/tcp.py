"""The tcp transport: works between any two hosts that reach each other.

A write is cut into frames, sent over a few streams, checked by the receiver against its own regions, put in place, and
acknowledged. Short runs are packed into slabs on their way; long ones go straight from rows into rows. The port takes
writes only from those who have the token in the descriptor; the token keeps strangers and mix-ups out, but the streams
are neither encrypted nor signed: use it in networks that you trust.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvbaton.address import Endpoint, advertised
from kvbaton.copy.movers import KINDS
from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Transfer
from kvbaton.transport import tcp_wire as wire
from kvbaton.transport.base import Capabilities, Completion, RemotePeer, Transport
from kvbaton.transport.dial import listen, reach
from kvbaton.transport.table import MAX_DESCRIPTOR, RegionTable, check_write
from kvbaton.transport.tcp_receiver import TcpReceiver
from kvbaton.transport.tcp_sender import TcpPeer
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.wire import MAX_INSTANCE, TOKEN_BYTES

STREAMS = 2
"""Connections to a peer: while one waits, the other one moves bytes."""


class TcpTransport(Transport):
    """Writes over ``streams`` connections to each peer.

    ``bind`` is ``host``, ``host:port`` or ``[host]:port``; ``advertise`` the host that peers dial, needed where
    ``bind`` is a wildcard. Raises `AddressError` if the address cannot be bound or may not be advertised.
    """

    name = "tcp"
    capabilities = Capabilities(mapped=False, cross_host=True, memory_kinds=frozenset(KINDS), needs_shared_memory=False)

    def __init__(self, instance: str, *, bind: str = "127.0.0.1", advertise: str = "", streams: int = STREAMS) -> None:
        if not 1 <= len(instance.encode()) <= MAX_INSTANCE:
            raise ConfigurationError(f"an instance id has 1 to {MAX_INSTANCE} bytes, not {len(instance.encode())}")
        self.instance = instance
        address = Endpoint.parse(bind, default_port=0)
        self.host = advertised(address.host, advertise or None)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        listener = listen(address.host, address.port or 0)
        self.port: int = listener.getsockname()[1]
        self.table = RegionTable()
        self._tickets = Tickets()
        self._receiver = TcpReceiver(listener, instance, self._token)
        self._lock = threading.Lock()
        self._peers: set[TcpPeer] = set()
        self._streams = streams
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        """As `Transport.register`."""
        self.table = RegionTable.of_kinds(regions, self.capabilities.memory_kinds, self.name)
        for number, reason in self.table.movers.reasons.items():
            raise TransportUnavailable(
                f"region {number} is {regions[number].kind} memory, which tcp cannot pack: {reason}"
            )
        self._receiver.table = self.table

    def describe(self) -> bytes:
        """As `Transport.describe`. Raises `TransportError` if there are too many regions for a descriptor."""
        lengths = tuple(int(nbytes) for nbytes in self.table.nbytes)
        encoded = msgspec.msgpack.encode(wire.TcpDescriptor(self.instance, self.host, self.port, self._token, lengths))
        if len(encoded) > MAX_DESCRIPTOR:
            raise TransportError(
                f"{len(lengths)} regions make a descriptor of {len(encoded)} bytes, more than {MAX_DESCRIPTOR}; "
                "register fewer, larger regions"
            )
        return encoded

    def connect(self, descriptor: bytes) -> RemotePeer:
        """As `Transport.connect`."""
        described = wire.decode_descriptor(descriptor)
        with contextlib.ExitStack() as opened:
            socks = [opened.enter_context(self._dial(described)) for _ in range(self._streams)]
            opened.pop_all()
        nbytes = np.array(described.regions, dtype=np.int64)
        peer = TcpPeer(socks, described.instance, nbytes, self.table, self._tickets)
        with self._lock:
            if not self._closed:
                self._peers.add(peer)
                return peer
        peer.stop("the transport was closed")
        raise TransportError("the transport is closed; nothing can be connected any more")

    def _dial(self, described: wire.TcpDescriptor) -> socket.socket:
        where = described.host, described.port
        return reach(wire.TCP, *where, described.token, writer=self.instance, peer=described.instance)

    def admit(self, descriptor: bytes) -> None:
        """As `Transport.admit`."""
        instance = wire.decode_descriptor(descriptor).instance
        if self._receiver.gate.refuses(instance):
            raise TransportError(f"instance {instance} was fenced; a new process needs a new instance id")

    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """As `Transport.write`."""
        if not isinstance(peer, TcpPeer):
            raise TransportError(f"{peer!r} was not connected by the tcp transport")
        checked = check_write(transfers, self.table.nbytes, peer.nbytes, peer.instance)
        for transfer in checked:
            self.table.movers.of(transfer.boxes.source)
        peer.submit(ticket, checked)

    def poll(self) -> list[Completion]:
        """As `Transport.poll`."""
        return self._tickets.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Transport.set_waker`."""
        self._tickets.set_waker(wake)

    def disconnect(self, peer: RemotePeer) -> None:
        """As `Transport.disconnect`; waits up to a second for the peer to take what is on its way."""
        if isinstance(peer, TcpPeer):
            with self._lock:
                self._peers.discard(peer)
            peer.stop(f"disconnected from peer {peer.instance} before the write was over")

    def fence(self, instance: str) -> bool:
        """As `Transport.fence`: ends the connections of that instance, and takes no further ones."""
        return self._receiver.fence(instance)

    def readmit(self, instance: str) -> None:
        """As `Transport.readmit`."""
        self._receiver.gate.readmit(instance)

    def close(self) -> None:
        """As `Transport.close`."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers), set()
        self._tickets.close()
        for peer in peers:
            peer.stop("the transport was closed before the write was over")
        self._receiver.close()

    @property
    def counters(self) -> dict[str, int]:
        """How often the port refused something, by reason: greeting, version, token, fenced, full, frame, bounds."""
        return dict(self._receiver.counters)
