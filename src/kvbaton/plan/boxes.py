"""Boxes: what must be copied, as tables of integers that a kernel executes without knowing any layout.

A box is a small strided block of one row: ``count0 x count1`` runs of ``run`` contiguous bytes. A transfer applies the
same boxes to many *units* (a row, or an equal part of a row), so its size in memory does not grow with the pieces.

Address of a piece, on either side::

    base[region] + offset
        + (unit // units_per_row) * row_stride + (unit % units_per_row) * unit_stride
        + i0 * stride0 + i1 * stride1                       for i0 < count0, i1 < count1

The order of pieces, which is also the order of bytes in a packed buffer: unit, then box, then i0, then i1.

Where elements change on their way, `Cast` says how. ``run`` counts bytes of the destination then: who unpacks a buffer
needs to know nothing of casts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

SIDE_COLUMNS = ("region", "offset", "row_stride", "units_per_row", "unit_stride", "stride0", "stride1")
SHAPE_COLUMNS = ("count0", "count1", "run")
CAST_COLUMNS = ("operation", "source_dtype", "destination_dtype", "elements")

MOVE, CONVERT, QUANTISE, SCALE = range(4)
"""Operations of `Cast`."""

CAST_DTYPES = ("", "float32", "bfloat16", "float16", "float8_e4m3fn")
"""What a dtype column of `Cast` names, by number; 0 stands for bytes that are moved as they are."""
CAST_ITEMSIZES = (1, 4, 2, 2, 1)
"""Bytes of one element of each."""
SCALE_BYTES = 4
"""Bytes of a scale: they are float32."""


class Cast(NamedTuple):
    """How each box changes what it moves: tables with a row for each box.

    ``how`` is int64 ``[n, 4]`` with the columns of ``CAST_COLUMNS``. A run reads ``elements`` elements of the source,
    which lie next to each other, and gives ``run`` bytes. With ``value = stored * factor * scale``, where ``factor`` is
    float32 ``[n]`` and ``scale`` the float32 that the source has for this run (1 where it has none):

    * ``MOVE``: the bytes as they are (both dtypes are 0, ``elements`` counts bytes);
    * ``CONVERT``: each value, rounded to the destination's dtype;
    * ``QUANTISE``: each value divided by the scale of the run (see ``SCALE``), rounded to the destination's dtype;
    * ``SCALE``: one float32: the largest finite magnitude of the run's values, divided by the largest value that the
      destination's dtype can hold. It is 1 where that magnitude is 0, and at least 2**-126.

    ``scale`` is int64 ``[n, 7]`` with the columns of ``SIDE_COLUMNS``: where the source's scale of each run lies. Its
    region is -1 where the source has none. All arrays are C-contiguous.
    """

    how: Int64s
    factor: Float32s
    scale: Int64s


class Boxes(NamedTuple):
    """A table of boxes.

    ``shape`` is int64 ``[n, 3]`` with the columns of ``SHAPE_COLUMNS``; ``source`` and ``destination`` are int64
    ``[n, 7]`` with those of ``SIDE_COLUMNS``. All arrays are C-contiguous. All strides are zero or positive, all counts
    and runs are at least 1. Strides, offsets and runs are in bytes. ``cast`` is None where every box moves bytes as
    they are.
    """

    shape: Int64s
    source: Int64s
    destination: Int64s
    cast: Cast | None = None

    @property
    def bytes_per_unit(self) -> int:
        """Bytes that one unit writes at the destination."""
        return int(np.dot(self.shape[:, 0] * self.shape[:, 1], self.shape[:, 2]))

    @property
    def source_shape(self) -> Int64s:
        """``shape`` as the source sees it: ``run`` counts the bytes that are read there."""
        if self.cast is None:
            return self.shape
        shape: Int64s = self.shape.copy()
        shape[:, 2] = self.cast.how[:, 3] * np.array(CAST_ITEMSIZES, np.int64)[self.cast.how[:, 1]]
        return shape

    def pick(self, which: slice | Int64s = slice(None)) -> Boxes:
        """Return the boxes that ``which`` selects, as C-contiguous tables; these ones where they are all of them."""
        if (
            isinstance(which, slice)
            and which == slice(None)
            and all(table.flags.c_contiguous for table in (*self[:3], *(self.cast or ())))
        ):
            return self
        shape, source, destination = (np.ascontiguousarray(table[which]) for table in self[:3])
        if self.cast is None:
            return Boxes(shape, source, destination)
        how, factor, scale = self.cast
        pick = np.ascontiguousarray
        return Boxes(shape, source, destination, Cast(pick(how[which]), pick(factor[which]), pick(scale[which])))


class Transfer(NamedTuple):
    """Boxes applied to units: unit ``source_units[i]`` is copied to unit ``destination_units[i]``."""

    boxes: Boxes
    source_units: Int64s
    destination_units: Int64s

    @property
    def nbytes(self) -> int:
        """Bytes that the whole transfer writes at the destination."""
        return self.boxes.bytes_per_unit * len(self.source_units)

    @property
    def pieces(self) -> int:
        """Contiguous runs that the whole transfer moves."""
        return int((self.boxes.shape[:, 0] * self.boxes.shape[:, 1]).sum()) * len(self.source_units)
