"""The memory of the slabs, and how regions are numbered on a fabric."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from ctypes import c_char
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.copy.movers import PackedBytes
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.fabric.base import Writes
from kvbaton.transport.fabric.options import FabricOptions

Flags = npt.NDArray[np.bool_]

AREA = 0
"""The fabric's number of the region that holds the slabs: first those that peers write into, then those of staging."""


def pages(nbytes: int) -> Region:
    """Fresh, zeroed, page-aligned host memory."""
    mapping = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return Region.of(np.frombuffer(mapping, dtype=np.uint8))


class Area(NamedTuple):
    """All slabs of a process, in one region."""

    region: Region
    """Memory of ``options.area_bytes`` bytes, of the host or of a device."""
    whole: PackedBytes
    options: FabricOptions

    @classmethod
    def of(cls, region: Region, options: FabricOptions) -> Area:
        """The slabs in ``region``."""
        if region.kind == "host":
            whole = PackedBytes.of(memoryview((c_char * region.nbytes).from_address(region.address)).cast("B"))
        else:
            whole = PackedBytes(region.nbytes, device=region.device, address=region.address)
        return cls(region, whole, options)

    def packed(self, begin: int, nbytes: int) -> PackedBytes:
        """Some bytes of it."""
        return self.whole.part(begin, nbytes)

    def landing(self, slab: int) -> int:
        """Where a slab begins that peers write into. The same on every process with the same ``slab_bytes``."""
        return slab * self.options.slab_bytes

    def staging(self, slab: int) -> int:
        """Where a staging slab begins."""
        return (self.options.slabs + slab) * self.options.slab_bytes


def numbers_of(nbytes: Int64s) -> Int64s:
    """The fabric's number of each region, by the lengths that it is told; -1 for those of which it needs to know none.

    Both sides count the same way: the slabs come first, then the regions.
    """
    filled = nbytes > 0
    numbers: Int64s = np.where(filled, np.cumsum(filled) + AREA, -1)
    return numbers


def flags(each: Iterable[bool]) -> Flags:
    """A flag for each region."""
    return np.fromiter(each, dtype=np.bool_)


def fabric_regions(area: Area, regions: Sequence[Region], direct: Flags) -> list[Region]:
    """What is registered with a fabric, in the order of `numbers_of`: the slabs, and the regions that go ``direct``."""
    return [area.region, *(region for region, goes in zip(regions, direct, strict=True) if goes)]


def one_write(local: int, remote: int, nbytes: int) -> Writes:
    """One write between the slabs of two processes."""
    numbers = np.array([local, remote, nbytes], dtype=np.int64)
    return Writes(AREA, AREA, numbers[:1], numbers[1:2], numbers[2:])
