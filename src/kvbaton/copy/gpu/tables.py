"""Tables of boxes as the GPU kernels read them: what can be worked out once for a plan, whatever the rows are.

Boxes that the same kernel can move are one launch: those that move bytes in vectors of one width, and those that change
elements in one way. A plan that changes nothing is one launch, as long as its boxes are equally well aligned.

A table has a row of ``COLUMNS`` int64 for each box:

* 0 items of one unit, 3 items of one run, 6 ``count1``; each with a multiplier and a shift behind it, to divide by it;
* 9 the byte of the packed unit where the box begins, 10 the bytes of an item there;
* 11, 19, 27 the source, the destination and the source's scales: address, row stride, units per row (with multiplier
  and shift), unit stride, and the two strides; the address of scales is 0 where there are none;
* 35 elements of a run, 36 the bits of the factor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbaton.copy.gpu.configuration import Configuration
from kvbaton.copy.numbers import check_cast
from kvbaton.errors import RowsError
from kvbaton.plan.boxes import (
    CAST_ITEMSIZES,
    CONVERT,
    MOVE,
    QUANTISE,
    SCALE,
    SCALE_BYTES,
    Boxes,
    Int64s,
)

COLUMNS = 37
HEADER = 11
"""Numbers before the first tiles: tiles, units, begin and end of the range, what is added to source and destination
addresses, whether source and destination have a list of units, bytes of a unit, boxes, and tiles of each box if all
have as many."""
WIDEST = 16
"""Bytes that one thread reads at once, at most."""
RUN_STEPS = (32, 128, 512)
"""Elements of a run that are looked at together: few numbers, since each is compiled by itself."""
MOST_ITEMS = 1 << 30
MOST_UNIT = (1 << 31) - 1
"""Units are sent as int32."""
_NO_SCALE = -1


class Launch(NamedTuple):
    """One launch of ``kernel`` with its compile-time ``constants`` over the boxes of ``table``.

    A unit has ``pieces`` runs of each box, a run has ``per_run`` items, and ``block`` items make a tile.
    """

    kernel: str
    constants: dict[str, int | bool]
    table: Int64s
    pieces: Int64s
    per_run: Int64s
    block: int

    def tiles(self, units: int) -> tuple[Int64s, dict[str, bool]]:
        """Tiles of each box, and the constant that says in which order they are: run by run where units fill them."""
        if self.kernel == "quantise":
            each, order = -(-units * self.pieces // self.block), {}
        elif units * int(self.per_run.min()) >= self.block:
            each, order = self.pieces * -(-units * self.per_run // self.block), {"BY_PIECE": True}
        else:
            each, order = -(-units * self.pieces * self.per_run // self.block), {"BY_PIECE": False}
        return each, order


class Cut(NamedTuple):
    """The range of the packed stream that moves, beginning at the first unit; everything if ``clips`` is false."""

    clips: bool = False
    begin: int = 0
    end: int = 0


class Tables:
    """The boxes of one transfer with the addresses of their regions; see `launches`."""

    def __init__(self, boxes: Boxes, source_bases: Int64s | None, destination_bases: Int64s | None) -> None:
        """A side without bases is packed: its address is added in each call.

        Raises ``ValueError`` or ``TypeError`` for tables that are not as `kvbaton.plan.boxes` says.
        """
        shape, source, destination, cast = boxes
        _check(shape, source, source_bases)
        _check(shape, destination, destination_bases)
        check_cast(shape, cast, np.empty(0, np.int64) if source_bases is None else source_bases)
        self.count = len(shape)
        nbytes = shape.prod(axis=1)
        self.unit_bytes = int(nbytes.sum())
        self._shape, self._start = shape.copy(), np.cumsum(nbytes) - nbytes
        self._source = _side(source, source_bases)
        self._destination = _side(destination, destination_bases)
        none = np.tile(np.array([0, 0, 0, 1, 0, 0, 0], np.int64), (self.count, 1))
        if cast is None:
            self._how = np.zeros((self.count, 4), np.int64)
            self._how[:, 3] = shape[:, 2]
            self._factor, self._scale = np.ones(self.count, np.float32), none
            self._scaled = np.zeros(self.count, bool)
        else:
            self._how, self._factor = cast.how.copy(), cast.factor.copy()
            self._scaled = (cast.scale[:, 0] != _NO_SCALE) & (cast.how[:, 0] != MOVE)
            self._scale = _side(np.where(self._scaled[:, None], cast.scale, none), source_bases, self._scaled)
        self.casts = bool((self._how[:, 0] != MOVE).any())
        self._parts = bool((np.stack([self._source, self._destination, self._scale])[:, :, 3] != 1).any())
        self._made: dict[tuple[int, ...], list[Launch]] = {}

    def launches(
        self, source_shift: int, destination_shift: int, cut: Cut, configuration: Configuration
    ) -> list[Launch]:
        """The launches for addresses that these numbers are added to."""
        ends = (cut.begin % WIDEST, cut.end % WIDEST) if cut.clips else (0, 0)
        key = (source_shift % WIDEST, destination_shift % WIDEST, cut.clips, *ends, *configuration)
        if key not in self._made:
            self._made[key] = self._launches(source_shift, destination_shift, cut, configuration)
        return self._made[key]

    def _launches(
        self, source_shift: int, destination_shift: int, cut: Cut, configuration: Configuration
    ) -> list[Launch]:
        source = self._alignment(self._source, source_shift)
        destination = self._alignment(self._destination, destination_shift)
        scale = self._alignment(self._scale, 0)
        width = np.gcd(np.gcd(source, destination), self._shape[:, 2])
        if cut.clips:
            for edge in (self._start - cut.begin, self._start - cut.end, np.full(self.count, self.unit_bytes)):
                width = np.gcd(width, edge)
        operation, source_dtype, destination_dtype, elements = self._how.T
        sizes = np.array(CAST_ITEMSIZES, np.int64)
        read, written = sizes[source_dtype], np.where(operation == SCALE, SCALE_BYTES, sizes[destination_dtype])
        # A thread's elements lie next to each other and fill at most WIDEST bytes on either side.
        vector = np.gcd(elements, WIDEST // np.maximum(read, sizes[destination_dtype]))
        whole = (source % read == 0) & (destination % written == 0) & (scale % SCALE_BYTES == 0) & (not cut.clips)
        for alignment, size in ((source, read), (destination, np.where(operation == SCALE, 1, written))):
            vector = np.gcd(vector, alignment // size)
        vector = np.where(whole, vector, 1)
        keys = np.column_stack([operation, source_dtype, destination_dtype, vector, whole]).astype(np.int64)
        moves = operation == MOVE
        keys[moves] = 0
        keys[moves, 3] = width[moves]
        made: list[Launch] = []
        for key in np.unique(keys, axis=0):
            which = np.flatnonzero((keys == key).all(axis=1))
            made.append(self._launch(which, key.tolist(), cut.clips, configuration))
        return made

    def _launch(self, which: Int64s, key: list[int], clips: bool, configuration: Configuration) -> Launch:
        operation, source_dtype, destination_dtype, vector, whole = key
        shape, elements = self._shape[which], self._how[which, 3]
        constants: dict[str, int | bool]
        if operation == MOVE:
            per_run, step = shape[:, 2] // vector, np.full(len(which), vector)
            block = _power(min(configuration.move_bytes // vector, configuration.move_items))
            constants = {"WIDTH": vector, "BLOCK": block, "PARTS": self._parts, "CLIP": clips}
            return self._table("move", constants, which, per_run, step, block)
        constants = {
            "FROM": source_dtype,
            "TO": destination_dtype,
            "FROM_SIZE": CAST_ITEMSIZES[source_dtype],
            "TO_SIZE": CAST_ITEMSIZES[destination_dtype],
            "VECTOR": vector,
            "WHOLE": bool(whole),
        }
        if operation == CONVERT:
            per_run, step = elements // vector, np.full(len(which), vector * CAST_ITEMSIZES[destination_dtype])
            block = _power(configuration.elements // vector)
            return self._table("convert", constants | {"BLOCK": block}, which, per_run, step, block)
        assert operation in (QUANTISE, SCALE)
        longest = int(elements.max())
        together = next((step for step in RUN_STEPS if step >= longest), RUN_STEPS[-1])
        block = _power(configuration.elements // together)
        constants |= {"ONLY_SCALE": operation == SCALE, "STEP": together, "BLOCK": block}
        return self._table("quantise", constants, which, np.ones(len(which), np.int64), shape[:, 2], block)

    def _table(
        self, kernel: str, constants: dict[str, int | bool], which: Int64s, per_run: Int64s, step: Int64s, block: int
    ) -> Launch:
        shape = self._shape[which]
        pieces = shape[:, 0] * shape[:, 1]
        items = pieces * per_run
        if int(items.max(initial=0)) > MOST_ITEMS:
            raise RowsError(
                f"a unit of a box has {int(items.max())} vectors of {int(step[np.argmax(items)])} bytes; the GPU "
                f"counts up to {MOST_ITEMS}: bind it in smaller units, or align its rows to {WIDEST} bytes"
            )
        table = np.empty((len(which), COLUMNS), np.int64)
        for column, divisor in ((0, items), (3, per_run), (6, shape[:, 1])):
            table[:, column : column + 3] = _division(divisor)
        table[:, 9], table[:, 10] = self._start[which], step
        for column, side in ((11, self._source), (19, self._destination), (27, self._scale)):
            address, row_stride, units_per_row, unit_stride, stride0, stride1 = side[which][:, [0, 2, 3, 4, 5, 6]].T
            table[:, column], table[:, column + 1] = address, row_stride
            table[:, column + 2 : column + 5] = _division(units_per_row)
            table[:, column + 5], table[:, column + 6], table[:, column + 7] = unit_stride, stride0, stride1
        table[:, 35] = self._how[which, 3]
        table[:, 36] = self._factor[which].view(np.uint32)
        return Launch(kernel, constants, table, pieces, per_run, block)

    def _alignment(self, side: Int64s, shift: int) -> Int64s:
        """The largest power of two up to WIDEST that every address of a box is a multiple of."""
        repeats = np.column_stack([side[:, 3] > 1, self._shape[:, :2] > 1])
        steps = np.where(repeats, side[:, 4:], 0)
        numbers = np.column_stack([side[:, 0] + shift, side[:, 2], steps, np.full(len(side), WIDEST)])
        return np.asarray(np.gcd.reduce(numbers, axis=1), np.int64)


def _side(
    side: Int64s, bases: Int64s | None, has: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None
) -> Int64s:
    """The table with the address of each box in its first column."""
    made: Int64s = side.copy()
    made[:, 0] = side[:, 1] if bases is None else bases[side[:, 0]] + side[:, 1]
    if has is not None:
        made[~has, 0] = 0
    return made


def _check(shape: Int64s, side: Int64s, bases: Int64s | None) -> None:
    for name, array, columns in (("shape", shape, 3), ("side", side, 7)):
        if array.dtype != np.int64:
            raise TypeError(f"{name} must be int64")
        if array.ndim != 2 or array.shape[1] != columns or len(array) != len(shape):
            raise ValueError(f"{name} must have the shape [{len(shape)}, {columns}], not {list(array.shape)}")
    if (shape < 1).any() or (side < 0).any() or (side[:, 3] < 1).any():
        raise ValueError("a count, run or units per row is below 1, or a region, offset or stride is negative")
    if bases is None:
        return
    if bases.dtype != np.int64 or bases.ndim != 1:
        raise TypeError("bases must be int64, of one dimension")
    if len(side) and side[:, 0].max() >= len(bases):
        raise ValueError(f"a box names region {side[:, 0].max()} of {len(bases)}")


def _division(divisors: Int64s) -> Int64s:
    """Divisor, multiplier and shift: ``number * multiplier >> shift`` is the quotient of any number below 2**31."""
    shift = np.ceil(np.log2(divisors)).astype(np.int64)
    # Logarithms of large numbers may be off by one.
    shift += (np.int64(1) << shift) < divisors
    power = np.int64(1) << np.minimum(shift + 31, 62)
    assert (shift <= 31).all(), "items of a unit and units of a row are limited"
    multiplier = -(-power // divisors)
    table: Int64s = np.column_stack([divisors, multiplier, shift + 31])
    return table


def _power(number: int) -> int:
    """The largest power of two up to ``number``."""
    return 1 << (max(1, number).bit_length() - 1)
