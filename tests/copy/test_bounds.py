"""The bounds check against exact arithmetic, also for numbers that only an attacker sends."""

import numpy as np
import pytest
from copy_oracle import transfers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import copy
from kvbaton.copy import bounds, check_bounds, fallback
from kvbaton.errors import RowsError

HUGE = 2**63 - 1
NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from([HUGE, -HUGE - 1, 2**62, 2**32, 2**31 - 1, 2**59, 2**60 + 1]))


def inside(shape, table, units, lengths):
    """Exact, in Python's integers, over the corners of each box; None for tables that break the form."""
    for counts, side in zip(shape, table, strict=True):
        if min(counts) < 1 or min(side) < 0 or side[3] < 1 or side[0] >= len(lengths) or min(units) < 0:
            return False
        region, offset, row_stride, units_per_row, unit_stride, stride0, stride1 = side
        reach = (counts[0] - 1) * stride0 + (counts[1] - 1) * stride1 + counts[2]
        for unit in units:
            start = offset + (unit // units_per_row) * row_stride + (unit % units_per_row) * unit_stride
            if start + reach > lengths[region]:
                return False
    return True


@settings(deadline=None, max_examples=300)
@given(
    counts=st.lists(NUMBERS, min_size=3, max_size=3),
    side=st.lists(NUMBERS, min_size=7, max_size=7),
    units=st.lists(NUMBERS, min_size=1, max_size=3),
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=2),
)
def test_nothing_outside_is_ever_accepted(counts, side, units, lengths):
    arrays = (np.array([counts]), np.array([side]), np.array(units), np.array(lengths))
    try:
        nbytes = check_bounds("destination", *(array.astype(np.int64) for array in arrays))
    except RowsError:
        return
    assert inside([counts], [side], units, lengths)
    assert nbytes == counts[0] * counts[1] * counts[2] * len(units)


@settings(deadline=None, max_examples=300)
@given(
    counts=st.lists(NUMBERS, min_size=3, max_size=3),
    side=st.lists(NUMBERS, min_size=7, max_size=7),
    units=st.lists(NUMBERS, min_size=1, max_size=3),
    lengths=st.lists(st.one_of(st.integers(0, 5000), st.just(HUGE)), min_size=1, max_size=2),
)
def test_the_quick_check_accepts_nothing_outside(kernel, counts, side, units, lengths):
    arrays = (np.array([counts]), np.array([side]), np.array(units), np.array(lengths))
    nbytes = kernel.check(*(array.astype(np.int64) for array in arrays))
    assert nbytes == -1 or inside([counts], [side], units, lengths)
    assert nbytes in (-1, counts[0] * counts[1] * counts[2] * len(units))


@settings(deadline=None)
@given(case=transfers())
def test_both_checks_say_the_same_of_good_tables(case):
    transfer, source_lengths, _ = case
    tables = (transfer.boxes.shape, transfer.boxes.source, transfer.source_units, np.array(source_lengths))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounds, "kernel", fallback)
        assert check_bounds("source", *tables) == transfer.nbytes
    if copy.NATIVE:
        assert copy.kernel.check(*tables) == transfer.nbytes


@pytest.mark.parametrize("wrong", ["dtype", "columns", "order", "length", "list"])
def test_the_quick_check_leaves_strange_tables_to_the_other_one(kernel, wrong):
    shape, side, units, lengths = np.ones((2, 3), int), np.ones((2, 7), int), np.zeros(1, int), np.array([99, 99])
    broken = {
        "dtype": (shape.astype(np.int32), side, units, lengths),
        "columns": (shape, side[:, :6].copy(), units, lengths),
        "order": (shape, np.asfortranarray(side), units, lengths),
        "length": (shape, side[:1], units, lengths),
        "list": (shape, side, [0], lengths),
    }
    assert kernel.check(*broken[wrong]) == -1


@settings(deadline=None)
@given(case=transfers())
def test_what_is_inside_is_accepted_and_the_last_byte_counts(case):
    transfer, source_lengths, _ = case
    shape, side, units = transfer.boxes.shape, transfer.boxes.source, transfer.source_units
    assert check_bounds("source", shape, side, units, np.array(source_lengths)) == transfer.nbytes
    # The region of box 0 shrinks to one byte less than the furthest piece reaches, whatever the padding was.
    reach = [
        (counts[0] - 1) * row[5]
        + (counts[1] - 1) * row[6]
        + counts[2]
        + row[1]
        + (u // row[3]) * row[2]
        + (u % row[3]) * row[4]
        for counts, row in zip(shape.tolist(), side.tolist(), strict=True)
        for u in units.tolist()
        if row[0] == side[0, 0]
    ]
    short = np.array(source_lengths)
    short[side[0, 0]] = max(reach) - 1
    with pytest.raises(RowsError, match=f"source: .* region {side[0, 0]}, which has {max(reach) - 1} bytes"):
        check_bounds("source", shape, side, units, short)


def test_many_boxes_cannot_overflow_the_count_of_bytes():
    count = 40
    shape = np.tile(np.array([[2**58, 1, 1]], dtype=np.int64), (count, 1))
    table = np.tile(np.array([[0, 0, 0, 1, 0, 0, 0]], dtype=np.int64), (count, 1))
    with pytest.raises(RowsError, match="more bytes than can be counted"):
        check_bounds("destination", shape, table, np.zeros(3, dtype=np.int64), np.array([1]))


@pytest.mark.parametrize(
    ("shape", "table", "units", "message"),
    [
        (
            np.ones((1, 2), np.int64),
            np.ones((1, 7), np.int64),
            np.zeros(1, np.int64),
            r"shape table must be int64 \[n, 3\]",
        ),
        (np.ones((1, 3), np.int32), np.ones((1, 7), np.int64), np.zeros(1, np.int64), "int32"),
        (np.ones((2, 3), np.int64), np.ones((1, 7), np.int64), np.zeros(1, np.int64), "1 boxes but 2 shapes"),
        (np.ones((1, 3), np.int64), np.ones((1, 7), np.int64), np.zeros(1, np.float64), "units must be int64"),
    ],
)
def test_tables_of_another_form_are_refused(shape, table, units, message):
    with pytest.raises(RowsError, match=message):
        check_bounds("source", shape, table, units, np.array([100]))


def test_nothing_to_move_is_zero_bytes():
    none = np.zeros(0, dtype=np.int64)
    row = np.array([[0, 0, 1, 1, 0, 0, 0]])
    assert check_bounds("source", np.array([[1, 1, 1]]), row, none, np.array([10])) == 0
    assert (
        check_bounds("source", np.zeros((0, 3), np.int64), np.zeros((0, 7), np.int64), np.zeros(3, np.int64), none) == 0
    )
