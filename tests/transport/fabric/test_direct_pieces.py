"""Boxes become contiguous writes: the same bytes as the oracle's, within the limits, with neighbours put together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport.conformance.case import apply, rows, table
from kvbaton.transport.executor import count_runs
from kvbaton.transport.fabric import direct
from kvbaton.transport.fabric.area import numbers_of
from kvbaton.transport.fabric.base import FabricLimits
from kvbaton.transport.fabric.direct import direct_writes

NUMBERS = np.array([5, -1, 3, 9])
"""What the fabric calls regions 0 to 3; the second one is empty."""
REGIONS = (0, 2, 3)
BACK = {5: 0, 3: 2, 9: 3}


def written(transfers, limits, sources, targets):
    """Do the writes one by one; all of them."""
    writes = list(direct_writes(transfers, NUMBERS, NUMBERS, limits))
    for one in writes:
        assert len(one.local_offsets) == len(one.remote_offsets) == len(one.lengths)
        assert 1 <= len(one.lengths) <= limits.writes
        assert one.lengths.min() >= 1
        assert one.lengths.max() <= limits.write_bytes
        here, there = sources[BACK[one.local_region]], targets[BACK[one.remote_region]]
        for local, remote, length in zip(one.local_offsets, one.remote_offsets, one.lengths, strict=True):
            there[remote : remote + length] = here[local : local + length]
    return writes


@st.composite
def sides(draw, shapes):
    """A side whose pieces do not touch one another: each box has a place of its own in a row of its own length."""
    found, end = [], 0
    units_per_row = draw(st.integers(1, 3))
    for count0, count1, run in shapes:
        gap = draw(st.integers(0, 3))
        stride1 = run + gap
        stride0 = stride1 * count1 + draw(st.integers(0, 3))
        found.append([draw(st.sampled_from(REGIONS)), end, 0, units_per_row, 0, stride0, stride1])
        end += stride0 * count0 + draw(st.integers(0, 2))
    gap = draw(st.integers(0, 2))
    for row in found:
        row[4], row[2] = end, end * units_per_row + gap
    return table(*found)


@st.composite
def transfers(draw):
    count = draw(st.integers(1, 4))
    shapes = [[draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))] for _ in range(count)]
    units = draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
    there = draw(st.permutations(range(12)))[: len(units)]
    if draw(st.booleans()):
        units, there = sorted(units), sorted(there)
    return Transfer(Boxes(table(*shapes), draw(sides(shapes)), draw(sides(shapes))), np.array(units), np.array(there))


@given(transfers(), st.integers(1, 5), st.integers(1, 12), st.integers(1, 8))
def test_every_byte_is_written_once_and_no_other(transfer, writes, write_bytes, at_a_time):
    limits = FabricLimits(writes=writes, write_bytes=write_bytes)
    random = np.random.default_rng(5)
    sources = [random.integers(0, 200, 4096, dtype=np.uint8) for _ in range(4)]
    found, expected = ([np.full(4096, 238, np.uint8) for _ in range(4)] for _ in range(2))
    before = direct.PIECES
    direct.PIECES = at_a_time
    try:
        made = written([transfer], limits, sources, found)
    finally:
        direct.PIECES = before
    apply([transfer], sources, expected)
    np.testing.assert_array_equal(found, expected)
    assert sum(one.nbytes for one in made) == transfer.nbytes


def test_runs_that_touch_on_both_sides_are_one_write():
    units = np.arange(100)
    (one,) = direct_writes([rows(64, units, units + 7)], NUMBERS, NUMBERS, FabricLimits())
    assert [one.local_offsets.tolist(), one.remote_offsets.tolist(), one.lengths.tolist()] == [[0], [448], [6400]]


def test_the_order_of_units_does_not_matter_for_neighbours():
    order = np.random.default_rng(1).permutation(100)
    (one,) = direct_writes([rows(64, order, order)], NUMBERS, NUMBERS, FabricLimits())
    assert one.lengths.tolist() == [6400]


def test_runs_that_touch_on_one_side_only_stay_apart():
    units = np.arange(10)
    (one,) = direct_writes([rows(64, units, units, stride=65)], NUMBERS, NUMBERS, FabricLimits())
    assert one.lengths.tolist() == [64] * 10


def test_boxes_that_touch_in_other_regions_stay_apart():
    shape = table((1, 1, 8), (1, 1, 8))
    side = table((0, 0, 0, 1, 0, 0, 0), (0, 8, 0, 1, 0, 0, 0))
    other = table((2, 0, 0, 1, 0, 0, 0), (3, 8, 0, 1, 0, 0, 0))
    one = np.zeros(1, dtype=np.int64)
    made = list(direct_writes([Transfer(Boxes(shape, side, other), one, one)], NUMBERS, NUMBERS, FabricLimits()))
    assert [(each.local_region, each.remote_region, each.lengths.tolist()) for each in made] == [
        (5, 3, [8]),
        (5, 9, [8]),
    ]


def test_long_writes_are_cut_to_the_limits():
    made = list(direct_writes([rows(100, [0], [0])], NUMBERS, NUMBERS, FabricLimits(writes=2, write_bytes=30)))
    assert [each.lengths.tolist() for each in made] == [[30, 30], [30, 10]]
    assert np.concatenate([each.remote_offsets for each in made]).tolist() == [0, 30, 60, 90]


def test_a_million_pieces_are_computed_a_part_at_a_time():
    order = np.random.default_rng(2).permutation(1 << 20)
    made = list(direct_writes([rows(2, order, order[::-1])], NUMBERS, NUMBERS, FabricLimits()))
    assert len(made) == (1 << 20) // direct.PIECES
    assert sum(one.nbytes for one in made) == 2 << 20


def test_empty_regions_have_no_number():
    assert numbers_of(np.array([10, 0, 5, 0, 0, 1])).tolist() == [1, -1, 2, -1, -1, 3]
    assert numbers_of(np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("source", "destination", "runs"),
    [([0, 1, 2, 3], [5, 6, 7, 8], 1), ([0, 1, 5, 6], [0, 1, 2, 3], 2), ([3, 2, 1, 0], [3, 2, 1, 0], 4), ([4], [4], 1)],
)
def test_runs_are_counted_as_rows_follow_each_other(source, destination, runs):
    assert count_runs(rows(64, source, destination)) == runs
    assert count_runs(rows(64, source, destination, stride=65)) == len(source)
