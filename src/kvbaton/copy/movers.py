"""Copies between packed bytes and rows of whatever kind of memory: one mover for each kind.

What sends and receives packed streams is written against `Movers` and never asks what kind a region is of.
"""

from __future__ import annotations

import abc
import contextlib
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kvbaton.cuda
from kvbaton import copy
from kvbaton.cuda.base import Driver, Stream
from kvbaton.errors import RowsError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Cast, Int64s

Buffer = memoryview | bytes | bytearray

STAGE_BYTES = 4 << 20
"""Device memory through which one call moves packed bytes."""
NOTHING = memoryview(b"")
ON_HOST = -1
"""The device of packed bytes that are in host memory."""
KEPT_LANES = 4
"""Streams and stages of a device that are kept while nobody uses them: to free memory of a device takes long."""
KEPT_TABLES = 128
"""Tables of boxes that are remembered: those of so many plans, and no more than the kernels keep."""


class PackedBytes(NamedTuple):
    """Where packed bytes lie: in a buffer of the host, or ``nbytes`` from ``address`` on a device."""

    nbytes: int
    view: memoryview = NOTHING
    """The buffer, if they are on the host."""
    device: int = ON_HOST
    address: int = 0
    """Where they begin, if they are on a device. Nothing here keeps that memory."""

    @classmethod
    def of(cls, buffer: Buffer) -> PackedBytes:
        """A host buffer."""
        return cls(len(buffer), memoryview(buffer))

    def part(self, begin: int, nbytes: int) -> PackedBytes:
        """Some of it."""
        return PackedBytes(nbytes, self.view[begin : begin + nbytes], self.device, self.address + begin)

    @property
    def host_address(self) -> int:
        """Where they begin, if they are on the host."""
        return _address(self.view)


class Mover(abc.ABC):
    """Copies between rows of one memory and packed bytes. Every method may be called from any thread."""

    @abc.abstractmethod
    def gather(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, out: PackedBytes, begin: int, cast: Cast | None
    ) -> None:
        """Fill ``out`` with the packed stream from its byte ``begin``; it is there when this returns."""

    @abc.abstractmethod
    def scatter(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: PackedBytes, begin: int
    ) -> None:
        """Spread ``packed``, the stream from its byte ``begin``; rows are visible to all when this returns."""

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Make copies with that host memory fast; what undoes it, or None where that does nothing."""
        return None


class HostMover(Mover):
    """Rows of host memory."""

    def gather(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, out: PackedBytes, begin: int, cast: Cast | None
    ) -> None:
        """As `Mover.gather`."""
        if out.device == ON_HOST:
            copy.gather(shape, side, units, bases, out.view, begin=begin, cast=cast)
            return
        between = bytearray(out.nbytes)
        copy.gather(shape, side, units, bases, between, begin=begin, cast=cast)
        device_mover(out.device).put(out, between)

    def scatter(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: PackedBytes, begin: int
    ) -> None:
        """As `Mover.scatter`."""
        there = packed.device == ON_HOST
        copy.scatter(
            shape, side, units, bases, packed.view if there else device_mover(packed.device).get(packed), begin=begin
        )


class _Lane(NamedTuple):
    """What one call at a time uses of a device."""

    stream: Stream
    stage: int


class _Tables(NamedTuple):
    """The tables of one side."""

    shape: Int64s
    side: Int64s
    cast: Cast | None


class _Known:
    """Tables that came before, so that equal ones are the same objects: kernels keep what they made of those."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[bytes, _Tables] = OrderedDict()

    def same(self, shape: Int64s, side: Int64s, cast: Cast | None) -> _Tables:
        """The first tables that were equal to these."""
        key = b"".join(table.tobytes() for table in (shape, side, *(cast or ())))
        with self._lock:
            found = self._tables.setdefault(key, _Tables(shape, side, cast))
            self._tables.move_to_end(key)
            if len(self._tables) > KEPT_TABLES:
                self._tables.popitem(last=False)
        return found


class DeviceMover(Mover):
    """Rows of a CUDA device: its kernels pack and unpack in its memory, and one large copy goes over the bus.

    Raises `TransportUnavailable` where the device cannot copy.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._kernels = driver.kernels
        self._known = _Known()
        self._lock = threading.Lock()
        self._lanes: list[_Lane] = []
        """Those that nobody uses. As many are made as calls come at a time; a few are kept."""

    def gather(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, out: PackedBytes, begin: int, cast: Cast | None
    ) -> None:
        """As `Mover.gather`."""
        shape, side, cast = self._known.same(shape, side, cast)
        with self._lane() as (stream, stage):
            if out.device == self._device:
                self._kernels.gather(shape, side, units, bases, out.address, out.nbytes, stream, begin, cast)
                return
            for at, some in _steps(out):
                self._kernels.gather(shape, side, units, bases, stage, some, stream, begin + at, cast)
                self._driver.to_host(out.host_address + at, stage, some, stream)

    def scatter(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: PackedBytes, begin: int
    ) -> None:
        """As `Mover.scatter`."""
        shape, side, _ = self._known.same(shape, side, None)
        with self._lane() as (stream, stage):
            if packed.device == self._device:
                self._kernels.scatter(shape, side, units, bases, packed.address, packed.nbytes, stream, begin)
                return
            for at, some in _steps(packed):
                self._driver.to_device(stage, packed.host_address + at, some, stream)
                self._kernels.scatter(shape, side, units, bases, stage, some, stream, begin + at)

    def put(self, packed: PackedBytes, buffer: Buffer) -> None:
        """Copy a host buffer to packed bytes on the device."""
        with self._lane() as (stream, _):
            self._driver.to_device(packed.address, _address(buffer), packed.nbytes, stream)

    def get(self, packed: PackedBytes) -> bytearray:
        """A copy of packed bytes on the device."""
        found = bytearray(packed.nbytes)
        with self._lane() as (stream, _):
            self._driver.to_host(_address(found), packed.address, packed.nbytes, stream)
        return found

    def allocate(self, nbytes: int) -> Region:
        """Memory of the device, for packed bytes; `free` gives it back."""
        return Region(self._driver.allocate(nbytes, self._device), nbytes, "cuda", device=self._device)

    def free(self, region: Region) -> None:
        """Give back what `allocate` gave; nothing reads or writes it any more."""
        self._driver.free(region.address, self._device)

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """As `Mover.pin`."""
        return (lambda: self._driver.unpin(address)) if self._driver.pin(address, nbytes) else None

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """A lane; what is given to its stream is done at the end."""
        with self._lock:
            lane = self._lanes.pop() if self._lanes else None
        if lane is None:
            lane = _Lane(self._driver.stream(self._device), self._driver.allocate(STAGE_BYTES, self._device))
        try:
            yield lane
        finally:
            # Also after an error: what was given to the device uses the lane, and the caller's memory.
            lane.stream.wait()
            with self._lock:
                keep = len(self._lanes) < KEPT_LANES
                if keep:
                    self._lanes.append(lane)
            if not keep:
                self._give_back(lane)

    def close(self) -> None:
        """Give back what the device holds for it; no call may be under way."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            self._give_back(lane)

    def _give_back(self, lane: _Lane) -> None:
        lane.stream.close()
        self._driver.free(lane.stage, self._device)


HOST = HostMover()
_of_devices: weakref.WeakKeyDictionary[Driver, dict[int, DeviceMover]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def device_mover(device: int) -> DeviceMover:
    """The mover of a device of this process's driver, the same for all. Raises `TransportUnavailable`."""
    driver = kvbaton.cuda.driver()
    with _lock:
        movers = _of_devices.setdefault(driver, {})
        if device not in movers:
            movers[device] = DeviceMover(driver, device)
        return movers[device]


KINDS: Mapping[str, Callable[[int], Mover]] = {"host": lambda device: HOST, "cuda": device_mover}
"""How the mover of a kind of memory is made, for the number of its device."""


class Movers:
    """What copies the rows of ``regions``."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.reasons: dict[int, str] = {}
        """Why the rows of a region cannot be packed here, by its number."""
        self._made: list[Mover] = []
        self._which: Int64s = np.full(len(regions), -1, dtype=np.int64)
        """By region: its mover in ``_made``, or -1 where there is none."""
        places: dict[tuple[str, int], int] = {}
        for number, region in enumerate(regions):
            place = region.kind, region.device if region.kind != "host" else 0
            try:
                if place not in places:
                    if region.kind not in KINDS:
                        raise TransportUnavailable(f"there is nothing here that packs {region.kind} memory")
                    self._made.append(KINDS[region.kind](region.device))
                    places[place] = len(self._made) - 1
                self._which[number] = places[place]
            except TransportUnavailable as error:
                self.reasons[number] = str(error)
        self._only = self._made[0] if len(self._made) == 1 and not self.reasons else None

    @property
    def movable(self) -> npt.NDArray[np.bool_]:
        """Which regions' rows can be packed and unpacked."""
        return self._which >= 0

    def on_host(self, side: Int64s) -> bool:
        """Whether the CPU reaches all that a side of boxes names."""
        return self.of(side) is HOST

    def of(self, side: Int64s) -> Mover:
        """What copies the rows of a side of boxes.

        Raises `RowsError` where they lie in memory of several kinds, or of one that cannot be packed.
        """
        if self._only is not None:
            return self._only
        which = np.unique(self._which[side[:, 0]]) if len(side) else np.zeros(1, np.int64)
        if len(which) > 1:
            raise RowsError("the boxes of one transfer lie in several kinds of memory; keep a component in one of them")
        if which[0] < 0:
            region = int(side[0, 0])
            raise RowsError(f"region {region} cannot be packed: {self.reasons.get(region, 'unknown')}")
        return self._made[int(which[0])]

    def gather(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        out: PackedBytes,
        *,
        begin: int = 0,
        cast: Cast | None = None,
    ) -> None:
        """Fill ``out`` with the packed stream of (shape, side, units, cast), from its byte ``begin``.

        Raises `RowsError` as `of` does, and `TransportError` where a device failed.
        """
        self.of(side).gather(shape, side, units, bases, out, begin, cast)

    def scatter(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: PackedBytes, *, begin: int = 0
    ) -> None:
        """Spread ``packed``, the packed stream from its byte ``begin``, over the rows; raises as `gather`."""
        self.of(side).scatter(shape, side, units, bases, packed, begin)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Make copies with that host memory fast; what is returned undoes it, before the memory goes."""
        undo = [each for mover in self._made if (each := mover.pin(address, nbytes)) is not None]

        def unpin() -> None:
            while undo:
                undo.pop()()

        return unpin

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[memoryview]:
        """A host buffer for packed streams, as fast as the movers need it."""
        pages = mmap.mmap(-1, nbytes)
        view = memoryview(pages)
        unpin = self.pin(_address(view), nbytes)
        try:
            yield view
        finally:
            unpin()
            # A slice that somebody still holds keeps the mapping.
            with contextlib.suppress(BufferError):
                view.release()
                pages.close()


def _steps(packed: PackedBytes) -> Iterator[tuple[int, int]]:
    """Where each part begins that fits a stage, and its length."""
    for at in range(0, packed.nbytes, STAGE_BYTES):
        yield at, min(STAGE_BYTES, packed.nbytes - at)


def _address(buffer: Buffer) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data) if len(buffer) else 0
