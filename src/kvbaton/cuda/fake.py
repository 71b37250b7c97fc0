"""Devices that are none: the strict reference of `kvbaton.cuda.base`, on host memory that processes share.

Addresses of its memory point nowhere, so that whoever touches them without the device is found out at once. Work is
done late, by a thread for each stream, and with the tables as they are then. Work on memory that is not mapped, and
memory that is closed while work on it is under way, are a `DriverMisuse`: a real device would crash or lose data.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvbaton.cuda.base import HANDLE_BYTES, Allocation, Driver, Stream
from kvbaton.cuda.fake_machine import ELSEWHERE, PART_BYTES, DriverMisuse, FakeMachine, Mapping, on_host
from kvbaton.cuda.fake_work import FakeKernels, FakeStream, give
from kvbaton.errors import TransportUnavailable
from kvbaton.memory import AttachedMemory, SharedMemory, SharedMemoryKey

__all__ = ["DriverMisuse", "FakeDriver", "FakeMachine", "on_host"]

_HANDLE = struct.Struct("<4sqqqqqq")
_MAGIC = b"fake"


class FakeDriver(Driver):
    """One process's view of ``machine``, in which it sees the devices ``visible`` (all by default), in that order."""

    def __init__(self, machine: FakeMachine, visible: Sequence[int] | None = None) -> None:
        self.machine = machine
        self.kernels = FakeKernels(machine)
        self.opens = 0
        """How many handles of other processes were opened so far."""
        self._visible = tuple(range(len(machine.uuids)) if visible is None else visible)
        self._lock = threading.Lock()
        self._exported: dict[bytes, Allocation] = {}
        self._exports: Counter[bytes] = Counter()
        self._own: Counter[int] = Counter()
        self._opened: dict[bytes, Mapping] = {}

    @property
    def opened(self) -> int:
        """How many allocations of other processes are open now."""
        with self._lock:
            return len(self._opened)

    @property
    def exported(self) -> int:
        """How many allocations are exported now."""
        with self._lock:
            return len(self._exported)

    @property
    def uuids(self) -> tuple[bytes, ...]:
        """As `Driver.uuids`."""
        return tuple(self.machine.uuids[number] for number in self._visible)

    def reaches(self, device: int, other: int) -> bool:
        """As `Driver.reaches`."""
        pair = frozenset({self._visible[device], self._visible[other]})
        return len(pair) == 1 or self.machine.links is None or pair in self.machine.links

    def allocation(self, address: int, device: int) -> Allocation:
        """As `Driver.allocation`."""
        mapping = self.machine.at(address)
        if mapping is None:
            raise TransportUnavailable(f"there is no device memory at {address:#x}")
        if mapping.device != self._visible[device]:
            raise TransportUnavailable(f"the memory at {address:#x} is not on device {device}")
        if not mapping.exportable:
            # Virtual memory is mapped in parts, each of which is an allocation.
            part = (address - mapping.base) // PART_BYTES * PART_BYTES
            return Allocation(mapping.base + part, min(PART_BYTES, mapping.nbytes - part))
        return Allocation(mapping.base, mapping.nbytes)

    def export(self, base: int, device: int) -> bytes:
        """As `Driver.export`."""
        mapping = self.machine.at(base)
        begins = mapping is not None and base == self.allocation(base, device).base
        self.machine.require(begins, f"no allocation begins at {base:#x}")
        assert mapping is not None
        if not mapping.exportable or not isinstance(mapping.memory, SharedMemory):
            raise TransportUnavailable(
                "it cannot be exported to another process: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        handle = _HANDLE.pack(_MAGIC, mapping.device, *mapping.memory.key).ljust(HANDLE_BYTES, b"\0")
        with self._lock:
            self._exported[handle] = Allocation(base, mapping.nbytes)
            self._exports[handle] += 1
        return handle

    def retract(self, handle: bytes) -> None:
        """As `Driver.retract`."""
        with self._lock:
            self.machine.require(self._exports[handle] > 0, "a handle was retracted that is not exported")
            self._exports[handle] -= 1
            if not self._exports[handle]:
                del self._exports[handle], self._exported[handle]

    def open(self, handle: bytes, device: int) -> Allocation:
        """As `Driver.open`."""
        with self._lock:
            own = self._exported.get(handle)
            if own is not None:
                self._own[own.base] += 1
                return own
            mapping = self._opened.get(handle)
            if mapping is None:
                magic, number, *key = _HANDLE.unpack(handle[: _HANDLE.size])
                if magic != _MAGIC:
                    raise TransportUnavailable("the peer's memory cannot be opened: this is no handle of it")
                found = SharedMemoryKey(*key)
                mapping = Mapping(AttachedMemory(found), found.nbytes, number, False)
                self.machine.add(mapping)
                self._opened[handle] = mapping
            mapping.opened += 1
            self.opens += 1
            return Allocation(mapping.base, mapping.nbytes)

    def close(self, base: int, device: int) -> None:
        """As `Driver.close`."""
        with self._lock:
            if self._own[base] > 0:
                self._own[base] -= 1
                return
            found = [(handle, each) for handle, each in self._opened.items() if each.base == base]
            self.machine.require(bool(found), f"what begins at {base:#x} was not opened")
            ((handle, mapping),) = found
            mapping.opened -= 1
            if not mapping.opened:
                self.machine.free(base)
                del self._opened[handle]

    def stream(self, device: int) -> Stream:
        """As `Driver.stream`."""
        return FakeStream(self.machine, device)

    def allocate(self, nbytes: int, device: int) -> int:
        """As `Driver.allocate`."""
        return self.machine.allocate(nbytes, self._visible[device])

    def free(self, address: int, device: int) -> None:
        """As `Driver.free`."""
        self.machine.free(address)

    def to_host(self, host: int, address: int, nbytes: int, stream: Stream) -> None:
        """As `Driver.to_host`."""
        self._move(address, nbytes, stream, lambda: ctypes.memmove(host, address ^ ELSEWHERE, nbytes))

    def to_device(self, address: int, host: int, nbytes: int, stream: Stream) -> None:
        """As `Driver.to_device`."""
        self._move(address, nbytes, stream, lambda: ctypes.memmove(address ^ ELSEWHERE, host, nbytes))

    def pin(self, host: int, nbytes: int) -> bool:
        """As `Driver.pin`."""
        return True

    def unpin(self, host: int) -> None:
        """As `Driver.unpin`."""

    def _move(self, address: int, nbytes: int, stream: Stream, move: Callable[[], object]) -> None:
        self.machine.require(nbytes <= self.machine.room(address), f"a copy ends behind what is mapped at {address:#x}")
        give(stream, [address], move)
