"""Digests of one side of a transfer, in the rows or packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbaton.copy.bounds import check_bounds, check_source
from kvbaton.copy.digests import digest, packed_side
from kvbaton.copy.implementation import kernel
from kvbaton.errors import RowsError
from kvbaton.plan.boxes import Int64s
from kvbaton.plan.half import Half

SLAB_BYTES = 1 << 20
"""How much is cast at a time, to be looked at as it will be in place."""


def digest_half(half: Half, bases: Int64s, region_bytes: Int64s, *, threads: int = 1) -> int:
    """The digest of what ``half`` names, in the regions at ``bases`` of the lengths ``region_bytes``.

    Where elements change on their way it is of the bytes as they will be at the destination, on both sides. Raises
    `RowsError` where a piece lies outside its region.
    """
    boxes = half.boxes
    if half.side == "source" and boxes.cast is not None:
        return _digest_cast(half, bases, region_bytes)
    check_bounds(half.side, boxes.shape, half.table, half.units, region_bytes)
    return digest(boxes.shape, half.table, half.units, half.numbers, bases, stream=half.stream, threads=threads)


def digest_packed(half: Half, packed: Any) -> int:
    """The same of the packed stream that holds them, a contiguous buffer. Raises `RowsError` for another length."""
    data = np.frombuffer(packed, np.uint8)
    expected = half.boxes.bytes_per_unit * len(half.numbers)
    if data.nbytes != expected:
        raise RowsError(f"{half.side}: {data.nbytes} bytes are packed where {expected} belong")
    shape, bases = half.boxes.shape, np.array([data.ctypes.data], np.int64)
    places = np.arange(len(half.numbers), dtype=np.int64)
    return digest(shape, packed_side(shape), places, half.numbers, bases, stream=half.stream)


def _digest_cast(half: Half, bases: Int64s, region_bytes: Int64s) -> int:
    boxes, total = half.boxes, 0
    check_source(boxes, half.units, region_bytes)
    step = max(1, SLAB_BYTES // boxes.bytes_per_unit)
    buffer = np.empty(min(step, len(half.units)) * boxes.bytes_per_unit, np.uint8)
    for first in range(0, len(half.units), step):
        part = half._replace(units=half.units[first : first + step], numbers=half.numbers[first : first + step])
        packed = buffer[: part.nbytes]
        kernel.gather(boxes.shape, boxes.source, part.units, bases, packed, 0, 1, boxes.cast)
        total += digest_packed(part, packed)
    return total
