"""The shm transport: maps the peer's `SharedMemory` and copies rows to rows in one pass.

For two processes of one host, one user and one pid namespace. The writer's regions may be any host memory; a region
that is written to must be shared memory. A live process that mapped our memory cannot be shut out of it, so `fence`
turns True when that process is proven dead.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import AttachedMemory, SharedMemoryKey
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.admitted import Admitted
from kvbaton.transport.base import Capabilities
from kvbaton.transport.mapped import MappedTransport, fastest_workers
from kvbaton.transport.process import ProcessKey, ProcessWatch
from kvbaton.transport.table import MAX_DESCRIPTOR
from kvbaton.transport.workers import AT_ONCE, MappedPeer

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class ShmRegion(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies in a shared file; ``descriptor`` -1: the region is not shared, and cannot be written to."""

    nbytes: Number
    offset: Number = 0
    descriptor: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    device: Annotated[int, msgspec.Meta(ge=0)] = 0
    inode: Annotated[int, msgspec.Meta(ge=0)] = 0
    file_bytes: Number = 0


class ShmDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="shm1"):
    """What a peer needs to map the regions of a process."""

    instance: str
    process: ProcessKey
    regions: tuple[ShmRegion, ...]


class ShmPeer(MappedPeer):
    """A process whose memory is mapped here."""

    def __init__(self, instance: str, bases: Int64s, nbytes: Int64s, files: list[AttachedMemory], watch: ProcessWatch):
        super().__init__(instance, bases, nbytes)
        self._files = files
        self._watch = watch
        self.descriptor = watch.descriptor

    def enter(self) -> str:
        """As `MappedPeer.enter`."""
        return f"the process of peer {self.instance} has ended" if self._watch.dead() else ""

    def release(self) -> None:
        """As `MappedPeer.release`."""
        for file in self._files:
            file.close()
        self._watch.close()


class ShmTransport(MappedTransport):
    """Copies into the shared memory of another process of this host."""

    name = "shm"
    capabilities = Capabilities(
        mapped=True, cross_host=False, memory_kinds=frozenset({"host"}), needs_shared_memory=True, lets_go=True
    )

    def __init__(self, instance: str, *, workers: int = 0) -> None:
        super().__init__(instance, fastest_workers("kvbaton-shm", workers, AT_ONCE))
        self._process = ProcessKey.own()
        self._admitted = Admitted()

    def describe(self) -> bytes:
        """As `Transport.describe`. Raises `TransportError` if there are too many regions for a descriptor."""
        regions = []
        for region in self.table.regions:
            if region.shared is None:
                regions.append(ShmRegion(region.nbytes))
                continue
            key = region.shared.key
            offset = region.address - region.shared.address
            regions.append(ShmRegion(region.nbytes, offset, key.descriptor, key.device, key.inode, key.nbytes))
        encoded = msgspec.msgpack.encode(ShmDescriptor(self.instance, self._process, tuple(regions)))
        if len(encoded) > MAX_DESCRIPTOR:
            raise TransportError(
                f"{len(regions)} regions make a descriptor of {len(encoded)} bytes, more than {MAX_DESCRIPTOR}; "
                "register fewer, larger regions"
            )
        return encoded

    def _attach(self, descriptor: bytes) -> MappedPeer:
        described = decode_descriptor(descriptor)
        shared = [region for region in described.regions if region.descriptor >= 0]
        if not shared and any(region.nbytes for region in described.regions):
            raise TransportUnavailable(
                f"none of the {len(described.regions)} regions of peer {described.instance} is shared memory; "
                "allocate them as kvbaton.memory.SharedMemory, or use tcp"
            )
        watch = ProcessWatch(described.process)
        files: dict[SharedMemoryKey, AttachedMemory] = {}
        try:
            if watch.dead():
                raise TransportUnavailable(f"the process of peer {described.instance} has ended")
            for region in shared:
                key = _file_of(region, described.process.pid)
                if key not in files:
                    files[key] = AttachedMemory(key)
        except BaseException:
            for file in files.values():
                file.close()
            watch.close()
            raise
        bases = np.zeros(len(described.regions), dtype=np.int64)
        nbytes = np.zeros(len(described.regions), dtype=np.int64)
        for number, region in enumerate(described.regions):
            if region.descriptor >= 0:
                bases[number] = files[_file_of(region, described.process.pid)].address + region.offset
                nbytes[number] = region.nbytes
        return ShmPeer(described.instance, bases, nbytes, list(files.values()), watch)

    def admit(self, descriptor: bytes) -> None:
        """As `Transport.admit`. Raises `TransportUnavailable` for a process that cannot be watched from here."""
        described = decode_descriptor(descriptor)
        self._admitted.add(described.instance, described.process)

    def fence(self, instance: str) -> bool:
        """As `Transport.fence`: True when the admitted process is dead, or when none was ever admitted."""
        return self._admitted.fence(instance)

    def close(self) -> None:
        """As `Transport.close`."""
        super().close()
        self._admitted.close()


def _file_of(region: ShmRegion, pid: int) -> SharedMemoryKey:
    return SharedMemoryKey(pid, region.descriptor, region.device, region.inode, region.file_bytes)


def decode_descriptor(descriptor: bytes) -> ShmDescriptor:
    """Decode a descriptor. Raises `TransportError` for anything else."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=ShmDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"this is not a descriptor of the shm transport: {error}") from error
    for number, region in enumerate(described.regions):
        if region.descriptor >= 0 and region.offset + region.nbytes > region.file_bytes:
            raise TransportError(
                f"region {number} of peer {described.instance} ends at byte {region.offset + region.nbytes}, "
                f"but its file has {region.file_bytes}"
            )
    return described
