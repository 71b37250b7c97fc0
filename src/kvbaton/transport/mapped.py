"""What transports share that address the peer's memory directly: workers that copy rows to rows in one pass."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence

from kvbaton.errors import TransportError
from kvbaton.memory import Region
from kvbaton.plan.boxes import Transfer
from kvbaton.transport.base import Completion, RemotePeer, Transport
from kvbaton.transport.native_workers import AVAILABLE, NativeWorkers
from kvbaton.transport.python_workers import PythonWorkers
from kvbaton.transport.table import RegionTable, check_write
from kvbaton.transport.workers import MappedPeer, Workers, worker_count

__all__ = ["MappedPeer", "MappedTransport", "fastest_workers"]


def fastest_workers(name: str, count: int, at_once: int) -> Workers:
    """Make workers of the native kernel, or of Python where it is missing; ``count`` 0 stands for as many as pay."""
    workers = NativeWorkers if AVAILABLE else PythonWorkers
    return workers(name, count or worker_count(), at_once)


class MappedTransport(Transport):
    """A transport whose ``workers`` copy. Subclasses connect."""

    def __init__(self, instance: str, workers: Workers) -> None:
        self.instance = instance
        self.table = RegionTable()
        self._workers = workers
        self._lock = threading.Lock()
        self._peers: set[MappedPeer] = set()
        self._closing = False

    def register(self, regions: Sequence[Region]) -> None:
        """As `Transport.register`."""
        self.table = RegionTable.of_kinds(regions, self.capabilities.memory_kinds, self.name)

    def connect(self, descriptor: bytes) -> RemotePeer:
        """As `Transport.connect`."""
        peer = self._attach(descriptor)
        try:
            self._workers.attach(peer)
            with self._lock:
                if self._closing:
                    raise TransportError("the transport is closed; nothing can be connected any more")
                self._peers.add(peer)
        except BaseException:
            peer.release()
            raise
        return peer

    @abc.abstractmethod
    def _attach(self, descriptor: bytes) -> MappedPeer:
        """Map the peer's regions."""

    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """As `Transport.write`."""
        if not isinstance(peer, MappedPeer):
            raise TransportError(f"{peer!r} was not connected by the {self.name} transport")
        checked = check_write(transfers, self.table.nbytes, peer.nbytes, peer.instance, keep=False)
        if peer not in self._peers:
            raise TransportError(f"peer {peer.instance} is disconnected; connect again")
        self._workers.submit(peer, checked, ticket, self.table.bases)

    def poll(self) -> list[Completion]:
        """As `Transport.poll`."""
        return self._workers.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Transport.set_waker`."""
        self._workers.set_waker(wake)

    def disconnect(self, peer: RemotePeer) -> None:
        """As `Transport.disconnect`; returns when no copy to the peer is in progress."""
        if isinstance(peer, MappedPeer):
            self._drop(peer, f"disconnected from peer {peer.instance} before the write was over")

    def close(self) -> None:
        """As `Transport.close`."""
        with self._lock:
            self._closing = True
            peers = list(self._peers)
        self._workers.refuse()
        for peer in peers:
            self._drop(peer, "the transport was closed before the write was over")
        self._workers.close()

    def _drop(self, peer: MappedPeer, reason: str) -> None:
        # Two that drop a peer at once both wait until it is quiet; one of them releases it.
        self._workers.forget(peer, reason)
        with self._lock:
            if peer not in self._peers:
                return
            self._peers.discard(peer)
        peer.release()
