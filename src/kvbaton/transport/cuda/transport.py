"""The cuda transport: maps the peer's device memory and copies rows to rows in one pass, on the writer's device.

For two processes of one host, one user and one pid namespace, whose memory is on one GPU or on two that reach each
other. A live process that mapped our memory cannot be shut out of it, so `fence` turns True when that process is proven
dead and its device has let go of its work.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

import kvbaton.cuda
from kvbaton.cuda.base import Driver
from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import AttachedMemory, Region, SharedMemory, SharedMemoryKey
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.admitted import Admitted
from kvbaton.transport.base import Capabilities
from kvbaton.transport.cuda.descriptor import (
    CudaDescriptor,
    CudaRegion,
    Life,
    Shared,
    decode_descriptor,
    encode_descriptor,
)
from kvbaton.transport.cuda.trial import try_out
from kvbaton.transport.cuda.workers import CudaWorkers
from kvbaton.transport.mapped import MappedTransport
from kvbaton.transport.process import ProcessKey, ProcessWatch
from kvbaton.transport.table import RegionTable
from kvbaton.transport.workers import MappedPeer

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""How long after the end of a writer's process its device may still be at work for it: see docs/transports.md."""
KIND = "cuda"


class CudaPeer(MappedPeer):
    """A process whose device memory is mapped here."""

    def __init__(
        self,
        instance: str,
        bases: Int64s,
        nbytes: Int64s,
        opened: list[int],
        device: int,
        driver: Driver,
        watch: ProcessWatch,
    ) -> None:
        super().__init__(instance, bases, nbytes)
        self._opened = opened
        self._device = device
        self._driver = driver
        self._watch = watch

    def enter(self) -> str:
        """As `MappedPeer.enter`."""
        return f"the process of peer {self.instance} has ended" if self._watch.dead() else ""

    def release(self) -> None:
        """As `MappedPeer.release`."""
        _close(self._driver, self._opened, self._device)
        self._watch.close()


class CudaTransport(MappedTransport):
    """Copies into the device memory of another process of this host.

    ``driver`` is that of this process by default. Raises `TransportUnavailable` where there is none.
    """

    name = "cuda"
    capabilities = Capabilities(
        mapped=True,
        cross_host=False,
        memory_kinds=frozenset({KIND}),
        needs_shared_memory=False,
        lets_go=True,
    )

    def __init__(self, instance: str, *, driver: Driver | None = None) -> None:
        if driver is None:
            kvbaton.cuda.require()
        self._given = driver
        self._device_workers = CudaWorkers()
        super().__init__(instance, self._device_workers)
        self._process = ProcessKey.own()
        self._life = SharedMemory(1)
        self._admitted = Admitted(SETTLE_SECONDS)
        self._device = -1
        self._shared: list[Shared] = []
        self._described: tuple[CudaRegion, ...] = ()

    @cached_property
    def _driver(self) -> Driver:
        """Started when there is memory for it: a rank without any shall have no context on a device."""
        return self._given or kvbaton.cuda.driver()

    def register(self, regions: Sequence[Region]) -> None:
        """As `Transport.register`. Host memory may be among the ``regions``; it is neither read nor written.

        Raises `TransportUnavailable` where there is no memory of a device, or of several.
        """
        self.table = RegionTable.of_kinds(regions, frozenset({KIND, "host"}), self.name)
        usable = [region.kind == KIND and region.nbytes > 0 for region in regions]
        devices = sorted({region.device for region, use in zip(regions, usable, strict=True) if use})
        if not devices:
            raise TransportUnavailable(f"none of the {len(regions)} regions is memory of a CUDA device; use shm or tcp")
        if len(devices) > 1:
            raise TransportUnavailable(
                f"the regions are on devices {', '.join(map(str, devices))}; the memory of one rank must be on one "
                "device: make a manager for each"
            )
        try_out(self._driver, devices[0])
        self.table.nbytes = np.where(usable, self.table.nbytes, 0)
        self._device = devices[0]
        self._device_workers.use(self._driver, self._device)
        self._described = tuple(
            self._export(number, region) if use else CudaRegion(0, why="it is host memory")
            for number, (region, use) in enumerate(zip(regions, usable, strict=True))
        )

    def reads(self, region: int) -> bool:
        """As `Transport.reads`: not what is host memory."""
        return bool(self.table.nbytes[region])

    def describe(self) -> bytes:
        """As `Transport.describe`. Raises `TransportError` if there are too many regions for a descriptor."""
        if self._device < 0:
            raise TransportError("nothing is registered yet; register the regions before describing them")
        life = Life(*self._life.key[1:])
        uuid = self._driver.uuids[self._device]
        return encode_descriptor(
            CudaDescriptor(self.instance, self._process, life, uuid, tuple(self._shared), self._described)
        )

    def _export(self, number: int, region: Region) -> CudaRegion:
        allocation = self._driver.allocation(region.address, region.device)
        try:
            handle = self._driver.export(allocation.base, region.device)
        except TransportUnavailable as error:
            # Its own writes can read it all the same.
            logger.warning("cuda: peers cannot write into region %d: %s", number, error)
            return CudaRegion(region.nbytes, why=str(error)[:512])
        offset = region.address - allocation.base
        if offset + region.nbytes > allocation.nbytes:
            self._driver.retract(handle)
            raise TransportUnavailable(
                f"region {number} ends {offset + region.nbytes} bytes behind the begin of its allocation, which has "
                f"{allocation.nbytes}"
            )
        shared = Shared(handle, allocation.nbytes)
        if shared in self._shared:
            self._driver.retract(handle)
        else:
            self._shared.append(shared)
        return CudaRegion(region.nbytes, self._shared.index(shared), offset)

    def _attach(self, descriptor: bytes) -> MappedPeer:
        described = decode_descriptor(descriptor)
        instance = described.instance
        if self._device < 0:
            raise TransportError("nothing is registered yet; register the regions before connecting")
        self._check_device(described)
        if not described.allocations:
            reasons = sorted({region.why for region in described.regions if region.nbytes and region.why})
            raise TransportUnavailable(f"no region of peer {instance} can be written to: {'; '.join(reasons)}")
        watch = ProcessWatch(described.process)
        opened: list[int] = []
        try:
            if watch.dead():
                raise TransportUnavailable(f"the process of peer {instance} has ended")
            AttachedMemory(SharedMemoryKey(described.process.pid, *msgspec.structs.astuple(described.life))).close()
            for number, shared in enumerate(described.allocations):
                found = self._driver.open(shared.handle, self._device)
                opened.append(found.base)
                if found.nbytes < shared.nbytes:
                    raise TransportUnavailable(
                        f"allocation {number} of peer {instance} has {found.nbytes} bytes here, the descriptor says "
                        f"{shared.nbytes}"
                    )
        except BaseException:
            _close(self._driver, opened, self._device)
            watch.close()
            raise
        bases = np.zeros(len(described.regions), dtype=np.int64)
        nbytes = np.zeros(len(described.regions), dtype=np.int64)
        for number, region in enumerate(described.regions):
            if region.allocation >= 0:
                bases[number] = opened[region.allocation] + region.offset
                nbytes[number] = region.nbytes
        return CudaPeer(instance, bases, nbytes, opened, self._device, self._driver, watch)

    def _check_device(self, described: CudaDescriptor) -> None:
        uuids = self._driver.uuids
        if described.device not in uuids:
            raise TransportUnavailable(
                f"peer {described.instance} is on device {_name(described.device)}, which this process does not see: "
                f"it sees {', '.join(map(_name, uuids))}; name both in CUDA_VISIBLE_DEVICES, or use tcp"
            )
        there = uuids.index(described.device)
        if not self._driver.reaches(self._device, there):
            raise TransportUnavailable(
                f"device {self._device} cannot address the memory of device {there} ({_name(described.device)}), on "
                f"which peer {described.instance} is; use GPUs that are linked, or tcp"
            )

    def admit(self, descriptor: bytes) -> None:
        """As `Transport.admit`. Raises `TransportUnavailable` for a process that cannot be watched from here."""
        described = decode_descriptor(descriptor)
        self._admitted.add(described.instance, described.process)

    def fence(self, instance: str) -> bool:
        """As `Transport.fence`: True `SETTLE_SECONDS` after the end of the admitted process, or if there was none."""
        return self._admitted.fence(instance)

    def close(self) -> None:
        """As `Transport.close`."""
        super().close()
        self._admitted.close()
        self._life.close()
        shared, self._shared = self._shared, []
        for each in shared:
            self._driver.retract(each.handle)


def _close(driver: Driver, opened: list[int], device: int) -> None:
    for base in opened:
        try:
            driver.close(base, device)
        except TransportError as error:
            # A device that failed: its mappings end with this process.
            logger.warning("cuda: a peer's memory could not be closed: %s", error)


def _name(uuid: bytes) -> str:
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
