"""NIXL as a fabric: NVIDIA's library over UCX (RDMA, shared memory of one host, TCP) or libfabric.

What the library does not promise, and what is done about it:

* A peer that was killed is noticed at once over TCP and shared memory, over RDMA within about four seconds: with the
  settings of UCX in `backend`, unless the environment has its own.
* What was posted cannot be taken back, and is reported when it is over. A closed agent reads nothing any more.
* UCX takes TCP where RDMA does not work, in silence. ``protocol=rdma`` forbids that, and named devices are looked for
  before UCX is asked. `NixlFabric.connect` reads a token from the peer: a way that does not work is found out there,
  and so is another process in the place of the one that was meant.
* Only RDMA devices check keys. Over TCP and shared memory bytes land wherever the writer says, so there is no `revoke`.
* Damaged metadata can end the process that loads it: see `kvbaton.transport.fabric.descriptor`.
* One request that fails makes the connection useless: `NixlPeer.alive` is False then.

UCX listens at all interfaces (or at ``devices``) and trusts whoever reaches it: use it in networks that you trust.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.fabric.base import Ended, Fabric, FabricLimits, FabricPeer, Writes
from kvbaton.transport.fabric.descriptor import decode, encode
from kvbaton.transport.fabric.nixl import backend as nixl_backend
from kvbaton.transport.fabric.nixl.descriptor import NixlDescriptor, Place
from kvbaton.transport.fabric.scratch import TOKEN_BYTES, Scratch

CONNECT_SECONDS = 5.0
_KINDS = {"host": "DRAM", "cuda": "VRAM"}


class _Connection:
    """What this process has loaded of one peer's agent: shared by all `NixlPeer` of that agent."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.users = 0
        self.alive = True


class NixlPeer(FabricPeer):
    """A peer's agent, with where its regions lie."""

    def __init__(self, name: str, connection: _Connection, regions: tuple[Place, ...]) -> None:
        super().__init__(name)
        self.connection = connection
        self.regions = regions
        self.requests = 0
        self.left = False
        """Whether it was let go of; its agent is forgotten when its last request is over."""

    @property
    def alive(self) -> bool:
        """As `FabricPeer.alive`: False after the first write that failed."""
        return self.connection.alive and not self.left


class _Request(NamedTuple):
    peer: NixlPeer
    request: Any


class NixlFabric(Fabric):
    """One agent of NIXL with one back-end."""

    name = "nixl"
    OPTIONS = nixl_backend.OPTIONS
    devices_option = staticmethod(nixl_backend.devices_option)
    costs = nixl_backend.SHARED_MEMORY_COSTS
    """Over shared memory. Where UCX is told to use nothing but TCP, those of `nixl_backend.TCP_COSTS`."""
    limits = FabricLimits(writes=1 << 18, write_bytes=1 << 31, posts=256)
    cross_host = True

    def __init__(
        self, instance: str, bind: str = "", advertise: str = "", options: Mapping[str, str] | None = None
    ) -> None:
        """Make an agent. ``options`` are those of ``nixl_backend.OPTIONS``; UCX needs no address to ``bind``."""
        self._agent: Any = None
        backend, wanted = nixl_backend.parameters(options or {})
        api = nixl_backend.load()
        self._errors = nixl_backend.errors(api)
        # Agents' names never repeat: a library that knew the old one would refuse the new one.
        self.agent_name = f"{instance}/{secrets.token_hex(4)}"
        config = api.nixl_agent_config(backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        agent = api.nixl_agent(self.agent_name, config)
        nixl_backend.start(agent, backend, wanted, self._errors)
        self._agent = agent
        self.memory_kinds = nixl_backend.memory_kinds()
        self.hardware = nixl_backend.uses_hardware(options or {})
        self.costs = nixl_backend.costs()
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}
        self._requests: dict[int, _Request] = {}
        self._ended: list[Ended] = []
        self._regions: tuple[Place, ...] = ()
        self._registered: list[Any] = []
        self._owners: list[Region] = []
        self._scratch = Scratch()

    def register(self, regions: Sequence[Region]) -> None:
        """As `Fabric.register`."""
        self._require_kinds(regions)
        for index, region in enumerate((*regions, self._scratch.region)):
            row = np.array([[region.address, region.nbytes, region.device]], np.int64)
            try:
                if region.nbytes:
                    self._registered.append(self._agent.register_memory(row, _KINDS[region.kind]))
            except self._errors as error:
                raise TransportUnavailable(
                    f"NIXL cannot register region {index}, {region.nbytes} bytes of {region.kind} memory: {error}; "
                    "look at the limit of locked memory (ulimit -l), and for device memory at UCX's CUDA support"
                ) from error
        self._owners = list(regions)
        self._regions = tuple(Place(r.address, r.nbytes, r.kind, r.device) for r in regions)

    def describe(self) -> bytes:
        """As `Fabric.describe`."""
        metadata, scratch = self._agent.get_agent_metadata(), self._scratch
        described = NixlDescriptor(self.agent_name, metadata, scratch.address, scratch.token, self._regions)
        return encode(described, len(self._regions))

    def connect(self, descriptor: bytes, name: str) -> NixlPeer:
        """As `Fabric.connect`."""
        described = decode(NixlDescriptor, descriptor, name)
        with self._lock:
            connection = self._connections.get(described.agent)
            if connection is not None and not connection.alive:
                self._forget(connection)
                connection = None
            if connection is None:
                connection = self._load(described, name)
            connection.users += 1
        peer = NixlPeer(name, connection, described.regions)
        try:
            self._probe(peer, described)
        except BaseException:
            self._drop(peer)
            raise
        return peer

    def post(self, peer: FabricPeer, writes: Writes, handle: int) -> None:
        """As `Fabric.post`."""
        assert isinstance(peer, NixlPeer)
        if peer.left:
            raise TransportError(f"NIXL is not connected to peer {peer.name} any more; connect again")
        here, there = self._regions[writes.local_region], peer.regions[writes.remote_region]
        rows = np.empty((2, len(writes.lengths), 3), np.int64)
        np.add(writes.local_offsets, here.address, out=rows[0, :, 0])
        np.add(writes.remote_offsets, there.address, out=rows[1, :, 0])
        rows[:, :, 1] = writes.lengths
        rows[0, :, 2], rows[1, :, 2] = here.device, there.device
        try:
            request = self._request("WRITE", (rows[0], here.kind), (rows[1], there.kind), peer.connection.agent)
            state = self._agent.transfer(request)
        except self._errors as error:
            raise TransportError(self._failed(peer, error)) from error
        self._requests[handle] = _Request(peer, request)
        peer.requests += 1
        if state == "DONE":
            self._end(handle)

    def poll(self) -> list[Ended]:
        """As `Fabric.poll`."""
        self._check_requests()
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, peer: FabricPeer) -> bool:
        """As `Fabric.disconnect`. An agent cannot take back what was posted."""
        assert isinstance(peer, NixlPeer)
        if not peer.left:
            peer.left = True
            self._drop_if_over(peer)
        if peer.requests:
            self._check_requests()
        return not peer.requests

    def close(self) -> None:
        """As `Fabric.close`."""
        if self._agent is None:
            return
        for handle in list(self._requests):
            self._end(handle, "the writes did not end before NIXL did")
        with self._lock:
            for connection in list(self._connections.values()):
                self._forget(connection)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered, self._owners, self._agent = [], [], None

    def found(self) -> list[str]:
        """As `Fabric.found`."""
        return [f"{name} ({kind})" for name, kind in nixl_backend.devices_found().items()]

    def _check_requests(self) -> None:
        for handle, (peer, request) in list(self._requests.items()):
            try:
                state = self._agent.check_xfer_state(request)
            except self._errors as error:
                self._end(handle, self._failed(peer, error))
            else:
                if state != "PROC":
                    self._end(handle)

    def _request(self, operation: str, here: tuple[Int64s, str], there: tuple[Int64s, str], agent: str) -> Any:
        lists = [self._agent.get_xfer_descs(rows, _KINDS[kind]) for rows, kind in (here, there)]
        return self._agent.initialize_xfer(operation, *lists, agent)

    def _end(self, handle: int, error: str = "") -> None:
        peer, request = self._requests.pop(handle)
        with contextlib.suppress(*self._errors):
            request.release()
        self._ended.append(Ended(handle, error))
        peer.requests -= 1
        self._drop_if_over(peer)

    def _failed(self, peer: NixlPeer, error: BaseException) -> str:
        """The text for a request that failed; after most failures the connection is of no more use."""
        if type(error).__name__ in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
            return f"NIXL refused the request to peer {peer.name}: {error}"
        peer.connection.alive = False
        return f"NIXL lost peer {peer.name}: {error}; it has ended, its memory was taken away, or the network is down"

    def _load(self, described: NixlDescriptor, name: str) -> _Connection:
        try:
            agent = self._agent.add_remote_agent(described.metadata)
        except self._errors as error:
            raise TransportUnavailable(
                f"NIXL finds no way to peer {name} ({error}): both sides need the same backend and protocol, and a "
                "network in common"
            ) from error
        connection = self._connections[described.agent] = _Connection(agent)
        return connection

    def _probe(self, peer: NixlPeer, described: NixlDescriptor) -> None:
        """Read the peer's token: the connection is made now, and it is proven to work and to lead to that process."""
        slot = self._scratch.take()
        places = self._scratch.address_of(slot), described.token_address
        rows = np.array([[place, TOKEN_BYTES, 0] for place in places], np.int64)
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            request = self._request("READ", (rows[:1], "host"), (rows[1:], "host"), peer.connection.agent)
            state = self._agent.transfer(request)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(1e-3)
                state = self._agent.check_xfer_state(request)
            request.release()
        except self._errors as error:
            raise TransportUnavailable(self._failed(peer, error)) from error
        if state != "DONE":
            peer.connection.alive = False
            raise TransportUnavailable(f"peer {peer.name} did not answer over NIXL within {CONNECT_SECONDS:g} s")
        if self._scratch.found(slot) != described.token:
            peer.connection.alive = False
            raise TransportUnavailable(f"another process answers over NIXL in the place of peer {peer.name}")

    def _drop_if_over(self, peer: NixlPeer) -> None:
        if peer.left and not peer.requests:
            self._drop(peer)

    def _drop(self, peer: NixlPeer) -> None:
        with self._lock:
            peer.connection.users -= 1
            if not peer.connection.users:
                self._forget(peer.connection)

    def _forget(self, connection: _Connection) -> None:
        connection.alive = False
        if self._connections.get(connection.agent) is connection:
            del self._connections[connection.agent]
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(connection.agent)
