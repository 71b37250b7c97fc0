"""A plain executor of transfers: the formula of `kvbaton.plan.boxes`, byte by byte, and a count of the writes.

Only casts are left to the copy kernel: they are checked by what comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbaton.check.content import Int64s
from kvbaton.check.on_device import move
from kvbaton.check.oracle import Memory
from kvbaton.copy import copy_boxes, gather, scatter
from kvbaton.plan import SHAPE_COLUMNS, SIDE_COLUMNS, Transfer
from kvbaton.plan.boxes import CAST_COLUMNS, CAST_ITEMSIZES, SCALE_BYTES, Cast


class BrokenTransfer(Exception):
    """A transfer that breaks the rules of its tables, or leaves the memory of a side."""


class Moved(NamedTuple):
    """The address of each byte that moved, at both sides."""

    source: Int64s
    destination: Int64s


def execute(transfer: Transfer, source: Memory, destination: Memory, writes: Int64s, device: str = "") -> Moved:
    """Copy what ``transfer`` says and add 1 to ``writes`` of each destination byte.

    Where elements change on their way `kvbaton.copy` computes them, in one of several ways by turns: it is under test
    as the planner is. On the ``device`` "cuda" it is the GPU's kernels that move everything. All addresses are found
    and checked here first.

    Raises `BrokenTransfer` where a table has not the form that `kvbaton.plan.boxes` promises, or an address lies
    outside its region.
    """
    check_tables(transfer)
    boxes, cast = transfer.boxes, transfer.boxes.cast
    read_shape = boxes.shape.copy()
    if cast is not None:
        read_shape[:, 2] = cast.how[:, 3] * np.array(CAST_ITEMSIZES)[cast.how[:, 1]]
    read = _addresses(read_shape, boxes.source, transfer.source_units, source, "source")
    written = _addresses(boxes.shape, boxes.destination, transfer.destination_units, destination, "destination")
    if cast is not None:
        scaled = cast.scale[:, 0] != -1
        scales = read_shape[scaled]
        scales[:, 2] = SCALE_BYTES
        _addresses(scales, cast.scale[scaled], transfer.source_units, source, "scales of the source")
    if device:
        move(transfer, source, destination)
    elif cast is None:
        destination.bytes[written] = source.bytes[read]
    else:
        _cast(transfer, source, destination)
    np.add.at(writes, written, 1)
    return Moved(read, written)


def _addresses(shape: Int64s, side: Int64s, units: Int64s, memory: Memory, name: str) -> Int64s:
    """The address of each byte on one side, unit by unit."""
    box, i0, i1, byte = _every_byte(shape)
    region, offset, row_stride, units_per_row, unit_stride, stride0, stride1 = side[box].T
    if region.size and (region.min() < 0 or region.max() >= len(memory.sizes)):
        raise BrokenTransfer(f"{name}: region {int(region.max())} of {len(memory.sizes)}")
    inside = offset + i0 * stride0 + i1 * stride1 + byte
    found = inside + units[:, None] // units_per_row * row_stride + units[:, None] % units_per_row * unit_stride
    limits = np.array(memory.sizes, np.int64)[region]
    if found.size and ((found < 0) | (found >= limits)).any():
        where = np.argwhere((found < 0) | (found >= limits))[0]
        raise BrokenTransfer(
            f"{name}: a copy reaches byte {int(found[tuple(where)])} of region {int(region[where[1]])}, which has "
            f"{int(limits[where[1]])} bytes"
        )
    return np.asarray((found + memory.bases[region]).reshape(-1))


def _cast(transfer: Transfer, source: Memory, destination: Memory) -> None:
    """Let `kvbaton.copy` cast: from rows to rows, or through a buffer, in one part or in two."""
    boxes, nbytes = transfer.boxes, transfer.nbytes
    bases = [memory.bytes.ctypes.data + memory.bases[:-1] for memory in (source, destination)]
    way = nbytes % 4
    middle = nbytes // 3 if way % 2 else nbytes
    for begin, end in ((0, middle), (middle, nbytes)):
        if begin == end:
            continue
        if way < 2:
            copy_boxes(transfer, bases[0], bases[1], begin=begin, end=end)
            continue
        packed = bytearray(end - begin)
        gather(boxes.shape, boxes.source, transfer.source_units, bases[0], packed, begin=begin, cast=boxes.cast)
        scatter(boxes.shape, boxes.destination, transfer.destination_units, bases[1], packed, begin=begin)


def check_tables(transfer: Transfer) -> None:
    """Raise `BrokenTransfer` where the tables have another form than `kvbaton.plan.boxes` says."""
    boxes = transfer.boxes
    for table, columns in (
        (boxes.shape, len(SHAPE_COLUMNS)),
        (boxes.source, len(SIDE_COLUMNS)),
        (boxes.destination, len(SIDE_COLUMNS)),
    ):
        if table.shape != (len(boxes.shape), columns) or table.dtype != np.int64 or not table.flags.c_contiguous:
            raise BrokenTransfer(f"boxes are {table.dtype} {table.shape}, not contiguous int64 [n, {columns}]")
    for units in (transfer.source_units, transfer.destination_units):
        if units.ndim != 1 or units.dtype != np.int64 or not units.flags.c_contiguous:
            raise BrokenTransfer(f"units are {units.dtype} {units.shape}, not contiguous int64 [n]")
    if boxes.cast is not None:
        _check_cast(boxes.shape, boxes.cast)
    if len(transfer.source_units) != len(transfer.destination_units):
        raise BrokenTransfer(f"{len(transfer.source_units)} source units, {len(transfer.destination_units)} others")
    if boxes.shape.min(initial=1) < 1:
        raise BrokenTransfer("a count or a run is below 1")
    if min(boxes.source.min(initial=0), boxes.destination.min(initial=0)) < 0:
        raise BrokenTransfer("a region, an offset or a stride is negative")
    if min(boxes.source[:, 3].min(initial=1), boxes.destination[:, 3].min(initial=1)) < 1:
        raise BrokenTransfer("units_per_row is below 1")


def _check_cast(shape: Int64s, cast: Cast) -> None:
    """What an address is worked out from; the kernel checks the rest."""
    for name, table, dtype, form in (
        ("how", cast.how, np.int64, (len(shape), len(CAST_COLUMNS))),
        ("factor", cast.factor, np.float32, (len(shape),)),
        ("scale", cast.scale, np.int64, (len(shape), len(SIDE_COLUMNS))),
    ):
        if table.shape != form or table.dtype != dtype or not table.flags.c_contiguous:
            raise BrokenTransfer(f"the {name} of a cast is {table.dtype} {table.shape}, not contiguous {form}")
    if cast.how.min(initial=0) < 0 or cast.how[:, 1:3].max(initial=0) >= len(CAST_ITEMSIZES):
        raise BrokenTransfer("a cast names a dtype that there is not")


def _every_byte(shape: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """For each byte that one unit moves: its box, its place in the two repeats and in the run."""
    count0, count1, run = shape.T
    sizes = count0 * count1 * run
    box = np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(box)) - (np.cumsum(sizes) - sizes)[box]
    piece, byte = np.divmod(position, run[box])
    i0, i1 = np.divmod(piece, count1[box])
    return box, i0, i1, byte
