"""Whether boxes and units stay inside regions: the check that stands between numbers from a peer and raw memory."""

from __future__ import annotations

import numpy as np

from kvbaton.copy.implementation import kernel
from kvbaton.errors import RowsError
from kvbaton.plan.boxes import (
    CAST_COLUMNS,
    CAST_ITEMSIZES,
    CONVERT,
    MOVE,
    QUANTISE,
    SCALE,
    SCALE_BYTES,
    SHAPE_COLUMNS,
    SIDE_COLUMNS,
    Boxes,
    Cast,
    Int64s,
)

_LIMIT = 1 << 59
"""Products stop here. Six of them still fit an int64, and no region is as long."""


def check_bounds(side: str, shape: Int64s, table: Int64s, units: Int64s, region_bytes: Int64s) -> int:
    """Check one side of a transfer against the lengths of its regions; give the bytes that the transfer moves.

    ``side`` names the side in messages. ``shape`` is int64 ``[n, 3]``, ``table`` int64 ``[n, 7]`` (see
    `kvbaton.plan.boxes`), ``units`` int64 ``[m]``, ``region_bytes`` the length of each region. Any int64 may stand in
    them: the arithmetic saturates and never wraps. Raises `RowsError` unless every byte of every piece is inside.
    """
    # What is right is found right in a microsecond; what may be wrong is looked at below, which says what is wrong.
    total: int = kernel.check(shape, table, units, region_bytes)
    if total >= 0:
        return total
    _check_form(side, shape, table, units)
    if len(shape) == 0 or len(units) == 0:
        return 0
    if int(units.min()) < 0:
        raise RowsError(f"{side}: unit {int(units.min())} is negative")
    _check_regions(side, table, region_bytes)
    end = _furthest(shape, table, int(units.max()))
    lengths = region_bytes[table[:, 0]]
    if (end > lengths).any():
        box = int(np.argmax(end - lengths))
        reached = "past every region" if end[box] >= _LIMIT else f"byte {int(end[box])}"
        raise RowsError(
            f"{side}: box {box} with unit {int(units.max())} reaches {reached} of region {int(table[box, 0])}, "
            f"which has {int(lengths[box])} bytes"
        )
    return _stream_bytes(side, shape, len(units))


def check_source(boxes: Boxes, units: Int64s, region_bytes: Int64s) -> None:
    """Check what ``boxes`` with ``units`` read at the source: elements in its own dtype, and their scales.

    Raises `RowsError` as `check_bounds` does, and where a cast does not hold together.
    """
    if boxes.cast is not None:
        _check_cast(boxes.shape, boxes.cast)
    check_bounds("source", boxes.source_shape, boxes.source, units, region_bytes)
    if boxes.cast is not None:
        scaled = boxes.cast.scale[:, 0] != -1
        shape = boxes.shape[scaled]
        shape[:, 2] = SCALE_BYTES
        check_bounds("scales of the source", shape, boxes.cast.scale[scaled], units, region_bytes)


def _check_cast(shape: Int64s, cast: Cast) -> None:
    count = len(shape)
    forms = (
        ("how", cast.how, np.int64, (count, len(CAST_COLUMNS))),
        ("factor", cast.factor, np.float32, (count,)),
        ("scale", cast.scale, np.int64, (count, len(SIDE_COLUMNS))),
    )
    for name, table, dtype, form in forms:
        if table.dtype != dtype or table.shape != form:
            raise RowsError(
                f"cast: the {name} table must be {np.dtype(dtype)} {list(form)}, not {table.dtype} {list(table.shape)}"
            )
    if shape.ndim != 2 or shape.shape[1] != len(SHAPE_COLUMNS):
        raise RowsError(f"cast: the shape table must be [n, {len(SHAPE_COLUMNS)}], not {list(shape.shape)}")
    operation, source, destination, elements = cast.how.T
    dtypes = len(CAST_ITEMSIZES)
    known = (cast.how[:, 1:3] >= 0).all(axis=1) & (cast.how[:, 1:3] < dtypes).all(axis=1)
    known &= np.isin(operation, (MOVE, CONVERT, QUANTISE, SCALE)) & (elements >= 1) & (elements < _LIMIT)
    itemsizes = np.array(CAST_ITEMSIZES, np.int64)[np.where(known, destination, 0)]
    run = np.where(operation == SCALE, SCALE_BYTES, np.where(known, elements, 0) * itemsizes)
    sound = (
        known
        & (run == shape[:, 2])
        & ((operation == MOVE) == (source == 0))
        & ((operation == MOVE) == (destination == 0))
    )
    sound &= np.isfinite(cast.factor) | (operation == MOVE)
    if not sound.all():
        box = int(np.argmin(sound))
        raise RowsError(
            f"cast: box {box} with a run of {int(shape[box, 2])} bytes does not hold together: "
            f"{dict(zip(CAST_COLUMNS, cast.how[box].tolist(), strict=True))}"
        )


def _check_form(side: str, shape: Int64s, table: Int64s, units: Int64s) -> None:
    for name, array, columns in (("shape", shape, len(SHAPE_COLUMNS)), (side, table, len(SIDE_COLUMNS))):
        if array.dtype != np.int64 or array.ndim != 2 or array.shape[1] != columns:
            raise RowsError(
                f"{side}: the {name} table must be int64 [n, {columns}], not {array.dtype} {list(array.shape)}"
            )
    if len(shape) != len(table):
        raise RowsError(f"{side}: {len(table)} boxes but {len(shape)} shapes")
    if units.dtype != np.int64 or units.ndim != 1:
        raise RowsError(f"{side}: units must be int64 [m], not {units.dtype} {list(units.shape)}")
    if len(shape) and int(shape.min()) < 1:
        raise RowsError(f"{side}: a count or a run is {int(shape.min())}; it must be at least 1")
    if len(table) and (int(table.min()) < 0 or int(table[:, 3].min()) < 1):
        raise RowsError(f"{side}: a region, offset or stride is negative, or units_per_row is below 1")


def _check_regions(side: str, table: Int64s, region_bytes: Int64s) -> None:
    region = int(table[:, 0].max())
    if region >= len(region_bytes):
        raise RowsError(f"{side}: a box names region {region}, but {len(region_bytes)} are registered")


def _furthest(shape: Int64s, table: Int64s, unit: int) -> Int64s:
    """Give the end of the furthest byte that each box touches, for units up to ``unit``."""
    offset, row_stride, units_per_row, unit_stride = table[:, 1], table[:, 2], table[:, 3], table[:, 4]
    row, part = unit // units_per_row, unit % units_per_row
    last = _product(row, row_stride) + _product(part, unit_stride)
    # The last part of the row before can lie further than an early part of the last row.
    before = np.where(row > 0, _product(row - 1, row_stride) + _product(units_per_row - 1, unit_stride), 0)
    inside = _product(shape[:, 0] - 1, table[:, 5]) + _product(shape[:, 1] - 1, table[:, 6])
    furthest: Int64s = np.maximum(last, before) + inside + np.minimum(offset, _LIMIT) + np.minimum(shape[:, 2], _LIMIT)
    return furthest


def _product(left: Int64s, right: Int64s) -> Int64s:
    """``left * right``, at most ``_LIMIT``; both are zero or positive."""
    over = left > _LIMIT // np.maximum(right, 1)
    product: Int64s = np.where(over & (right > 0), _LIMIT, np.where(over, 0, left) * right)
    return product


def _stream_bytes(side: str, shape: Int64s, units: int) -> int:
    boxes = _product(_product(shape[:, 0], shape[:, 1]), shape[:, 2])
    # The sum as float first: it tells an overflow that the exact sum would hide.
    if float(boxes.astype(np.float64).sum()) * units >= _LIMIT:
        raise RowsError(f"{side}: the transfer moves more bytes than can be counted")
    return int(boxes.sum()) * units
