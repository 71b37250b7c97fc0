"""Transfers for tests, and what they mean, piece by piece, straight from the formula in `kvbaton.plan.boxes`."""

import numpy as np
from hypothesis import strategies as st

from kvbaton.plan.boxes import Boxes, Transfer


def address(side, unit, i0, i1):
    region, offset, row_stride, units_per_row, unit_stride, stride0, stride1 = (int(value) for value in side)
    place = offset + (unit // units_per_row) * row_stride + (unit % units_per_row) * unit_stride
    return region, place + i0 * stride0 + i1 * stride1


def pieces(shape, side, units):
    """(region, start, length) of each piece, in the order of the packed stream."""
    return [
        (*address(row, int(unit), i0, i1), int(run))
        for unit in units
        for (count0, count1, run), row in zip(shape.tolist(), side, strict=True)
        for i0 in range(count0)
        for i1 in range(count1)
    ]


def packed(shape, side, units, regions):
    return b"".join(regions[region][start : start + run].tobytes() for region, start, run in pieces(shape, side, units))


def unpack(stream, begin, shape, side, units, regions):
    """Put the stream's bytes from `begin` on where they belong."""
    at = 0
    for region, start, run in pieces(shape, side, units):
        for inside in range(run):
            if begin <= at + inside < begin + len(stream):
                regions[region][start + inside] = stream[at + inside - begin]
        at += run


def bases(regions):
    return np.array([region.ctypes.data for region in regions], dtype=np.int64)


@st.composite
def sides(draw, shape, units):
    """A side whose pieces do not overlap, and the lengths of its two regions."""
    lengths = [16, 16]
    table = []
    for count0, count1, run in shape:
        region = draw(st.integers(0, 1))
        stride1 = run + draw(st.sampled_from([0, 0, 1, 5]))
        stride0 = count1 * stride1 + draw(st.sampled_from([0, 0, 3]))
        unit_stride = count0 * stride0 + draw(st.sampled_from([0, 7]))
        units_per_row = draw(st.integers(1, 3))
        row_stride = units_per_row * unit_stride + draw(st.sampled_from([0, 11]))
        offset = lengths[region] + draw(st.integers(0, 4))
        table.append((region, offset, row_stride, units_per_row, unit_stride, stride0, stride1))
        lengths[region] = offset + (max(units) // units_per_row + 1) * row_stride
    return np.array(table, dtype=np.int64), lengths


@st.composite
def transfers(draw):
    """A small transfer and the lengths of the regions of both sides."""
    runs = st.sampled_from([1, 2, 3, 4, 8, 16, 17, 32, 64])
    shape = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), runs), min_size=1, max_size=3))
    count = draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 6), min_size=count, max_size=count, unique=True)
    source_units, destination_units = draw(numbers), draw(numbers)
    source, source_lengths = draw(sides(shape, source_units))
    destination, destination_lengths = draw(sides(shape, destination_units))
    boxes = Boxes(np.array(shape, dtype=np.int64), source, destination)
    units = np.array(source_units, dtype=np.int64), np.array(destination_units, dtype=np.int64)
    return Transfer(boxes, *units), source_lengths, destination_lengths
