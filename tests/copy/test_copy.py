"""The kernel and its fallback against the formula, byte by byte."""

import os
import subprocess
import sys

import copy_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import copy
from kvbaton.plan.boxes import Boxes, Transfer

CANARY = 0xEE


def memory(lengths, seed=None):
    if seed is None:
        return [np.full(length, CANARY, dtype=np.uint8) for length in lengths]
    random = np.random.default_rng(seed)
    return [random.integers(0, CANARY, length, dtype=np.uint8) for length in lengths]


def test_the_native_kernel_was_built():
    if os.environ.get("KVBATON_COPY") == "numpy":
        pytest.skip("KVBATON_COPY=numpy asks for the fallback")
    assert copy.NATIVE, "build it with: python setup.py build_ext --inplace"


@settings(deadline=None, max_examples=60)
@given(case=oracle.transfers(), cut=st.floats(0, 1), length=st.floats(0, 1))
def test_copy_moves_exactly_the_range(kernel, case, cut, length):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    begin = int(cut * transfer.nbytes)
    end = begin + int(length * (transfer.nbytes - begin))
    sources, found, expected = memory(source_lengths, 1), memory(destination_lengths), memory(destination_lengths)
    stream = oracle.packed(boxes.shape, boxes.source, source_units, sources)[begin:end]
    oracle.unpack(stream, begin, boxes.shape, boxes.destination, destination_units, expected)
    tables = (boxes.shape, boxes.source, boxes.destination, source_units, destination_units)
    kernel.copy(*tables, oracle.bases(sources), oracle.bases(found), begin, end, 1)
    for region, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(region, wanted)


@settings(deadline=None, max_examples=60)
@given(case=oracle.transfers(), slab=st.one_of(st.just(1), st.integers(20, 300)))
def test_gather_then_scatter_in_slabs(kernel, case, slab):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    sources, found, expected = memory(source_lengths, 2), memory(destination_lengths), memory(destination_lengths)
    stream = oracle.packed(boxes.shape, boxes.source, source_units, sources)
    oracle.unpack(stream, 0, boxes.shape, boxes.destination, destination_units, expected)
    for begin in range(0, transfer.nbytes, slab):
        size = min(slab, transfer.nbytes - begin)
        out = bytearray([CANARY]) * (size + 2)
        view = memoryview(out)[1:-1]
        kernel.gather(boxes.shape, boxes.source, source_units, oracle.bases(sources), view, begin, 1)
        assert bytes(out) == bytes([CANARY]) + stream[begin : begin + size] + bytes([CANARY])
        kernel.scatter(boxes.shape, boxes.destination, destination_units, oracle.bases(found), bytes(view), begin, 1)
    for region, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(region, wanted)


@pytest.mark.parametrize("threads", [1, 2, 3, 1000])
@pytest.mark.parametrize("rows_bytes", [(4096, 512), (3 << 20, 1)])
def test_threads_share_the_work(kernel, threads, rows_bytes):
    nbytes, count = rows_bytes
    source, found = memory([nbytes * count], 3)[0], memory([nbytes * count])[0]
    order = np.random.default_rng(4).permutation(count)
    side = np.array([[0, 0, nbytes, 1, 0, 0, 0]], dtype=np.int64)
    boxes = (np.array([[1, 1, nbytes]], dtype=np.int64), side, side, order, np.arange(count))
    kernel.copy(*boxes, oracle.bases([source]), oracle.bases([found]), 0, nbytes * count, threads)
    np.testing.assert_array_equal(found.reshape(count, nbytes), source.reshape(count, nbytes)[order])


def good():
    side = np.array([[0, 0, 8, 1, 0, 0, 0]], dtype=np.int64)
    one = np.zeros(1, dtype=np.int64)
    return {
        "shape": np.array([[1, 1, 8]], dtype=np.int64),
        "source": side,
        "destination": side.copy(),
        "source_units": one,
        "destination_units": one.copy(),
        "source_bases": None,
        "destination_bases": None,
        "begin": 0,
        "end": 8,
        "threads": 1,
    }


def with_column(column, value):
    side = good()["source"]
    side[0, column] = value
    return side


WRONG = {
    "int32 shape": {"shape": np.ones((1, 3), dtype=np.int32)},
    "float units": {"source_units": np.zeros(1)},
    "four columns": {"shape": np.ones((1, 4), dtype=np.int64)},
    "one dimension": {"source": np.zeros(7, dtype=np.int64)},
    "two dimensions of units": {"source_units": np.zeros((1, 1), dtype=np.int64)},
    "another number of boxes": {"destination": np.ones((2, 7), dtype=np.int64)},
    "another number of units": {"destination_units": np.zeros(2, dtype=np.int64)},
    "a zero count": {"shape": np.array([[0, 1, 8]], dtype=np.int64)},
    "a negative run": {"shape": np.array([[1, 1, -8]], dtype=np.int64)},
    "a count that overflows": {"shape": np.array([[2**62, 2**62, 8]], dtype=np.int64), "end": 8},
    "a region that is not there": {"source": with_column(0, 1)},
    "a negative region": {"destination": with_column(0, -1)},
    "a negative offset": {"source": with_column(1, -8)},
    "no units per row": {"source": with_column(3, 0)},
    "a negative stride": {"destination": with_column(6, -1)},
    "a negative unit": {"source_units": np.array([-1], dtype=np.int64)},
    "an end past the stream": {"end": 9},
    "a negative begin": {"begin": -1},
    "an end before the begin": {"begin": 5, "end": 4},
    "a list": {"source_units": [0]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_raises_and_moves_nothing(kernel, wrong):
    source, found = memory([8], 5), memory([8])
    arguments = good() | {"source_bases": oracle.bases(source), "destination_bases": oracle.bases(found)} | WRONG[wrong]
    with pytest.raises((ValueError, TypeError, AttributeError)):
        kernel.copy(*arguments.values())
    assert (found[0] == CANARY).all()


def test_a_buffer_longer_than_the_stream_is_refused(kernel):
    case, region = good(), memory([8])
    tables = (case["shape"], case["source"], case["source_units"], oracle.bases(region))
    for function in (kernel.gather, kernel.scatter):
        with pytest.raises(ValueError, match="stream of 8 bytes"):
            function(*tables, bytearray(9), 0, 1)
    with pytest.raises(BufferError):
        kernel.gather(*tables, bytes(8), 0, 1)
    assert (region[0] == CANARY).all()


def test_the_public_functions_fill_in_the_range():
    case, source, found = good(), memory([8], 6), memory([8])
    transfer = Transfer(
        Boxes(case["shape"], case["source"], case["destination"]), case["source_units"], case["source_units"]
    )
    copy.copy_boxes(transfer, oracle.bases(source), oracle.bases(found))
    np.testing.assert_array_equal(found[0], source[0])
    out = bytearray(3)
    copy.gather(case["shape"], case["source"], case["source_units"], oracle.bases(source), out, begin=5)
    assert bytes(out) == source[0][5:].tobytes()
    copy.scatter(case["shape"], case["source"], case["source_units"], oracle.bases(found), b"\x01\x02", begin=6)
    assert found[0].tolist() == [*source[0][:6].tolist(), 1, 2]


def test_the_fallback_serves_on_request_and_warns_once():
    script = (
        "import warnings, numpy as np; from kvbaton import copy\n"
        "from kvbaton.plan.boxes import Boxes, Transfer\n"
        "assert not copy.NATIVE\n"
        "side = np.array([[0, 0, 8, 1, 0, 0, 0]]); unit = np.zeros(1, dtype=np.int64)\n"
        "transfer = Transfer(Boxes(np.array([[1, 1, 8]]), side, side), unit, unit)\n"
        "a, b = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): copy.copy_boxes(transfer, np.array([a.ctypes.data]), np.array([b.ctypes.data]))\n"
        "assert (a == b).all()\n"
        "print([warning.category.__name__ for warning in said])\n"
    )
    environment = os.environ | {"KVBATON_COPY": "numpy", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['SlowCopyWarning']", done.stderr
