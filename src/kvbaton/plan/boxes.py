"""Boxes: what must be copied, as tables of integers that a kernel executes without knowing any layout.

A box is a small strided block of one row: ``count0 x count1`` runs of ``run`` contiguous bytes. A transfer applies the
same boxes to many *units* (a row, or an equal part of a row), so its size in memory does not grow with the pieces.

Address of a piece, on either side::

    base[region] + offset
        + (unit // units_per_row) * row_stride + (unit % units_per_row) * unit_stride
        + i0 * stride0 + i1 * stride1                       for i0 < count0, i1 < count1

The order of pieces, which is also the order of bytes in a packed buffer: unit, then box, then i0, then i1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

SIDE_COLUMNS = ("region", "offset", "row_stride", "units_per_row", "unit_stride", "stride0", "stride1")
SHAPE_COLUMNS = ("count0", "count1", "run")


class Boxes(NamedTuple):
    """A table of boxes.

    ``shape`` is int64 ``[n, 3]`` with the columns of ``SHAPE_COLUMNS``; ``source`` and ``destination`` are int64
    ``[n, 7]`` with those of ``SIDE_COLUMNS``. All arrays are C-contiguous. All strides are zero or positive, all counts
    and runs are at least 1. Strides, offsets and runs are in bytes.
    """

    shape: Int64s
    source: Int64s
    destination: Int64s

    @property
    def bytes_per_unit(self) -> int:
        """Bytes that one unit moves."""
        return int(self.shape.prod(axis=1).sum())


class Transfer(NamedTuple):
    """Boxes applied to units: unit ``source_units[i]`` is copied to unit ``destination_units[i]``."""

    boxes: Boxes
    source_units: Int64s
    destination_units: Int64s

    @property
    def nbytes(self) -> int:
        """Bytes that the whole transfer moves."""
        return self.boxes.bytes_per_unit * len(self.source_units)

    @property
    def pieces(self) -> int:
        """Contiguous runs that the whole transfer moves."""
        return int((self.boxes.shape[:, 0] * self.boxes.shape[:, 1]).sum()) * len(self.source_units)
