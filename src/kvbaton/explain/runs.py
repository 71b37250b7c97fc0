"""Contiguous runs of transfers: how many there are and how long, after neighbours are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbaton.plan import Int64s, Transfer
from kvbaton.plan.boxes import CONVERT


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
    """The runs of all ``transfers``, in bytes of the destination.

    A box that is one run joins that of the next unit where both sides go on. What has a scale of its own never does.
    """
    lengths: list[Int64s] = []
    counts: list[Int64s] = []
    for boxes, source_units, destination_units in transfers:
        shape, source_runs = boxes.shape, boxes.source_shape[:, 2:]
        if not len(source_units):
            continue
        single = shape[:, 0] * shape[:, 1] == 1
        if boxes.cast is not None:
            single &= (boxes.cast.how[:, 0] <= CONVERT) & (boxes.cast.scale[:, 0] == -1)
        lengths.append(shape[~single, 2])
        counts.append(shape[~single, 0] * shape[~single, 1] * len(source_units))
        # What joins follows from strides: boxes mostly differ in their offsets only.
        strides = np.hstack([shape[:, 2:], source_runs, boxes.source[:, 2:5], boxes.destination[:, 2:5]])[single]
        for line, alike in zip(*np.unique(strides, axis=0, return_counts=True), strict=True):
            run, source_run = int(line[0]), int(line[1])
            goes_on = _goes_on(source_units, line[2:5], source_run) & _goes_on(destination_units, line[5:8], run)
            ends = np.flatnonzero(np.append(~goes_on, True)) + 1
            sizes, times = np.unique(np.diff(ends, prepend=0), return_counts=True)
            lengths.append(sizes * run)
            counts.append(times * alike)
    return merge_runs([RunLengths(np.concatenate(lengths), np.concatenate(counts))] if lengths else [])


def _goes_on(units: Int64s, strides: Int64s, run: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each unit but the last, whether the next one lies ``run`` bytes further."""
    row_stride, units_per_row, unit_stride = strides
    places = units // units_per_row * row_stride + units % units_per_row * unit_stride
    return np.asarray(np.diff(places) == run, np.bool_)


def merge_runs(many: Sequence[RunLengths]) -> RunLengths:
    """All the runs of ``many`` together."""
    empty = np.empty(0, np.int64)
    lengths = np.concatenate([empty, *(runs.lengths for runs in many)])
    counts = np.concatenate([empty, *(runs.counts for runs in many)])
    found, where = np.unique(lengths, return_inverse=True)
    summed = np.zeros(len(found), np.int64)
    np.add.at(summed, where.reshape(-1), counts)
    return RunLengths(found, summed)
