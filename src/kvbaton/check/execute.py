"""A plain executor of transfers: the formula of `kvbaton.plan.boxes`, byte by byte, and a count of the writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbaton.check.oracle import Int64s, Memory
from kvbaton.plan import SHAPE_COLUMNS, SIDE_COLUMNS, Boxes, Transfer


class BrokenTransfer(Exception):
    """A transfer that breaks the rules of its tables, or leaves the memory of a side."""


class Moved(NamedTuple):
    """The address of each byte that moved, at both sides."""

    source: Int64s
    destination: Int64s


def execute(transfer: Transfer, source: Memory, destination: Memory, writes: Int64s) -> Moved:
    """Copy what ``transfer`` says and add 1 to ``writes`` of each destination byte.

    Raises `BrokenTransfer` where a table has not the form that `kvbaton.plan.boxes` promises, or an address lies
    outside its region.
    """
    check_tables(transfer)
    box, i0, i1, byte = _every_byte(transfer.boxes)
    addresses = []
    for side, units, memory, name in (
        (transfer.boxes.source, transfer.source_units, source, "source"),
        (transfer.boxes.destination, transfer.destination_units, destination, "destination"),
    ):
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
        addresses.append((found + memory.bases[region]).reshape(-1))
    moved = Moved(*addresses)
    destination.bytes[moved.destination] = source.bytes[moved.source]
    np.add.at(writes, moved.destination, 1)
    return moved


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
    if len(transfer.source_units) != len(transfer.destination_units):
        raise BrokenTransfer(f"{len(transfer.source_units)} source units, {len(transfer.destination_units)} others")
    if boxes.shape.min(initial=1) < 1:
        raise BrokenTransfer("a count or a run is below 1")
    if min(boxes.source.min(initial=0), boxes.destination.min(initial=0)) < 0:
        raise BrokenTransfer("a region, an offset or a stride is negative")
    if min(boxes.source[:, 3].min(initial=1), boxes.destination[:, 3].min(initial=1)) < 1:
        raise BrokenTransfer("units_per_row is below 1")


def _every_byte(boxes: Boxes) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """For each byte that one unit moves: its box, its place in the two repeats and in the run."""
    count0, count1, run = boxes.shape.T
    sizes = count0 * count1 * run
    box = np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(box)) - (np.cumsum(sizes) - sizes)[box]
    piece, byte = np.divmod(position, run[box])
    i0, i1 = np.divmod(piece, count1[box])
    return box, i0, i1, byte
