"""Folding of box tables: the same bytes in fewer and longer runs."""

from __future__ import annotations

import numpy as np

from kvbaton.plan.boxes import SHAPE_COLUMNS, SIDE_COLUMNS, Boxes, Int64s

_COUNT0, _COUNT1, _RUN = range(len(SHAPE_COLUMNS))
_REGION, _OFFSET, _ROW_STRIDE, _UNITS_PER_ROW, _UNIT_STRIDE, _STRIDE0, _STRIDE1 = range(len(SIDE_COLUMNS))
_KEPT = [_REGION, _ROW_STRIDE, _UNITS_PER_ROW, _UNIT_STRIDE, _STRIDE0, _STRIDE1]


def fold(boxes: Boxes) -> Boxes:
    """Join boxes that continue each other on both sides, and runs that touch; the result moves the same bytes.

    Boxes come out ordered by the source's region and offset. They move bytes as they are.
    """
    shape, source, destination = (table.copy() for table in boxes[:3])
    while True:
        before = len(shape)
        _flatten(shape, source, destination)
        shape, source, destination = _join(shape, source, destination)
        if len(shape) == before:
            break
    _flatten(shape, source, destination)
    order = np.lexsort((source[:, _OFFSET], source[:, _REGION]))
    return Boxes(shape, source, destination).pick(order)


def _flatten(shape: Int64s, source: Int64s, destination: Int64s) -> None:
    """Make runs of repeats that touch, in place."""
    for _ in range(2):
        _outer_to_inner(shape, source, destination)
        touching = shape[:, _COUNT1] > 1
        for side in (source, destination):
            touching &= side[:, _STRIDE1] == shape[:, _RUN]
        shape[touching, _RUN] *= shape[touching, _COUNT1]
        shape[touching, _COUNT1] = 1
        for side in (source, destination):
            side[touching, _STRIDE1] = 0
    _outer_to_inner(shape, source, destination)


def _outer_to_inner(shape: Int64s, source: Int64s, destination: Int64s) -> None:
    lone = (shape[:, _COUNT1] == 1) & (shape[:, _COUNT0] > 1)
    shape[lone, _COUNT1] = shape[lone, _COUNT0]
    regular = ~lone & (shape[:, _COUNT0] > 1)
    for side in (source, destination):
        side[lone, _STRIDE1] = side[lone, _STRIDE0]
        regular &= side[:, _STRIDE0] == side[:, _STRIDE1] * shape[:, _COUNT1]
    shape[regular, _COUNT1] *= shape[regular, _COUNT0]
    single = lone | regular
    shape[single, _COUNT0] = 1
    for side in (source, destination):
        side[single, _STRIDE0] = 0


def _join(shape: Int64s, source: Int64s, destination: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    if len(shape) < 2:
        return shape, source, destination
    keys = np.concatenate([shape[:, :_RUN], source[:, _KEPT], destination[:, _KEPT]], axis=1)
    order = np.lexsort((source[:, _OFFSET], *keys.T))
    shape, source, destination, keys = shape[order], source[order], destination[order], keys[order]
    run = shape[:-1, _RUN]
    continues = (keys[1:] == keys[:-1]).all(axis=1)
    for side in (source, destination):
        continues &= side[1:, _OFFSET] - side[:-1, _OFFSET] == run
    heads = np.flatnonzero(np.concatenate([[True], ~continues]))
    shape_joined = shape[heads]
    shape_joined[:, _RUN] = np.add.reduceat(shape[:, _RUN], heads)
    return shape_joined, source[heads], destination[heads]
