"""Transfers whose elements change on their way, and what they give, piece by piece."""

import copy_oracle as oracle
import number_reference as reference
import numpy as np
from hypothesis import strategies as st

from kvbaton.plan.boxes import CONVERT, MOVE, QUANTISE, SCALE, Boxes, Cast, Transfer

CANARY = 0xEE
NO_SCALE = [-1, 0, 0, 1, 0, 0, 0]


def memory(lengths, seed=None):
    if seed is None:
        return [np.full(length, CANARY, np.uint8) for length in lengths]
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length, np.uint8) for length in lengths]


@st.composite
def cast_transfers(draw):
    """A small transfer of boxes that move, convert and quantise, and the lengths of the regions of both sides."""
    shapes, how, factors, scaled = [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        counts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        operation = draw(st.sampled_from([MOVE, CONVERT, CONVERT, QUANTISE, SCALE]))
        elements = draw(st.sampled_from([1, 2, 3, 7, 16, 33, 64]))
        source, destination = (draw(st.sampled_from(reference.DTYPES)) for _ in range(2))
        size = {MOVE: 1, SCALE: 0}.get(operation, reference.ITEMSIZE[destination])
        shapes.append((*counts, elements * size or 4))
        dtypes = (0, 0) if operation == MOVE else (reference.NUMBER[source], reference.NUMBER[destination])
        how.append((operation, *dtypes, elements))
        factors.append(draw(st.sampled_from([1.0, 0.25, 3.0, 1e-3])))
        scaled.append(operation != MOVE and draw(st.booleans()))
    count = draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 5), min_size=count, max_size=count, unique=True)
    source_units, destination_units = draw(numbers), draw(numbers)
    cast = Cast(np.array(how, np.int64), np.array(factors, np.float32), np.array([NO_SCALE] * len(how), np.int64))
    boxes = Boxes(np.array(shapes, np.int64), cast.scale, cast.scale, cast)
    read = [(*row[:2], int(run)) for row, run in zip(shapes, boxes.source_shape[:, 2], strict=True)]
    source, source_lengths = draw(oracle.sides(read, source_units))
    scales, scale_lengths = draw(oracle.sides([(*row[:2], 4) for row in shapes], source_units))
    destination, destination_lengths = draw(oracle.sides(shapes, destination_units))
    scales[:, 0] += len(source_lengths)
    scales[~np.array(scaled)] = NO_SCALE
    boxes = boxes._replace(source=source, destination=destination, cast=cast._replace(scale=scales))
    units = np.array(source_units, np.int64), np.array(destination_units, np.int64)
    return Transfer(boxes, *units), [*source_lengths, *scale_lengths], destination_lengths


def packed(transfer, regions):
    """The packed stream, piece by piece."""
    boxes, units, _ = transfer
    cast, stream = boxes.cast, []
    for unit in units.tolist():
        for box, (count0, count1, run) in enumerate(boxes.shape.tolist()):
            operation, *numbers, elements = cast.how[box].tolist()
            source, destination = (reference.DTYPES[number - 1] for number in numbers)
            for i0, i1 in np.ndindex(count0, count1):
                region, start = oracle.address(boxes.source[box], unit, i0, i1)
                if operation == MOVE:
                    stream.append(regions[region][start : start + run])
                    continue
                stored = regions[region][start : start + elements * reference.ITEMSIZE[source]]
                with np.errstate(all="ignore"):
                    values = reference.values(source, stored[None])[0].astype(np.float32)
                    times = cast.factor[box]
                    if cast.scale[box, 0] >= 0:
                        region, start = oracle.address(cast.scale[box], unit, i0, i1)
                        times = regions[region][start : start + 4].copy().view(np.float32)[0] * times
                    values = values * times
                    scale = reference.scale(destination, values)
                    if operation == SCALE:
                        stream.append(np.array([scale]).view(np.uint8))
                        continue
                    values = values / scale if operation == QUANTISE else values
                    stream.append(reference.stored(destination, values))
    return b"".join(piece.tobytes() for piece in stream)
