"""Copies between packed host buffers and rows of whatever kind of memory: one mover for each kind.

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
KEPT_TABLES = 128
"""Tables of boxes that are remembered: those of so many plans, and no more than the kernels keep."""


class Mover(abc.ABC):
    """Copies between rows of one memory and packed host buffers. Every method may be called from any thread."""

    @abc.abstractmethod
    def gather(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, out: memoryview, begin: int, cast: Cast | None
    ) -> None:
        """As `kvbaton.copy.gather`; the bytes are in ``out`` when it returns."""

    @abc.abstractmethod
    def scatter(self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Buffer, begin: int) -> None:
        """As `kvbaton.copy.scatter`; the rows are visible to all when it returns."""

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Make copies with that host memory fast; what undoes it, or None where that does nothing."""
        return None


class HostMover(Mover):
    """Rows of host memory."""

    def gather(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, out: memoryview, begin: int, cast: Cast | None
    ) -> None:
        """As `Mover.gather`."""
        copy.gather(shape, side, units, bases, out, begin=begin, cast=cast)

    def scatter(self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Buffer, begin: int) -> None:
        """As `Mover.scatter`."""
        copy.scatter(shape, side, units, bases, packed, begin=begin)


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
        """Those that nobody uses. As many are made as calls come at a time."""

    def gather(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, out: memoryview, begin: int, cast: Cast | None
    ) -> None:
        """As `Mover.gather`."""
        host, total = _address(out), len(out)
        shape, side, cast = self._known.same(shape, side, cast)
        with self._lane() as (stream, stage):
            for at in range(0, total, STAGE_BYTES):
                some = min(STAGE_BYTES, total - at)
                self._kernels.gather(shape, side, units, bases, stage, some, stream, begin + at, cast)
                self._driver.to_host(host + at, stage, some, stream)

    def scatter(self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Buffer, begin: int) -> None:
        """As `Mover.scatter`."""
        host, total = _address(packed), len(packed)
        shape, side, _ = self._known.same(shape, side, None)
        with self._lane() as (stream, stage):
            for at in range(0, total, STAGE_BYTES):
                some = min(STAGE_BYTES, total - at)
                self._driver.to_device(stage, host + at, some, stream)
                self._kernels.scatter(shape, side, units, bases, stage, some, stream, begin + at)

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
                self._lanes.append(lane)

    def close(self) -> None:
        """Give back what the device holds for it; no call may be under way."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
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
        out: memoryview,
        *,
        begin: int = 0,
        cast: Cast | None = None,
    ) -> None:
        """Fill ``out`` with the packed stream of (shape, side, units, cast), from its byte ``begin``.

        Raises `RowsError` as `of` does, and `TransportError` where a device failed.
        """
        self.of(side).gather(shape, side, units, bases, out, begin, cast)

    def scatter(
        self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Buffer, *, begin: int = 0
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


def _address(buffer: Buffer) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data) if len(buffer) else 0
