"""Boxes are joined only where they continue each other on both sides and step alike."""

import numpy as np
import pytest

from kvbaton.plan import SHAPE_COLUMNS, SIDE_COLUMNS, Boxes
from kvbaton.plan.fold import fold

FIRST = {"count0": 1, "count1": 3, "run": 8}
SIDE = {"region": 0, "offset": 0, "row_stride": 100, "units_per_row": 1, "unit_stride": 0, "stride0": 0, "stride1": 32}


def table(*boxes):
    shape, source, destination = zip(*boxes, strict=True)
    return Boxes(
        np.array([[box[name] for name in SHAPE_COLUMNS] for box in shape], np.int64),
        *(np.array([[box[name] for name in SIDE_COLUMNS] for box in side], np.int64) for side in (source, destination)),
    )


def after(side, **changes):
    return {**side, "offset": side["offset"] + 8, **changes}


def test_neighbours_that_step_alike_are_joined():
    folded = fold(table((FIRST, after(SIDE), after(SIDE)), (FIRST, SIDE, SIDE)))
    assert folded.shape.tolist() == [[1, 3, 16]]
    assert folded.source[:, 1].tolist() == [0]


@pytest.mark.parametrize("column", ["region", "row_stride", "units_per_row", "unit_stride", "stride1", "offset"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_neighbours_that_step_otherwise_stay_apart(column, side):
    source, destination = after(SIDE), after(SIDE)
    changed = source if side == "source" else destination
    changed[column] += 2
    assert len(fold(table((FIRST, SIDE, SIDE), (FIRST, source, destination))).shape) == 2


@pytest.mark.parametrize("name", ["count0", "count1"])
def test_other_counts_stay_apart(name):
    other = {**FIRST, name: FIRST[name] + 1}
    side = {**SIDE, "stride0": 1000}
    assert len(fold(table((FIRST, side, side), (other, after(side), after(side)))).shape) == 2


def test_runs_that_touch_become_one():
    first = {"count0": 4, "count1": 2, "run": 8}
    side = {**SIDE, "stride0": 16, "stride1": 8}
    assert fold(table((first, side, side))).shape.tolist() == [[1, 1, 64]]
    apart = {**SIDE, "stride0": 64, "stride1": 16}
    folded = fold(table((first, side, apart)))
    assert folded.shape.tolist() == [[4, 2, 8]]
    regular = {**SIDE, "stride0": 32, "stride1": 16}
    folded = fold(table((first, side, regular)))
    assert folded.shape.tolist() == [[1, 8, 8]]
    assert folded.destination[0].tolist() == [0, 0, 100, 1, 0, 0, 16]


def test_all_layers_of_a_block_become_one_run():
    run = {"count0": 1, "count1": 1, "run": 8}
    boxes = [
        (run, {**SIDE, "stride1": 0, "offset": 8 * i}, {**SIDE, "stride1": 0, "offset": 8 * i + 5}) for i in range(9)
    ]
    folded = fold(table(*boxes[::-1]))
    assert folded.shape.tolist() == [[1, 1, 72]]
    assert (folded.source[0, 1], folded.destination[0, 1]) == (0, 5)
