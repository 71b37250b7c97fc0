"""Contiguous runs of transfers: how many there are and how long, after neighbours are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbaton.plan import Int64s, Transfer, group_rows


class RunLengths(NamedTuple):
    """``counts[i]`` runs of ``lengths[i]`` bytes; lengths ascend."""

    lengths: Int64s
    counts: Int64s

    @property
    def pieces(self) -> int:
        """How many runs there are."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return int((self.lengths * self.counts).sum())

    @property
    def shortest(self) -> int:
        """Bytes of the shortest run; 0 if there is none."""
        return int(self.lengths[0]) if self.lengths.size else 0

    @property
    def longest(self) -> int:
        """Bytes of the longest run; 0 if there is none."""
        return int(self.lengths[-1]) if self.lengths.size else 0

    @property
    def median(self) -> int:
        """Bytes of the run in the middle (the shorter one of two); 0 if there is none."""
        if not self.lengths.size:
            return 0
        return int(self.lengths[np.searchsorted(np.cumsum(self.counts), (self.pieces + 1) // 2)])


def run_lengths(transfers: Sequence[Transfer]) -> RunLengths:
    """The runs of all ``transfers``. Units that lie side by side on both sides make one run where a box fills them."""
    lengths: list[Int64s] = []
    counts: list[Int64s] = []
    for boxes, source_units, destination_units in transfers:
        shape = boxes.shape
        if not len(source_units):
            continue
        joins = (shape[:, 0] * shape[:, 1] == 1) & _fills(boxes.source, shape) & _fills(boxes.destination, shape)
        apart = shape[~joins]
        lengths.append(apart[:, 2])
        counts.append(apart[:, 0] * apart[:, 1] * len(source_units))
        if joins.any():
            grouped = group_rows(source_units, destination_units).counts
            sizes, times = np.unique(grouped, return_counts=True)
            lengths.append(np.outer(shape[joins, 2], sizes).reshape(-1))
            counts.append(np.tile(times, int(joins.sum())))
    return merge_runs([RunLengths(np.concatenate(lengths), np.concatenate(counts))] if lengths else [])


def merge_runs(many: Sequence[RunLengths]) -> RunLengths:
    """All the runs of ``many`` together."""
    empty = np.empty(0, np.int64)
    lengths = np.concatenate([empty, *(runs.lengths for runs in many)])
    counts = np.concatenate([empty, *(runs.counts for runs in many)])
    found, where = np.unique(lengths, return_inverse=True)
    summed = np.zeros(len(found), np.int64)
    np.add.at(summed, where.reshape(-1), counts)
    return RunLengths(found, summed)


def _fills(side: Int64s, shape: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For which boxes the unit after a unit begins where its run ends."""
    row_stride, units, unit_stride = side[:, 2], side[:, 3], side[:, 4]
    run = shape[:, 2]
    filled = (row_stride == units * run) & ((units == 1) | (unit_stride == run))
    return np.asarray(filled, np.bool_)
