"""Chunks of transfers: every byte once, few boxes, and no more chunks than the bytes ask for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport.chunks import chunks, split_boxes

sizes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5000)), min_size=1, max_size=20)


def transfer(shape, units):
    """A transfer whose boxes are told apart by their offset."""
    side = np.zeros((len(shape), 7), dtype=np.int64)
    side[:, 1], side[:, 3] = np.arange(len(shape)), 1
    return Transfer(Boxes(np.array(shape, dtype=np.int64), side, side.copy()), np.arange(units), np.arange(units))


@given(shape=sizes, units=st.integers(1, 6), nbytes=st.integers(1, 20_000))
def test_parts_have_each_box_once_and_all_units(shape, units, nbytes):
    whole = transfer(shape, units)
    parts = list(split_boxes(whole, nbytes))
    for column in range(3):
        np.testing.assert_array_equal(np.concatenate([part.boxes[column] for part in parts]), whole.boxes[column])
    assert all(len(part.source_units) == len(part.destination_units) == units for part in parts)
    assert len(parts) <= whole.nbytes // nbytes + 1


@given(shape=sizes, units=st.integers(1, 6), nbytes=st.integers(1000, 20_000), count=st.integers(0, 3))
def test_chunks_have_each_byte_once(shape, units, nbytes, count):
    transfers = [transfer(shape, units) for _ in range(count)]
    found = list(chunks(transfers, nbytes))
    assert all(0 < end - begin <= nbytes for _, begin, end in found)
    assert sum(end - begin for _, begin, end in found) == sum(one.nbytes for one in transfers)
    reached = {}
    for part, begin, end in found:
        assert begin == reached.get(id(part), 0), "a hole, or bytes that are given twice"
        reached[id(part)] = end
        assert end <= part.nbytes


def test_equal_tensors_are_chunks_of_their_own():
    whole = transfer([(1, 1, 1000)] * 4, 10)
    assert [(len(part.boxes.shape), begin, end) for part, begin, end in chunks([whole], 10_000)] == [(1, 0, 10_000)] * 4


def test_small_boxes_stay_together():
    whole = transfer([(1, 1, 10)] * 500, 1)
    assert len(list(chunks([whole], 1 << 20))) == 1
