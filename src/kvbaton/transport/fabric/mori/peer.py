"""What MORI-IO holds of a peer: its description, the sessions between regions, and writes under way."""

from __future__ import annotations

import ipaddress
import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.transport.fabric import descriptor
from kvbaton.transport.fabric.base import FabricPeer
from kvbaton.transport.fabric.mori.engine import Engine
from kvbaton.transport.fabric.scratch import TOKEN_BYTES

CONNECT_SECONDS = 5.0
SUCCESS, INIT, IN_PROGRESS = 0, 1, 2


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A region: the memory that it is in, from its first byte, and its length. An empty one has no memory (-1)."""

    memory: Annotated[int, msgspec.Meta(ge=-1)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Descriptor(msgspec.Struct, frozen=True, array_like=True, tag="mori1"):
    """What a peer needs to connect. ``token`` is what it finds at the begin of memory 0, where there is RDMA."""

    engine: bytes
    memories: tuple[bytes, ...]
    regions: tuple[Place, ...]
    token: bytes
    backends: tuple[str, ...]
    notifications: bool = False

    def encode(self) -> bytes:
        """As bytes. Raises `TransportError` if those are too many."""
        return descriptor.encode(self, len(self.regions))

    @classmethod
    def decode(cls, encoded: bytes, name: str) -> Descriptor:
        """Decode what peer ``name`` sent. Raises `TransportError` for anything but a descriptor."""
        described = descriptor.decode(cls, encoded, name)
        memories = len(described.memories)
        if any(place.memory >= memories or (place.nbytes and place.memory < 0) for place in described.regions):
            raise TransportError(f"the descriptor of peer {name} has regions without memory")
        return described


class Route:
    """A peer's engine under one alias, shared by all `MoriPeer` of that engine.

    Raises `TransportError` if the peer's description is not one of this library.
    """

    def __init__(self, own: Engine, described: Descriptor, name: str) -> None:
        self.own, self.described, self.name = own, described, name
        self.key = f"{name}#{next(own.aliases)}/{secrets.token_hex(4)}"
        self.remote = _renamed(own.io.EngineDesc, described.engine, self.key, name)
        self.memories = [_renamed(own.io.MemoryDesc, memory, self.key, name) for memory in described.memories]
        if any(place.nbytes and place.nbytes > self.memories[place.memory].size for place in described.regions):
            raise TransportError(f"the regions of peer {name} are larger than the memory that they are in")
        self.sessions: dict[tuple[int, int], Any] = {}
        self.uids = itertools.count()
        self.users = 0
        self.error = ""

    def open(self) -> None:
        """Connect, ask the peer for all that there is to ask, pin what is not pinned yet, and read the peer's token.

        Raises `TransportUnavailable` if one of that does not work.
        """
        self.own.engine.register_remote_engine(self.remote)
        here, there = _one_of_each_place(self.own.memories), _one_of_each_place(self.memories)
        pairs = {(local, remote) for local in here for remote in range(len(self.memories))}
        pairs |= {(local, remote) for local in range(len(self.own.memories)) for remote in there}
        for pair in sorted(pairs):
            self.session(*pair)
        if not self.answers():
            raise TransportUnavailable(self.error)

    def pin(self) -> None:
        """Of this process itself: pin its memory, on the devices of the first queue pairs. Raises as `open`."""
        self.own.engine.register_remote_engine(self.remote)
        for local in range(len(self.own.memories)):
            self.session(local, 0)
        self.forget()

    def session(self, local: int, remote: int) -> Any:
        """The session of two memories. Raises `TransportUnavailable` if there is none to be had."""
        session = self.sessions.get((local, remote))
        if session is None:
            try:
                session = self.own.engine.create_session(self.own.memories[local], self.memories[remote])
            except RuntimeError as error:
                raise TransportUnavailable(
                    f"MORI-IO cannot connect to peer {self.name} at {self.remote.host}:{self.remote.port}: {error}; it "
                    "must be alive, and its address and port reachable"
                ) from error
            if session is None:
                raise TransportUnavailable(
                    f"MORI-IO over {', '.join(self.own.settings.backends)} has no way to memory {remote} of peer "
                    f"{self.name}; between hosts, and for host memory, both sides need backends=rdma"
                )
            self.sessions[local, remote] = session
        return session

    def answers(self) -> bool:
        """Whether the peer's token can be read over each queue pair; else the route has failed.

        True where there is no RDMA to lose.
        """
        if not self.described.token or not self.own.rdma:
            return True
        if not all(session.alive() for session in list(self.sessions.values())):
            self.fail("its queue pairs broke")
            return False
        limit = time.monotonic() + CONNECT_SECONDS
        rows = [self.own.scratch.take() for _ in range(self.own.settings.queue_pairs)]
        session = self.session(0, 0)
        reads = [session.read(row * TOKEN_BYTES, 0, TOKEN_BYTES, pair) for pair, row in enumerate(rows)]
        for row, status in zip(rows, reads, strict=True):
            code = int(status.WaitFor(max(0, int(1000 * (limit - time.monotonic())))))
            if code in (INIT, IN_PROGRESS):
                self.fail(f"it did not answer within {CONNECT_SECONDS:g} s")
            elif code != SUCCESS:
                self.fail(status.Message())
            elif self.own.scratch.found(row) != self.described.token:
                self.fail("another process listens at its address now; get its new descriptor")
        if self.error:
            self.own.kept += reads  # The library may still write into them.
        return not self.error

    def fail(self, why: str, *, is_cause: bool = False) -> None:
        """Give the route up. The first reason counts, unless a later one is known to be the cause."""
        if is_cause or not self.error:
            self.error = (
                f"MORI-IO lost peer {self.name}: {why}; it has ended, gave up its memory, or the network is down"
            )

    def forget(self) -> None:
        """Let go of the alias. Its queue pairs stay until the library is closed, which has no call to end them."""
        self.error = self.error or f"peer {self.name} was disconnected; connect again"
        self.sessions.clear()
        self.own.engine.deregister_remote_engine(self.remote)


class MoriPeer(FabricPeer):
    """A peer's engine."""

    def __init__(self, name: str, route: Route) -> None:
        super().__init__(name)
        self.route = route
        self.connected = True

    @property
    def alive(self) -> bool:
        """As `FabricPeer.alive`: False after the first write that failed, or a failure that the library reported."""
        return self.connected and not self.route.error


class Posted:
    """Writes under way: a status for each batch, and after an error one for each queue pair."""

    def __init__(self, handle: int, peer: MoriPeer, session: Any) -> None:
        self.handle, self.peer, self.session = handle, peer, session
        self.statuses: list[Any] = []
        self.failed = False

    @property
    def error(self) -> str:
        """Why it failed; empty if it did not."""
        return self.peer.route.error if self.failed else ""

    def over(self) -> bool:
        """Whether the library touches no memory for it any more. Asking is also what makes XGMI go on."""
        codes = [int(status.WaitFor(0)) for status in self.statuses]
        for status, code in zip(self.statuses, codes, strict=True):
            if code not in (SUCCESS, INIT, IN_PROGRESS) and not self.failed:
                self.failed = True
                route = self.peer.route
                route.fail(status.Message())
                self.statuses += [self.session.write(0, 0, 0, pair) for pair in range(route.own.settings.queue_pairs)]
                return False
        return not any(code in (INIT, IN_PROGRESS) for code in codes)


def _renamed(kind: Any, packed: bytes, key: str, name: str) -> Any:
    """An engine's or a memory's description under another key of its engine, which is the first of its fields.

    Raises `TransportError` if it is none, or has an address that the library would take for another.
    """
    try:
        kind.unpack(packed)
        fields = msgspec.msgpack.decode(packed)
        fields[0] = key
        described = kind.unpack(msgspec.msgpack.encode(fields))
        found = described.engine_key if hasattr(described, "engine_key") else described.key
        ipaddress.IPv4Address(getattr(described, "host", "0.0.0.0"))
    except (RuntimeError, ValueError, TypeError, IndexError, msgspec.MsgspecError) as error:
        raise TransportError(f"what peer {name} sent is not of this version of MORI-IO: {error}") from error
    if found != key:
        raise TransportError(f"peer {name} has another version of MORI-IO; install the same amd-mori on both sides")
    return described


def _one_of_each_place(memories: Sequence[Any]) -> list[int]:
    """The first memory of each device and NUMA node: queue pairs are made for each pair of those."""
    first: dict[tuple[int, int, int], int] = {}
    for index, memory in enumerate(memories):
        first.setdefault((int(memory.loc), memory.device_id, memory.numa_node), index)
    return list(first.values())
