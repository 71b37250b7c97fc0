"""MORI-IO as a fabric: AMD's library over RDMA (host and GPU memory) and XGMI (GPUs of one host).

What the library does to its users, and what is done about it (`mori_guards` has what ends the process):

* A connection that failed stays dead under its engine's key, and so does a process that comes again under its old one.
  So each life of an engine has a key of its own, and a peer that failed is connected to again under an alias.
* The first error of a batch is its last word, while other queue pairs still work on the rest of it. After an error an
  empty write goes down each queue pair; as those keep their order, the batch is over when all of them are.
* The library writes into statuses by address: they are kept until they are final, or the library is gone.
* Notifications tell the target of successes only, are kept for ever, and stall where the two sides disagree on them.
  They are off, and both descriptors say so.
* ``create_session`` holds the interpreter's lock, up to 5 s with a peer that hangs. `MoriFabric.connect` makes those
  that ask the peer for something; other pairs of regions get theirs at their first use, within this process.
* A peer cannot be kept from writing while memory is registered, so `revoke` proves nothing and is not offered.
"""

from __future__ import annotations

import ipaddress
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.base import Costs
from kvbaton.transport.fabric.base import Ended, Fabric, FabricLimits, FabricPeer, Writes
from kvbaton.transport.fabric.mori import guards
from kvbaton.transport.fabric.mori import settings as mori_settings
from kvbaton.transport.fabric.mori.engine import Engine
from kvbaton.transport.fabric.mori.peer import Descriptor, MoriPeer, Place, Posted, Route
from kvbaton.transport.fabric.mori.settings import Settings

DISCONNECT_SECONDS = 5.0
BATCH_BYTES = 256 << 20
"""Writes that touch become one message, which devices limit to 1 or 2 GiB; a batch stays well below."""
POSTS = 16
_REFUSED = (11, 14)  # ERR_INVALID_ARGS, ERR_BAD_STATE: nothing was started.


class MoriFabric(Fabric):
    """One engine of MORI-IO, listening on the host of ``bind`` for peers that ask for its queue pairs and keys.

    ``options`` are those of ``OPTIONS``; ``bind`` and ``advertise`` are as for `kvbaton.transport.create`.
    """

    name = "mori"
    OPTIONS = mori_settings.OPTIONS
    devices_option = staticmethod(mori_settings.devices_option)
    costs = Costs()
    """Not measured: there was no such hardware. The defaults, which are of another library on GPU memory."""
    hardware = True

    def __init__(
        self,
        instance: str,
        options: Mapping[str, str] | None = None,
        *,
        bind: str = "127.0.0.1",
        advertise: str = "",
    ) -> None:
        self._closed = True
        settings = Settings.of(options or {})
        host = guards.control_host(bind, advertise)
        self._engine = Engine(instance, settings, host)
        self.memory_kinds = self._engine.memory_kinds
        self.cross_host = self._engine.rdma and not ipaddress.ip_address(host).is_loopback
        self.limits = FabricLimits(
            writes=max(1, (settings.depth - POSTS) // POSTS * settings.queue_pairs // settings.chunks),
            write_bytes=BATCH_BYTES,
            posts=POSTS,
        )
        self._connecting, self._lock = threading.Lock(), threading.Lock()
        self._routes: dict[str, Route] = {}
        self._peers: set[MoriPeer] = set()
        self._posted: dict[int, Posted] = {}
        self._ended: list[Ended] = []
        self._regions: tuple[Place, ...] = ()
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        """As `Fabric.register`. Regions that begin at one address share a registration.

        The library pins memory when a session needs it first, and ends the process if that fails. So a session with
        this process itself is made for each region: what cannot work fails here, and no request pays for pinning.
        """
        self._require_kinds(regions)
        memory = self._engine.add(list(regions))
        self._regions = tuple(Place(memory[r.address] if r.nbytes else -1, r.nbytes) for r in regions)
        if self._engine.rdma:
            Route(self._engine, Descriptor.decode(self.describe(), "itself"), "itself").pin()

    def describe(self) -> bytes:
        """As `Fabric.describe`."""
        engine = self._engine
        packed = tuple(memory.pack() for memory in engine.memories)
        own = engine.engine.get_engine_desc().pack()
        return Descriptor(own, packed, self._regions, engine.token, engine.settings.backends).encode()

    def connect(self, descriptor: bytes, name: str) -> MoriPeer:
        """As `Fabric.connect`. Reads a token from the peer: a path that does not work is found here."""
        described = Descriptor.decode(descriptor, name)
        backends = self._engine.settings.backends
        if not set(described.backends) & set(backends) or described.notifications:
            raise TransportUnavailable(
                f"peer {name} uses MORI-IO over {', '.join(described.backends)} "
                f"with{'' if described.notifications else 'out'} notifications, this side over "
                f"{', '.join(backends)} without; give both the same options"
            )
        with self._connecting:
            known = [r for r in list(self._routes.values()) if r.described == described and not r.error]
            route = known[0] if known and known[0].answers() else self._open(described, name)
            peer = MoriPeer(name, route)
            with self._lock:
                route.users += 1
                self._peers.add(peer)
        return peer

    def post(self, peer: FabricPeer, writes: Writes, handle: int) -> None:
        """As `Fabric.post`. Blocks up to 5 s (MORI_IO_SQ_BACKOFF_TIMEOUT_US) if a send queue is full."""
        assert isinstance(peer, MoriPeer)
        if not peer.alive:
            raise TransportError(peer.route.error or f"peer {peer.name} was disconnected; connect again")
        here, there = self._regions[writes.local_region], peer.route.described.regions[writes.remote_region]
        _check(writes, here.nbytes, there.nbytes)
        some = np.flatnonzero(writes.lengths)
        if not len(some):
            self._ended.append(Ended(handle))
            return
        columns = (writes.local_offsets[some], writes.remote_offsets[some], writes.lengths[some])
        posted = Posted(handle, peer, peer.route.session(here.memory, there.memory))
        for begin, end in _batches(columns[2]):
            lists = [column[begin:end].tolist() for column in columns]
            status = posted.session.batch_write(*lists, next(peer.route.uids))
            if not posted.statuses and int(status.Code()) in _REFUSED:
                raise TransportError(f"MORI-IO refused {len(some)} writes to {peer.name}: {status.Message()}")
            posted.statuses.append(status)
            if status.Failed():
                break
        self._posted[handle] = posted

    def poll(self) -> list[Ended]:
        """As `Fabric.poll`."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, seconds: float) -> None:
        """As `Fabric.wait`: sleeps on the oldest status, for a millisecond at a time if another may be over before."""
        going = [posted.statuses[-1] for posted in self._posted.values()]
        milliseconds = int(1000 * (seconds if len(going) == 1 else min(seconds, 1e-3)))
        if going and milliseconds:
            going[0].WaitFor(milliseconds)
        else:
            super().wait(seconds)

    def disconnect(self, peer: FabricPeer) -> bool:
        """As `Fabric.disconnect`. MORI-IO cannot take back what was posted."""
        assert isinstance(peer, MoriPeer)
        return self._let_go(peer, time.monotonic())

    def close(self) -> None:
        """As `Fabric.close`. What is still under way after a few seconds ends with the library's queue pairs."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + DISCONNECT_SECONDS
        for peer in list(self._peers):
            self._let_go(peer, deadline)
        for route in self._routes.values():
            route.forget()
        # Only after the sessions, which use it; the statuses may go after it, for nobody writes into them then.
        self._engine.close()
        self._ended += [Ended(handle, "the writes did not end before MORI-IO did") for handle in self._posted]
        self._routes, self._posted = {}, {}

    def found(self) -> list[str]:
        """As `Fabric.found`."""
        return [f"{name} (rdma)" for name in guards.devices_present()]

    def _open(self, described: Descriptor, name: str) -> Route:
        """Connect under a new alias."""
        route = Route(self._engine, described, name)
        self._routes[route.key] = route
        try:
            route.open()
        except BaseException:
            self._forget(route)
            raise
        return route

    def _forget(self, route: Route) -> None:
        if self._routes.pop(route.key, None) is not None:
            route.forget()

    def _collect(self) -> None:
        """Note what ended, and what the library knows to have failed."""
        for key, why in self._engine.failures():
            if (route := self._routes.get(key)) is not None:
                route.fail(why, is_cause=True)
        for posted in list(self._posted.values()):
            if posted.over():
                del self._posted[posted.handle]
                self._ended.append(Ended(posted.handle, posted.error))
                self._leave_if_over(posted.peer)

    def _let_go(self, peer: MoriPeer, deadline: float) -> bool:
        peer.connected = False
        self._collect()
        while self._uses(peer) and time.monotonic() < deadline:
            self.wait(1e-3)
            self._collect()
        self._leave_if_over(peer)
        return not self._uses(peer)

    def _uses(self, peer: MoriPeer) -> bool:
        return any(posted.peer is peer for posted in self._posted.values())

    def _leave_if_over(self, peer: MoriPeer) -> None:
        """Note that a peer that was let go of has nothing under way any more."""
        if peer.connected or self._uses(peer):
            return
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
                peer.route.users -= 1
                if peer.route.error and not peer.route.users:
                    self._forget(peer.route)


def _check(writes: Writes, here: int, there: int) -> None:
    """Raise `TransportError` for lists of several lengths, on which XGMI aborts, and for what lies outside."""
    local, remote, lengths = writes.local_offsets, writes.remote_offsets, writes.lengths
    if not len(local) == len(remote) == len(lengths):
        raise TransportError(f"offsets and lengths differ in number: {len(local)}, {len(remote)} and {len(lengths)}")
    if len(lengths) and (
        min(local.min(), remote.min(), lengths.min()) < 0
        or lengths.max() > BATCH_BYTES
        or (local > here - lengths).any()
        or (remote > there - lengths).any()
    ):
        raise TransportError(
            f"a write lies outside region {writes.local_region} here ({here} bytes) or region {writes.remote_region} "
            f"of the peer ({there} bytes), or is longer than {BATCH_BYTES} bytes"
        )


def _batches(lengths: Int64s) -> Iterator[tuple[int, int]]:
    """Where to cut writes into batches, none longer than twice `BATCH_BYTES`."""
    batch = (np.cumsum(lengths) - 1) // BATCH_BYTES
    cuts = np.flatnonzero(np.diff(batch)) + 1
    return itertools.pairwise([0, *cuts.tolist(), len(lengths)])
