"""The kernel in numpy, for machines without a compiler: the same results, many times slower.

It has the same functions with the same arguments as the native kernel.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np

from kvbaton.copy.digest_numbers import digest_pieces
from kvbaton.copy.memory import INDEX_ELEMENTS, Bytes, view
from kvbaton.copy.numbers import cast_pieces, check_cast
from kvbaton.plan.boxes import MOVE, Cast, Int64s

_REGION, _OFFSET, _ROW_STRIDE, _UNITS_PER_ROW, _UNIT_STRIDE, _STRIDE0, _STRIDE1 = range(7)


class SlowCopyWarning(RuntimeWarning):
    """The native copy kernel is missing or switched off, so numpy copies."""


def warn_once(reason: str, _said: list[str] = []) -> None:  # noqa: B006  (the list is the memory of "once")
    """Say, once in a process, that copies are slow and why."""
    if not _said:
        _said.append(reason)
        warnings.warn(
            f"copies use numpy, which is many times slower than the native kernel: {reason}",
            SlowCopyWarning,
            stacklevel=3,
        )


def extent(numbers: Int64s) -> tuple[int, int]:
    """Give the smallest and the largest of ``numbers``, at least one."""
    return int(numbers.min()), int(numbers.max())


def check(shape: Int64s, side: Int64s, units: Int64s, region_bytes: Int64s) -> int:
    """Leave the check to `kvbaton.copy.bounds`: -1, nothing is certain here."""
    return -1


def copy(
    shape: Int64s,
    source: Int64s,
    destination: Int64s,
    source_units: Int64s,
    destination_units: Int64s,
    source_bases: Int64s,
    destination_bases: Int64s,
    begin: int,
    end: int,
    threads: int,
    cast: Cast | None = None,
) -> None:
    """Copy the bytes ``[begin, end)`` of a transfer's packed stream from rows to rows."""
    warn_once("see kvbaton.copy.NATIVE")
    if len(source_units) != len(destination_units):
        raise ValueError(f"{len(source_units)} source units but {len(destination_units)} destination units")
    _check(shape, begin, end, len(source_units), (source, source_units, source_bases))
    _check(shape, begin, end, len(source_units), (destination, destination_units, destination_bases))
    check_cast(shape, cast, source_bases)
    if begin == end:
        return
    first, last = _units_of(shape, begin, end)
    froms = _addresses(shape, source, source_units[first:last], source_bases)
    tos = _addresses(shape, destination, destination_units[first:last], destination_bases)
    pieces = froms, tos, *_clip(shape, first, last, begin, end)
    _execute(shape, source_units[first:last], source_bases, cast, pieces)


def gather(
    shape: Int64s,
    side: Int64s,
    units: Int64s,
    bases: Int64s,
    packed: Any,
    begin: int,
    threads: int,
    cast: Cast | None = None,
) -> None:
    """Fill ``packed`` with a transfer's packed stream, from byte ``begin``."""
    check_cast(shape, cast, bases)
    _packed(shape, side, units, bases, np.frombuffer(packed, dtype=np.uint8), begin, gathers=True, cast=cast)


def scatter(shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Any, begin: int, threads: int) -> None:
    """Spread ``packed``, which holds a transfer's packed stream from byte ``begin``, over the rows."""
    _packed(shape, side, units, bases, np.frombuffer(packed, dtype=np.uint8), begin, gathers=False)


def send(descriptor: int, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, begin: int, end: int) -> int:
    """Send the bytes ``[begin, end)`` of a transfer's packed stream."""
    if not 0 <= begin <= end:
        raise ValueError(f"[{begin}, {end}) is not a range of bytes")
    packed = memoryview(bytearray(end - begin))
    gather(shape, side, units, bases, packed, begin, 1)
    sent = 0
    while sent < len(packed):
        sent += os.write(descriptor, packed[sent:])
    return sent


def receive(descriptor: int, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, begin: int, end: int) -> int:
    """Receive the bytes ``[begin, end)`` of a transfer's packed stream; fewer if the connection ends."""
    if not 0 <= begin <= end:
        raise ValueError(f"[{begin}, {end}) is not a range of bytes")
    _check(shape, begin, end, len(units), (side, units, bases))
    packed = memoryview(bytearray(end - begin))
    received = 0
    while received < len(packed) and (more := os.readv(descriptor, [packed[received:]])):
        received += more
    scatter(shape, side, units, bases, packed[:received], begin, 1)
    return received


def digest(
    shape: Int64s,
    side: Int64s,
    units: Int64s,
    numbers: Int64s,
    bases: Int64s,
    stream: int,
    threads: int,
    instructions: str = "",
) -> int:
    """One number for the content of all pieces: see `kvbaton.copy.digests`."""
    warn_once("see kvbaton.copy.NATIVE")
    unit_bytes = int(shape.prod(axis=1).sum())
    _check(shape, 0, unit_bytes * len(units), len(units), (side, units, bases))
    if numbers.dtype != np.int64:
        raise TypeError("numbers must be int64")
    if numbers.shape != units.shape:
        raise ValueError(f"{len(units)} units but {len(numbers)} numbers")
    if not len(units) or not len(shape):
        return 0
    counts = shape[:, 0] * shape[:, 1]
    runs = np.repeat(shape[:, 2], counts)
    offsets = np.tile(np.cumsum(runs) - runs, len(units))
    return digest_pieces(
        _addresses(shape, side, units, bases),
        np.tile(runs, len(units)),
        np.repeat(numbers, len(runs)),
        offsets,
        stream,
    )


def _packed(
    shape: Int64s,
    side: Int64s,
    units: Int64s,
    bases: Int64s,
    packed: Bytes,
    begin: int,
    *,
    gathers: bool,
    cast: Cast | None = None,
) -> None:
    warn_once("see kvbaton.copy.NATIVE")
    if gathers and not packed.flags.writeable:
        raise BufferError("the buffer to gather into is read-only")
    end = begin + len(packed)
    _check(shape, begin, end, len(units), (side, units, bases))
    if begin == end:
        return
    first, last = _units_of(shape, begin, end)
    rows = _addresses(shape, side, units[first:last], bases)
    skip, lengths = _clip(shape, first, last, begin, end)
    # `skip` is added to both sides; in the packed buffer a clipped piece starts where the one before it ended.
    places = packed.ctypes.data + np.cumsum(lengths) - lengths - skip
    if gathers:
        _execute(shape, units[first:last], bases, cast, (rows, places, skip, lengths))
    else:
        _move(places, rows, skip, lengths)


def _execute(
    shape: Int64s, units: Int64s, bases: Int64s, cast: Cast | None, pieces: tuple[Int64s, Int64s, Int64s, Int64s]
) -> None:
    """Move or cast pieces: where each is read and written, how many bytes of what it gives to skip, and to write."""
    if cast is None:
        _move(*pieces)
        return
    boxes = np.tile(np.repeat(np.arange(len(shape)), shape[:, 0] * shape[:, 1]), len(units))
    scaled = cast.scale[:, _REGION] != -1
    scales = _addresses(shape, np.where(scaled[:, None], cast.scale, [0, 0, 0, 1, 0, 0, 0]), units, bases)
    kinds, kind = np.unique(np.column_stack([cast.how, scaled]), axis=0, return_inverse=True)
    for number, how in enumerate(kinds.tolist()):
        chosen = np.flatnonzero((kind.reshape(-1)[boxes] == number) & (pieces[3] > 0))
        some = tuple(column[chosen] for column in pieces)
        if not len(chosen):
            continue
        if how[0] == MOVE:
            _move(*some)
        else:
            cast_pieces(how[:4], cast.factor[boxes[chosen]], scales[chosen] if how[4] else None, *some)


def _check(shape: Int64s, begin: int, end: int, units: int, side: tuple[Int64s, Int64s, Int64s]) -> None:
    table, indices, bases = side
    for name, array, columns in (("shape", shape, 3), ("side", table, 7)):
        if array.dtype != np.int64:
            raise TypeError(f"{name} must be int64")
        if array.ndim != 2 or array.shape[1] != columns or len(array) != len(shape):
            raise ValueError(f"{name} must have the shape [{len(shape)}, {columns}], not {list(array.shape)}")
    if indices.dtype != np.int64 or bases.dtype != np.int64:
        raise TypeError("units and bases must be int64")
    if indices.ndim != 1 or bases.ndim != 1:
        raise ValueError(f"units and bases must have 1 dimension, not {indices.ndim} and {bases.ndim}")
    if (shape < 1).any() or (table < 0).any() or (table[:, _UNITS_PER_ROW] < 1).any() or (indices < 0).any():
        raise ValueError("a count, run or units per row is below 1, or a region, offset, stride or unit is negative")
    if len(table) and table[:, _REGION].max() >= len(bases):
        raise ValueError(f"a box names region {table[:, _REGION].max()} of {len(bases)}")
    total = int(shape.prod(axis=1).sum()) * units
    if not 0 <= begin <= end <= total:
        raise ValueError(f"bytes [{begin}, {end}) are not in a stream of {total} bytes")


def _units_of(shape: Int64s, begin: int, end: int) -> tuple[int, int]:
    unit_bytes = int(shape.prod(axis=1).sum())
    return begin // unit_bytes, (end - 1) // unit_bytes + 1


def _addresses(shape: Int64s, side: Int64s, units: Int64s, bases: Int64s) -> Int64s:
    """Give the address of each piece, in the order of the packed stream."""
    counts = shape[:, 0] * shape[:, 1]
    box = np.repeat(np.arange(len(shape)), counts)
    piece = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    i0, i1 = piece // shape[box, 1], piece % shape[box, 1]
    inside = bases[side[box, _REGION]] + side[box, _OFFSET] + i0 * side[box, _STRIDE0] + i1 * side[box, _STRIDE1]
    rows, parts = units[:, None] // side[:, _UNITS_PER_ROW], units[:, None] % side[:, _UNITS_PER_ROW]
    starts = rows * side[:, _ROW_STRIDE] + parts * side[:, _UNIT_STRIDE]
    addresses: Int64s = (starts[:, box] + inside).reshape(-1)
    return addresses


def _clip(shape: Int64s, first: int, last: int, begin: int, end: int) -> tuple[Int64s, Int64s]:
    """How many bytes of each piece of units ``[first, last)`` to skip, and how many to move, for ``[begin, end)``."""
    runs = np.tile(np.repeat(shape[:, 2], shape[:, 0] * shape[:, 1]), last - first)
    starts = first * int(shape.prod(axis=1).sum()) + np.cumsum(runs) - runs
    skip = np.clip(begin - starts, 0, runs)
    lengths = np.clip(end - starts, 0, runs) - skip
    return skip, np.maximum(lengths, 0)


def _move(froms: Int64s, tos: Int64s, skip: Int64s, lengths: Int64s) -> None:
    froms, tos = froms + skip, tos + skip
    memory, low = view((froms, lengths), (tos, lengths))
    froms, tos = froms - low, tos - low
    for length in np.unique(lengths[lengths > 0]).tolist():
        chosen = np.flatnonzero(lengths == length)
        columns = min(length, INDEX_ELEMENTS)
        step = max(1, INDEX_ELEMENTS // columns)
        for column in range(0, length, columns):
            inside = np.arange(column, min(column + columns, length))
            for start in range(0, len(chosen), step):
                block = chosen[start : start + step]
                memory[tos[block, None] + inside] = memory[froms[block, None] + inside]
