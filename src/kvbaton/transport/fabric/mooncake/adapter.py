"""Mooncake as a fabric: its transfer engine over RDMA or TCP, with handshakes from peer to peer (no metadata server).

What the library does not promise, and what is done about it:

* Its lists of writes end with the first write that fails, while others of the list still move. So each write is a
  batch of its own here: such a batch is over exactly when the library says so, and asking does not block.
* Its TCP queues refuse what is beyond about 1,000 writes to a peer. Writes wait here instead: the library has a window
  of them, and `MooncakeFabric.poll` refills it. A post may hold any number.
* It takes RDMA where it finds a device and TCP where it does not, whatever it is asked for. Here it gets no choice:
  `protocol=rdma` without a usable device is refused, unless `allow_tcp=1`.
* It avoids a peer after failures: over TCP for a second, over RDMA for 30, of which one is left here.
* What it knows of an address it never asks again. A process that comes back at the same one gets a new spelling of it.
* It names no process, only an address: `MooncakeFabric.connect` reads a token from the peer.
* What was handed over cannot be taken back, and is reported when it is over. An engine that was closed reads and writes
  nothing more.
* It keeps its connections to an address, four over TCP, until it is closed, whether somebody still lives there or not.
* A peer that does not answer ends its writes after 30 s over TCP (``MC_TCP_STATUS_TIMEOUT_SEC``), a dead one at once.
* Taking a registration back stops everybody, and what began before it goes on: `revoke` proves nothing.

It listens at all interfaces, at two ports from 15000 to 16999 (``MC_MIN_RPC_PORT``, ``MC_MAX_RPC_PORT``), and takes
writes into registered memory from whoever reaches them: use it in networks that you trust.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvbaton.address import Endpoint, advertised
from kvbaton.errors import AddressError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.base import Costs
from kvbaton.transport.dial import ANSWER_SECONDS
from kvbaton.transport.fabric.base import Ended, Fabric, FabricPeer, Writes
from kvbaton.transport.fabric.mooncake import engine as mooncake_engine
from kvbaton.transport.fabric.mooncake.descriptor import MooncakeDescriptor
from kvbaton.transport.fabric.mooncake.engine import choose, lanes, library, rdma_devices, start
from kvbaton.transport.fabric.scratch import TOKEN_BYTES, Scratch
from kvbaton.transport.resolve import resolve

CONNECT_SECONDS = 5.0
WINDOWS = {"tcp": 128, "rdma": 1024}
"""Writes that the library has of a peer at a time. Over TCP, a peer that refuses them ends four in a second."""
_ENDED = frozenset({1, -1})


class _Job:
    """What is left of one post, in the order in which the library gets it."""

    def __init__(self, handle: int, here: Int64s, there: Int64s, lengths: Int64s) -> None:
        self.handle = handle
        self.columns = (here, there, lengths)
        self.pieces = len(lengths)
        self.given = 0
        self.flying = 0
        self.failed = 0
        self.error = ""

    def drop(self, error: str) -> None:
        """End with ``error``, without the pieces that the library has not got yet."""
        self.given = self.pieces
        self.error = self.error or error


class MooncakePeer(FabricPeer):
    """A peer's segment, as the library calls it, and where its regions begin."""

    def __init__(self, name: str, segment: str, bases: Int64s) -> None:
        super().__init__(name)
        self.segment = segment
        self.bases = bases
        self.jobs: deque[_Job] = deque()
        self.flying: list[int] = []
        self.failed = False
        self.closed = False

    @property
    def alive(self) -> bool:
        """As `FabricPeer.alive`: False after the first write that failed."""
        return not (self.failed or self.closed)


class MooncakeFabric(Fabric):
    """One transfer engine. ``bind`` and ``advertise`` give the host that peers dial; the ports are the library's."""

    name = "mooncake"
    OPTIONS = mooncake_engine.OPTIONS
    devices_option = staticmethod(mooncake_engine.devices_option)
    costs = Costs(piece_seconds=20e-6, copy_bytes_per_second=27e9, packed_seconds=20e-6)
    """Over TCP, two processes of one host (`kvbaton bench fabrics`): a piece takes 20 us and more, up to 32 KiB
    whatever its size. Copies overlap with the wire: at 270 KiB both ways cost the same."""
    cross_host = True

    def __init__(
        self, instance: str, bind: str = "127.0.0.1", advertise: str = "", options: Mapping[str, str] | None = None
    ) -> None:
        self._engine: Any = None
        self.instance = instance
        self.host = advertised(Endpoint.parse(bind).host, advertise or None)
        protocols, devices = choose(dict(options or {}))
        module = library(ipv6=":" in self.host)
        self.protocol, self._engine = start(module, self.host, protocols, devices)
        self.memory_kinds = frozenset({"host", "cuda"} if module.SUPPORT_CUDA or module.SUPPORT_HIP else {"host"})
        self.hardware = self.protocol == "rdma"
        self.kept_sockets = lanes() if self.protocol == "tcp" else 0
        self._window = WINDOWS[self.protocol]
        self._bases = np.empty(0, np.int64)
        self._owners: list[Region] = []
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self._spellings: dict[Endpoint, int] = {}
        self._busy: dict[MooncakePeer, None] = {}
        self._ended: list[Ended] = []

    def register(self, regions: Sequence[Region]) -> None:
        """As `Fabric.register`."""
        self._require_kinds(regions)
        for index, region in enumerate((*regions, self._scratch.region)):
            place = "*" if region.kind == "host" else f"cuda:{region.device}"
            code = region.nbytes and self._engine.batch_register_memory([region.address], [region.nbytes], place)
            if code:
                raise TransportUnavailable(
                    f"Mooncake cannot register region {index}, {region.nbytes} bytes of {region.kind} memory "
                    f"(code {code}): regions may not overlap, and RDMA needs the right to lock memory (ulimit -l)"
                )
        self._owners = list(regions)
        self._bases = np.array([region.address for region in regions], np.int64)

    def describe(self) -> bytes:
        """As `Fabric.describe`."""
        return MooncakeDescriptor(
            self.host,
            self._engine.get_rpc_port(),
            self.protocol,
            self._scratch.address,
            self._scratch.token,
            self._bases.tobytes(),
        ).encode()

    def connect(self, descriptor: bytes, name: str) -> MooncakePeer:
        """As `Fabric.connect`."""
        described = MooncakeDescriptor.decode(descriptor, name)
        if described.protocol != self.protocol:
            raise TransportUnavailable(
                f"peer {name} has Mooncake over {described.protocol}, this side over {self.protocol}; "
                f"set protocol={described.protocol} here, or protocol={self.protocol} there"
            )
        try:
            # The library would look a name up without a deadline.
            address = Endpoint(resolve(described.host, ANSWER_SECONDS)[0], described.port)
        except AddressError as error:
            raise TransportUnavailable(f"peer {name} cannot be reached: {error}") from error
        if self._engine.send_probe(str(address)):
            raise TransportUnavailable(f"peer {name} does not answer Mooncake's handshake at {address}")
        with self._lock:
            known = self._spellings.setdefault(address, 0)
        for spelling in (known, known + 1):
            segment = f"{str(address).removesuffix(str(address.port))}{'0' * spelling}{address.port}"
            if self._reads_token(segment, described):
                with self._lock:
                    self._spellings[address] = max(spelling, self._spellings[address])
                return MooncakePeer(name, segment, described.bases)
        raise TransportUnavailable(
            f"peer {name} answers at {address}, but Mooncake cannot read its token over {self.protocol}: another "
            "process has taken its place, or its data port or RDMA device cannot be reached from here"
        )

    def post(self, peer: FabricPeer, writes: Writes, handle: int) -> None:
        """As `Fabric.post`. Does not block: what exceeds the window waits for `poll`."""
        assert isinstance(peer, MooncakePeer)
        if peer.closed or self._engine is None:
            raise TransportError(f"Mooncake is not connected to peer {peer.name} any more; connect again")
        here = writes.local_offsets + self._bases[writes.local_region]
        there = writes.remote_offsets + peer.bases[writes.remote_region]
        peer.jobs.append(_Job(handle, here, there, writes.lengths.copy()))
        self._busy[peer] = None
        self._give(peer)

    def poll(self) -> list[Ended]:
        """As `Fabric.poll`."""
        for peer in list(self._busy):
            self._collect(peer)
            self._give(peer)
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, peer: FabricPeer) -> bool:
        """As `Fabric.disconnect`. Takes back what waits for room in the library's queues."""
        assert isinstance(peer, MooncakePeer)
        peer.closed = True
        for job in peer.jobs:
            if job.given < job.pieces:
                job.drop(f"the connection to peer {peer.name} was closed")
        self._collect(peer)
        return not peer.flying

    def close(self) -> None:
        """As `Fabric.close`. Cuts off what is under way."""
        for peer in self._busy:
            peer.closed = True
            peer.jobs.clear()
            peer.flying.clear()
        self._busy.clear()
        # The last reference: the library's threads and registrations end with it.
        self._engine = None
        self._owners = []

    def found(self) -> list[str]:
        """As `Fabric.found`."""
        return [f"{device} (rdma)" for device in rdma_devices()]

    def _give(self, peer: MooncakePeer) -> None:
        """Hand waiting pieces to the library until the window is full."""
        for job in peer.jobs:
            room = self._window - len(peer.flying)
            if room <= 0:
                break
            if job.given < job.pieces:
                part = slice(job.given, job.given + room)
                columns = (column[part].tolist() for column in job.columns)
                given = list(map(self._engine.transfer_submit_write, itertools.repeat(peer.segment), *columns))
                job.given += len(given)
                if 0 in given:
                    taken = list(filter(None, given))
                    self._fail(peer, job, len(given) - len(taken))
                    given = taken
                job.flying += len(given)
                peer.flying += given
        self._report(peer)

    def _collect(self, peer: MooncakePeer) -> None:
        """Count the pieces that are over, in the order in which they were given."""
        states = map(self._engine.transfer_check_status, peer.flying)
        ended = list(itertools.takewhile(_ENDED.__contains__, states))
        del peer.flying[: len(ended)]
        first = 0
        for job in peer.jobs:
            last = min(first + job.flying, len(ended))
            job.flying -= last - first
            if failed := ended[first:last].count(-1):
                self._fail(peer, job, failed)
            first = last
        self._report(peer)

    def _fail(self, peer: MooncakePeer, job: _Job, failed: int) -> None:
        peer.failed = True
        job.failed += failed
        job.drop("refused")

    def _report(self, peer: MooncakePeer) -> None:
        """End the jobs at the head that have nothing left."""
        while peer.jobs and not peer.jobs[0].flying and peer.jobs[0].given == peer.jobs[0].pieces:
            job = peer.jobs.popleft()
            if job.failed:
                job.error = (
                    f"Mooncake failed with {job.failed} of {job.pieces} writes to peer {peer.name}: it has ended, its "
                    "memory was taken away, or the network is down"
                )
            self._ended.append(Ended(job.handle, job.error))
        if not peer.jobs:
            self._busy.pop(peer, None)

    def _reads_token(self, segment: str, described: MooncakeDescriptor) -> bool:
        """Whether the process behind ``segment`` is the one that was described, and its memory can be reached."""
        slot = self._scratch.take()
        deadline = time.monotonic() + CONNECT_SECONDS
        read = ([self._scratch.address_of(slot)], [described.token_address], [TOKEN_BYTES])
        batch = self._engine.batch_transfer_async_read(segment, *read)
        state = self._engine.transfer_check_status(batch) if batch else -1
        while state not in _ENDED and time.monotonic() < deadline:
            time.sleep(1e-3)
            state = self._engine.transfer_check_status(batch)
        return state == 1 and self._scratch.found(slot) == described.token
