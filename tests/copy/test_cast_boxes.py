"""Boxes whose elements change on their way: any strides, scales and byte ranges, by both kernels, with canaries."""

import copy_oracle as oracle
import number_reference as reference
import numpy as np
import pytest
from cast_oracle import CANARY, NO_SCALE, cast_transfers, memory, packed
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import copy
from kvbaton.copy import check_bounds, check_source
from kvbaton.errors import RowsError
from kvbaton.plan.boxes import CONVERT, MOVE, QUANTISE, SCALE, Boxes, Cast, Transfer


@settings(deadline=None, max_examples=150)
@given(case=cast_transfers(), cut=st.floats(0, 1), length=st.floats(0, 1), seed=st.integers(0, 1000))
def test_copy_casts_exactly_the_range(kernel, case, cut, length, seed):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    begin = int(cut * transfer.nbytes)
    end = begin + int(length * (transfer.nbytes - begin))
    sources, found, expected = memory(source_lengths, seed), memory(destination_lengths), memory(destination_lengths)
    before = [region.copy() for region in sources]
    stream = packed(transfer, sources)
    assert len(stream) == transfer.nbytes
    oracle.unpack(stream[begin:end], begin, boxes.shape, boxes.destination, destination_units, expected)
    tables = (boxes.shape, boxes.source, boxes.destination, source_units, destination_units)
    kernel.copy(*tables, oracle.bases(sources), oracle.bases(found), begin, end, 1, boxes.cast)
    for region, wanted in zip((*found, *sources), (*expected, *before), strict=True):
        np.testing.assert_array_equal(region, wanted)


@settings(deadline=None, max_examples=100)
@given(case=cast_transfers(), slab=st.one_of(st.just(1), st.integers(3, 100)), seed=st.integers(0, 1000))
def test_slabs_are_packed_cast_and_unpacked_by_who_knows_nothing_of_it(kernel, case, slab, seed):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    sources, found, expected = memory(source_lengths, seed), memory(destination_lengths), memory(destination_lengths)
    stream = packed(transfer, sources)
    oracle.unpack(stream, 0, boxes.shape, boxes.destination, destination_units, expected)
    for begin in range(0, transfer.nbytes, slab):
        size = min(slab, transfer.nbytes - begin)
        out = bytearray([CANARY]) * (size + 2)
        view = memoryview(out)[1:-1]
        kernel.gather(boxes.shape, boxes.source, source_units, oracle.bases(sources), view, begin, 1, boxes.cast)
        assert bytes(out) == bytes([CANARY]) + stream[begin : begin + size] + bytes([CANARY])
        kernel.scatter(boxes.shape, boxes.destination, destination_units, oracle.bases(found), bytes(view), begin, 1)
    for region, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(region, wanted)


@settings(deadline=None, max_examples=100)
@given(case=cast_transfers())
def test_what_is_read_is_checked_in_the_source_s_own_bytes(case):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    check_source(boxes, source_units, np.array(source_lengths))
    found = check_bounds(
        "destination", boxes.shape, boxes.destination, destination_units, np.array(destination_lengths)
    )
    assert found == transfer.nbytes
    sides = [(boxes.source, boxes.source_shape[:, 2])]
    scaled = boxes.cast.scale[:, 0] >= 0
    if scaled.any():
        sides.append((boxes.cast.scale, np.full(len(scaled), 4)))
    for side, runs in sides:
        box = int(np.argmax(side[:, 0] >= 0))
        ends = [
            oracle.address(row, unit, *(boxes.shape[number, :2] - 1))[1] + int(runs[number])
            for number, row in enumerate(side)
            if row[0] == side[box, 0]
            for unit in source_units.tolist()
        ]
        short = np.array(source_lengths)
        short[side[box, 0]] = max(ends) - 1
        with pytest.raises(RowsError, match=rf"source: .* of region {side[box, 0]}, which has {max(ends) - 1} bytes"):
            check_source(boxes, source_units, short)


@pytest.mark.parametrize("threads", [1, 3, 1000])
def test_threads_share_the_work(kernel, threads):
    rows, elements = 300, 1001
    values = np.random.default_rng(3).normal(size=(rows, elements)).astype(np.float32)
    sources, found = [values.view(np.uint8).reshape(-1)], memory([rows * (2 * elements + 3)])
    order = np.random.default_rng(4).permutation(rows)
    source = np.array([[0, 0, 4 * elements, 1, 0, 0, 0]])
    destination = np.array([[0, 0, 2 * elements + 3, 1, 0, 0, 0]])
    cast = Cast(np.array([[CONVERT, 1, 2, elements]]), np.ones(1, np.float32), np.array([NO_SCALE]))
    tables = np.array([[1, 1, 2 * elements]]), source, destination, order, np.arange(rows)
    kernel.copy(*tables, oracle.bases(sources), oracle.bases(found), 0, rows * 2 * elements, threads, cast)
    expected = np.full((rows, 2 * elements + 3), CANARY, np.uint8)
    expected[:, :-3] = reference.stored("bfloat16", values[order].reshape(-1)).reshape(rows, -1)
    np.testing.assert_array_equal(found[0].reshape(rows, -1), expected)


def quantised(kernel, values):
    """The scale and the elements that a block of float32 becomes, and what they stand for."""
    count = len(values)
    sources, found = [np.array(values, np.float32).view(np.uint8)], memory([4 + count])
    side = np.array([[0, 0, 0, 1, 0, 0, 0]] * 2)
    to = side.copy()
    to[1, 1] = 4
    cast = Cast(
        np.array([[SCALE, 1, 4, count], [QUANTISE, 1, 4, count]]), np.ones(2, np.float32), np.array([NO_SCALE] * 2)
    )
    unit, tables = np.zeros(1, np.int64), np.array([[1, 1, 4], [1, 1, count]])
    kernel.copy(tables, side, to, unit, unit, oracle.bases(sources), oracle.bases(found), 0, 4 + count, 1, cast)
    scale = found[0][:4].copy().view(np.float32)[0]
    return scale, found[0][4:], reference.values("float8_e4m3fn", found[0][None, 4:])[0] * np.float64(scale)


def test_a_block_of_zeros_has_scale_one(kernel):
    scale, stored, _ = quantised(kernel, [0.0, -0.0, 0.0])
    assert scale == 1.0
    assert stored.tolist() == [0, 0x80, 0]


def test_the_largest_value_of_a_block_is_kept(kernel):
    scale, stored, values = quantised(kernel, [-896.0, 2.0, 0.0])
    assert scale == 2.0
    assert stored[0] == 0xFE
    assert values.tolist() == [-896.0, 2.0, 0.0]


def test_what_is_not_finite_leaves_the_scale_alone(kernel):
    scale, stored, values = quantised(kernel, [np.inf, 448.0, np.nan, -np.inf, -1.0])
    assert scale == 1.0
    assert stored[[0, 2, 3]].tolist() == [0x7F] * 3
    assert values[[1, 4]].tolist() == [448.0, -1.0]
    scale, stored, _ = quantised(kernel, [np.nan, np.inf])
    assert (scale, stored.tolist()) == (1.0, [0x7F, 0x7F])


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    power=st.integers(-120, 0),
)
def test_the_bound_of_a_quantised_block_holds(kernel, values, power):
    """As docs/layouts.md states it: 2**-4 of the value or 2**-10 of the scale, and 2**-22 of the value."""
    values = (np.array(values, np.float32) * np.float32(2.0**power)).astype(np.float32)
    scale, _, found = quantised(kernel, values)
    exact = values.astype(np.float64)
    bound = np.maximum(np.abs(exact) * 2.0**-4, np.float64(scale) * 2.0**-10) + np.abs(exact) * 2.0**-22
    assert (np.abs(found - exact) <= bound).all()


def good():
    return {
        "how": np.array([[CONVERT, 1, 2, 4]]),
        "factor": np.ones(1, np.float32),
        "scale": np.array([NO_SCALE]),
    }


WRONG = {
    "an operation that is none": {"how": np.array([[4, 1, 2, 4]])},
    "a negative operation": {"how": np.array([[-1, 1, 2, 4]])},
    "a dtype that is none": {"how": np.array([[CONVERT, 5, 2, 4]])},
    "bytes that are converted": {"how": np.array([[CONVERT, 0, 2, 4]])},
    "bytes to convert to": {"how": np.array([[CONVERT, 1, 0, 8]])},
    "a move of elements": {"how": np.array([[MOVE, 1, 1, 8]])},
    "elements that do not fit the run": {"how": np.array([[CONVERT, 1, 2, 5]])},
    "elements whose bytes overflow": {"how": np.array([[SCALE, 1, 2, 2**62]])},
    "no elements": {"how": np.array([[CONVERT, 1, 2, 0]])},
    "a scale of another length": {"how": np.array([[SCALE, 1, 2, 4]])},
    "int32": {"how": np.array([[CONVERT, 1, 2, 4]], np.int32)},
    "two boxes": {"how": np.array([[CONVERT, 1, 2, 4]] * 2)},
    "a float64 factor": {"factor": np.ones(1)},
    "two factors": {"factor": np.ones(2, np.float32)},
    "an infinite factor": {"factor": np.array([np.inf], np.float32)},
    "a scale in no region": {"scale": np.array([[7, 0, 0, 1, 0, 0, 0]])},
    "a scale in region -2": {"scale": np.array([[-2, 0, 0, 1, 0, 0, 0]])},
    "a scale at a negative offset": {"scale": np.array([[0, -4, 0, 1, 0, 0, 0]])},
    "a scale with too few columns": {"scale": np.array([[0, 0, 0, 1]])},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_cast_that_does_not_hold_together_moves_nothing(kernel, wrong):
    source, found = memory([16], 5), memory([8])
    cast = Cast(**(good() | WRONG[wrong]))
    side, unit = np.array([[0, 0, 8, 1, 0, 0, 0]]), np.zeros(1, np.int64)
    tables = (np.array([[1, 1, 8]]), side, side, unit, unit, oracle.bases(source), oracle.bases(found), 0, 8, 1)
    with pytest.raises((ValueError, TypeError)):
        kernel.copy(*tables, cast)
    with pytest.raises((ValueError, TypeError)):
        kernel.gather(tables[0], side, unit, oracle.bases(source), found[0], 0, 1, cast)
    assert (found[0] == CANARY).all()
    with pytest.raises(RowsError):
        check_source(Boxes(tables[0], side, side, cast), unit, np.array([16]))
    kernel.copy(*tables, Cast(**good()))
    assert not (found[0] == CANARY).all()


def test_a_cast_that_is_no_tuple_of_tables_is_refused(kernel):
    source, found = memory([16], 5), memory([8])
    side, unit = np.array([[0, 0, 8, 1, 0, 0, 0]]), np.zeros(1, np.int64)
    for cast in (3, (), (good()["how"], good()["factor"])):
        with pytest.raises(TypeError):
            kernel.gather(np.array([[1, 1, 8]]), side, unit, oracle.bases(source), found[0], 0, 1, cast)


def test_the_public_functions_pass_the_cast_on():
    source, found, out = memory([16], 6), memory([8]), memory([8])
    side, unit = np.array([[0, 0, 8, 1, 0, 0, 0]]), np.zeros(1, np.int64)
    transfer = Transfer(Boxes(np.array([[1, 1, 8]]), side, side, Cast(**good())), unit, unit)
    copy.copy_boxes(transfer, oracle.bases(source), oracle.bases(found))
    copy.gather(transfer.boxes.shape, side, unit, oracle.bases(source), out[0], cast=transfer.boxes.cast)
    assert found[0].tobytes() == out[0].tobytes() == packed(transfer, source)
