"""Rows sent to and received from a socket, by the kernel and its fallback, against the formula, byte by byte."""

import socket
import threading

import copy_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CANARY = 0xEE


def memory(lengths, seed=None):
    if seed is None:
        return [np.full(length, CANARY, dtype=np.uint8) for length in lengths]
    random = np.random.default_rng(seed)
    return [random.integers(0, CANARY, length, dtype=np.uint8) for length in lengths]


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


@settings(deadline=None, max_examples=60)
@given(case=oracle.transfers(), cut=st.floats(0, 1), length=st.floats(0, 1))
def test_a_range_is_sent_from_rows_and_received_into_rows(kernel, case, cut, length):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    begin = int(cut * transfer.nbytes)
    end = begin + int(length * (transfer.nbytes - begin))
    sources, found, expected = memory(source_lengths, 1), memory(destination_lengths), memory(destination_lengths)
    stream = oracle.packed(boxes.shape, boxes.source, source_units, sources)[begin:end]
    oracle.unpack(stream, begin, boxes.shape, boxes.destination, destination_units, expected)
    here, there = socket.socketpair()
    with here, there:
        sent = kernel.send(here.fileno(), boxes.shape, boxes.source, source_units, oracle.bases(sources), begin, end)
        assert sent == end - begin
        assert there.recv(len(stream) + 1, socket.MSG_PEEK) == stream if stream else True
        tables = (boxes.shape, boxes.destination, destination_units, oracle.bases(found))
        assert kernel.receive(there.fileno(), *tables, begin, end) == end - begin
    for region, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(region, wanted)


@pytest.mark.parametrize("run", [1, 700, 5000])
def test_more_than_a_socket_holds_and_more_runs_than_one_call_takes(kernel, pair, run):
    count = max(3000, (8 << 20) // run if run > 1 else 0)
    sources, found = memory([count * (run + 1)], 2), memory([count * (run + 1)])
    side = np.array([[0, 0, run + 1, 1, 0, 0, 0]], dtype=np.int64)
    shape = np.array([[1, 1, run]], dtype=np.int64)
    order = np.random.default_rng(3).permutation(count)
    arguments = (shape, side, order, oracle.bases(sources), 0, run * count)
    thread = threading.Thread(target=kernel.send, args=(pair[0].fileno(), *arguments))
    thread.start()
    tables = (shape, side, order, oracle.bases(found))
    assert kernel.receive(pair[1].fileno(), *tables, 0, run * count) == run * count
    thread.join()
    expected = memory([count * (run + 1)])[0].reshape(count, run + 1)
    expected[:, :run] = sources[0].reshape(count, run + 1)[:, :run]
    np.testing.assert_array_equal(found[0].reshape(count, run + 1), expected)


def one_row(nbytes):
    side = np.array([[0, 0, nbytes, 1, 0, 0, 0]], dtype=np.int64)
    return np.array([[1, 1, nbytes]], dtype=np.int64), side, np.zeros(1, dtype=np.int64)


def test_a_connection_that_ends_early_says_how_much_came(kernel, pair):
    found = memory([100])
    pair[0].sendall(b"\x01" * 60)
    pair[0].close()
    assert kernel.receive(pair[1].fileno(), *one_row(100), oracle.bases(found), 0, 100) == 60
    assert found[0].tolist() == [1] * 60 + [CANARY] * 40


def test_a_connection_that_is_broken_raises(kernel, pair):
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        kernel.send(pair[0].fileno(), *one_row(100), oracle.bases(memory([100], 1)), 0, 100)
    with pytest.raises(OSError, match="descriptor"):
        kernel.send(999_999, *one_row(100), oracle.bases(memory([100], 1)), 0, 100)


@pytest.mark.parametrize(("begin", "end"), [(-1, 10), (0, 101), (11, 10)])
def test_a_range_outside_the_stream_moves_nothing(kernel, pair, begin, end):
    found = memory([100])
    pair[1].setblocking(False)
    with pytest.raises(ValueError, match="bytes"):
        kernel.send(pair[0].fileno(), *one_row(100), oracle.bases(found), begin, end)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)
    with pytest.raises(ValueError, match="bytes"):
        kernel.receive(pair[1].fileno(), *one_row(100), oracle.bases(found), begin, end)
    assert (found[0] == CANARY).all()
