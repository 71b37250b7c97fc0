"""Devices that are none: the strict reference of `kvbaton.cuda.base`, on host memory that processes share.

Addresses of its memory point nowhere, so that whoever touches them without the device is found out at once. Work is
done late, by a thread for each stream, and with the tables as they are then. Work on memory that is not mapped, and
memory that is closed while work on it is under way, are a `DriverMisuse`: a real device would crash or lose data.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvbaton.copy import check_bounds, copy_boxes, gather, scatter
from kvbaton.cuda.base import HANDLE_BYTES, Allocation, Driver, Mark, Stream
from kvbaton.errors import RowsError, TransportError, TransportUnavailable
from kvbaton.memory import AttachedMemory, SharedMemory, SharedMemoryKey
from kvbaton.plan.boxes import Boxes, Cast, Int64s, Transfer

ELSEWHERE = 1 << 46
"""What is added to the address of host memory, which the kernel maps high up, to get one at which nothing is."""
PART_BYTES = 32
"""How much of memory that cannot be exported is one allocation."""
_HANDLE = struct.Struct("<4sqqqqqq")
_MAGIC = b"fake"


class DriverMisuse(AssertionError):
    """A caller broke the contract of `Driver`."""


class _Mapping:
    """Device memory that can be addressed: where, whose, and how much work on it is under way."""

    def __init__(self, memory: SharedMemory | AttachedMemory, nbytes: int, device: int, exportable: bool) -> None:
        self.memory = memory
        self.base = memory.address ^ ELSEWHERE
        self.nbytes = nbytes
        self.device = device
        self.exportable = exportable
        self.under_way = 0
        self.opened = 0


class FakeMachine:
    """The memory of ``devices`` devices, and what is mapped of it in this process.

    ``links`` are the pairs of devices that reach each other; None is all of them. ``delay`` are seconds before each
    work of a stream begins; it may be set at any time.
    """

    def __init__(self, devices: int = 1, links: Iterable[tuple[int, int]] | None = None, delay: float = 0.0) -> None:
        # The same in each process of the host.
        self.uuids = tuple(f"fake-device-{number:04}".encode() for number in range(devices))
        self.links = None if links is None else {frozenset(pair) for pair in links}
        self.delay = delay
        self.misuses: list[str] = []
        self.failure = ""
        """Why the devices take no more work; empty while they do. May be set at any time."""
        self.lock = threading.Lock()
        self._mappings: dict[int, _Mapping] = {}

    def allocate(self, nbytes: int, device: int = 0, *, exportable: bool = True) -> int:
        """New memory of a device; its address. What is not ``exportable`` is as memory of expandable segments."""
        mapping = _Mapping(SharedMemory(nbytes), nbytes, device, exportable)
        return self.add(mapping)

    def free(self, base: int) -> None:
        """Give memory back. Raises `DriverMisuse` while work on it is under way."""
        with self.lock:
            mapping = self._mappings.get(base)
            self.require(mapping is not None, f"no memory begins at {base:#x}")
            assert mapping is not None
            self.require(not mapping.under_way, f"memory at {base:#x} was closed while work on it was under way")
            del self._mappings[base]
        mapping.memory.close()

    def array(self, base: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The bytes of an allocation, for a test to look at."""
        with self.lock:
            return self._mappings[base].memory.array

    @property
    def mapped(self) -> int:
        """How many allocations are mapped, own ones and those of others."""
        with self.lock:
            return len(self._mappings)

    def add(self, mapping: _Mapping) -> int:
        """Map memory."""
        with self.lock:
            self._mappings[mapping.base] = mapping
        return mapping.base

    def at(self, address: int) -> _Mapping | None:
        """What is mapped at ``address``."""
        with self.lock:
            return self._at(address)

    def _at(self, address: int) -> _Mapping | None:
        for mapping in self._mappings.values():
            if mapping.base <= address < mapping.base + mapping.nbytes:
                return mapping
        return None

    def hold(self, addresses: Iterable[int]) -> list[_Mapping]:
        """Note work on what is mapped at ``addresses``; `let_go` must follow."""
        with self.lock:
            held = [mapping for mapping in map(self._at, addresses) if mapping is not None]
            for mapping in held:
                mapping.under_way += 1
        return held

    def let_go(self, held: Iterable[_Mapping]) -> None:
        """End what `hold` began."""
        with self.lock:
            for mapping in held:
                mapping.under_way -= 1

    def room(self, address: int) -> int:
        """Bytes from ``address`` to the end of what is mapped there; 0 where nothing is."""
        mapping = self.at(address)
        return mapping.base + mapping.nbytes - address if mapping else 0

    def require(self, kept: bool, what: str) -> None:
        """Raise `DriverMisuse` unless ``kept``."""
        if not kept:
            self.misuses.append(what)
            raise DriverMisuse(what)


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
        self._opened: dict[bytes, _Mapping] = {}

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
                mapping = _Mapping(AttachedMemory(found), found.nbytes, number, False)
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
        _give(stream, [address], move)


class FakeStream(Stream):
    """A thread that does the work of a stream, started with the first of it."""

    def __init__(self, machine: FakeMachine, device: int) -> None:
        self.device = device
        self.handle = id(self)
        self.machine = machine
        self._changed = threading.Condition()
        self._work: deque[tuple[list[_Mapping], Callable[[], object]]] = deque()
        self.given = 0
        self.done = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def give(self, addresses: Iterable[int], work: Callable[[], object]) -> None:
        """Do ``work``, on what is mapped at ``addresses``, when all before is done."""
        self._check()
        held = self.machine.hold(addresses)
        with self._changed:
            self.machine.require(not self._closed, "work was given to a stream that is closed")
            self._work.append((held, work))
            self.given += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fake-cuda-stream", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def mark(self) -> Mark:
        """As `Stream.mark`."""
        self._check()
        return _FakeMark(self)

    def wait(self) -> None:
        """As `Stream.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self.done == self.given)
        self._check()

    def close(self) -> None:
        """As `Stream.close`."""
        with self._changed:
            self.machine.require(self.done == self.given, "a stream was closed while work was under way")
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def failed(self) -> str:
        """Why the device takes no more work."""
        return self.machine.failure

    def _check(self) -> None:
        if self.failed():
            raise TransportError(f"the device failed: {self.failed()}")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closed)
                if not self._work:
                    return
                held, work = self._work.popleft()
                if self.machine.delay:
                    self._changed.wait(self.machine.delay)
            try:
                if not self.failed():
                    work()
            except Exception as error:
                self.machine.failure = f"{type(error).__name__}: {error}"
            self.machine.let_go(held)
            with self._changed:
                self.done += 1
                self._changed.notify_all()


class _FakeMark(Mark):
    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._at = stream.given

    def ended(self) -> bool:
        """As `Mark.ended`."""
        if self._stream.done < self._at:
            return False
        self._stream._check()
        return True


class FakeKernels:
    """As `kvbaton.cuda.base.Kernels`: the CPU's kernels, late, on memory that is mapped."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def copy_boxes(
        self, transfer: Transfer, source_bases: Int64s, destination_bases: Int64s, stream: Stream, begin: int, end: int
    ) -> None:
        """As `Kernels.copy_boxes`."""
        boxes = transfer.boxes

        def work() -> None:
            self._check(boxes.source_shape, boxes.source, transfer.source_units, source_bases)
            self._check(boxes.shape, boxes.destination, transfer.destination_units, destination_bases)
            copy_boxes(transfer, on_host(source_bases), on_host(destination_bases), begin=begin, end=end)

        sides = (boxes.source, source_bases), (boxes.destination, destination_bases)
        _give(stream, [address for side, bases in sides for address in _used(side, bases)], work)

    def gather(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        packed: int,
        nbytes: int,
        stream: Stream,
        begin: int,
        cast: Cast | None,
    ) -> None:
        """As `Kernels.gather`."""

        def work() -> None:
            self._check(Boxes(shape, side, side, cast).source_shape, side, units, bases)
            gather(shape, side, units, on_host(bases), self._packed(packed, nbytes), begin=begin, cast=cast)

        _give(stream, [*_used(side, bases), packed], work)

    def scatter(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        packed: int,
        nbytes: int,
        stream: Stream,
        begin: int,
    ) -> None:
        """As `Kernels.scatter`."""

        def work() -> None:
            self._check(shape, side, units, bases)
            scatter(shape, side, units, on_host(bases), self._packed(packed, nbytes), begin=begin)

        _give(stream, [*_used(side, bases), packed], work)

    def _check(self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s) -> None:
        rooms = np.array([self._machine.room(int(base)) for base in bases], dtype=np.int64)
        try:
            check_bounds("destination", shape, side, units, rooms)
        except RowsError as error:
            self._machine.require(False, f"an illegal memory access: {error}")

    def _packed(self, address: int, nbytes: int) -> memoryview:
        self._machine.require(nbytes <= self._machine.room(address), f"{nbytes} bytes are not mapped at {address:#x}")
        return memoryview((ctypes.c_uint8 * nbytes).from_address(address ^ ELSEWHERE)).cast("B")


def _give(stream: Stream, addresses: Iterable[int], work: Callable[[], object]) -> None:
    if not isinstance(stream, FakeStream):
        raise DriverMisuse(f"a fake device was given a stream of {type(stream).__name__}")
    stream.give(addresses, work)


def _used(side: Int64s, bases: Int64s) -> list[int]:
    """The bases of the regions that a side uses."""
    return [int(bases[region]) for region in np.unique(side[:, 0]).tolist()]


def on_host(bases: Int64s) -> Int64s:
    """Where memory of a fake device really is, for a library that reaches it; other addresses stay as they are."""
    moved: Int64s = np.where(bases & ELSEWHERE, bases, bases ^ ELSEWHERE)
    return moved
