"""The kernel's pool of threads: what it copies, and that each job ends once, whatever happens to its peer."""

import gc
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import copy_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import copy
from kvbaton.plan.boxes import CONVERT, QUANTISE, SCALE, Boxes, Cast, Transfer

kernel = pytest.importorskip("kvbaton.copy._kernel", reason="the native kernel was not built")

CANARY = 0xEE
CHUNK, LEAST = 8 << 20, 1 << 20
LIMIT = 30.0
MIB = 1 << 20


@pytest.fixture
def pool():
    pool = kernel.Pool(2, "test-pool", CHUNK, LEAST)
    yield pool
    pool.close("the test is over")


def collect(pool, count):
    """The ends of ``count`` tickets, in the order of their ends."""
    ended, limit = [], time.monotonic() + LIMIT
    while len(ended) < count and time.monotonic() < limit:
        ended += pool.drain()
        time.sleep(0.0005)
    assert len(ended) == count
    return ended


def addresses(*arrays):
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)


def rows(nbytes, source, destination):
    """Contiguous rows of one region."""
    side = np.array([[0, 0, nbytes, 1, 0, 0, 0]], dtype=np.int64)
    units = (np.asarray(each, dtype=np.int64) for each in (source, destination))
    return Transfer(Boxes(np.array([[1, 1, nbytes]], dtype=np.int64), side, side.copy()), *units)


class Memory:
    """A random source, and a destination of canaries as large."""

    def __init__(self, pool, nbytes, descriptor=-1):
        self.source = np.random.default_rng(nbytes).integers(0, CANARY, nbytes, dtype=np.uint8)
        self.destination = np.full(nbytes, CANARY, dtype=np.uint8)
        self.bases = addresses(self.source)
        self.peer = pool.attach(addresses(self.destination), descriptor, "the peer is dead")


@given(oracle.transfers(), st.integers(1, 200), st.integers(0, 1))
@settings(deadline=None, max_examples=150)
def test_every_byte_is_copied_and_no_other(transfer_and_lengths, chunk, at_once):
    transfer, source_lengths, destination_lengths = transfer_and_lengths
    random = np.random.default_rng(1)
    sources = [random.integers(0, CANARY, length, dtype=np.uint8) for length in source_lengths]
    found = [np.full(length, CANARY, dtype=np.uint8) for length in destination_lengths]
    expected = [array.copy() for array in found]
    boxes, source_units, destination_units = transfer
    stream = np.frombuffer(oracle.packed(boxes.shape, boxes.source, source_units, sources), dtype=np.uint8)
    oracle.unpack(stream, 0, boxes.shape, boxes.destination, destination_units, expected)
    pool = kernel.Pool(3, "test-pool", chunk, 1 + chunk // 2)
    peer = pool.attach(addresses(*found), -1, "dead")
    ended = pool.submit(peer, 7, (transfer,), addresses(*sources), at_once * len(stream))
    assert ended == ("" if at_once else None)
    assert at_once or collect(pool, 1) == [(7, "")]
    pool.close("over")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("chunk", [1000, 70_000, MIB])
def test_casts_come_out_as_the_kernel_makes_them(chunk):
    count, elements = 300, 500
    random = np.random.default_rng(2)
    source = random.integers(-1000, 1000, (count, elements)).astype(np.float32)
    wide, none = 2 * elements, [[-1, 0, 0, 1, 0, 0, 0]] * 3
    how = np.array([(CONVERT, 1, 2, elements), (SCALE, 1, 4, elements), (QUANTISE, 1, 4, elements)], dtype=np.int64)
    stride = wide + 4 + elements + 3
    boxes = Boxes(
        np.array([(1, 1, wide), (1, 1, 4), (1, 1, elements)], dtype=np.int64),
        np.array([(0, 0, 4 * elements, 1, 0, 0, 0)] * 3, dtype=np.int64),
        np.array([(0, at, stride, 1, 0, 0, 0) for at in (0, wide, wide + 4)], dtype=np.int64),
        Cast(how, np.array([1, 2, 2], np.float32), np.array(none, dtype=np.int64)),
    )
    transfer = Transfer(boxes, random.permutation(count), random.permutation(count))
    found, expected = (np.full(count * stride, CANARY, dtype=np.uint8) for _ in range(2))
    copy.copy_boxes(transfer, addresses(source), addresses(expected))
    assert (expected != CANARY).any()
    pool = kernel.Pool(2, "test-pool", chunk, chunk)
    pool.submit(pool.attach(addresses(found), -1, "dead"), 1, (transfer,), addresses(source), 0)
    assert collect(pool, 1) == [(1, "")]
    pool.close("over")
    np.testing.assert_array_equal(found, expected)


def test_many_jobs_of_many_threads_end_once_each(pool):
    threads, jobs, row = 6, 100, 16 << 10
    memory = Memory(pool, threads * jobs * row)
    gate = threading.Barrier(threads)

    def submit(thread):
        gate.wait()
        for job in range(jobs):
            number = thread * jobs + job
            ended = pool.submit(memory.peer, number, (rows(row, [number], [number]),), memory.bases, number % 2 * row)
            assert ended == ("" if number % 2 else None)

    submitters = [threading.Thread(target=submit, args=(thread,)) for thread in range(threads)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    ended = collect(pool, threads * jobs // 2)
    assert sorted(ended) == [(number, "") for number in range(0, threads * jobs, 2)]
    time.sleep(0.01)
    assert pool.drain() == []
    np.testing.assert_array_equal(memory.destination, memory.source)


def test_arrays_are_not_read_after_submit(pool):
    """Jobs wait behind a large one; what described them is overwritten and given back meanwhile."""
    memory, row = Memory(pool, 16 * MIB), 16 << 10
    order = np.random.default_rng(3).permutation(memory.source.nbytes // row)
    for ticket, units in enumerate(np.array_split(order, 64)):
        transfer = rows(row, units.copy(), units.copy())
        bases = memory.bases.copy()
        assert pool.submit(memory.peer, ticket, [transfer], bases, 0) is None
        for table in (*transfer.boxes[:3], *transfer[1:], bases):
            table[...] = 1 << 40
        del transfer, bases
    assert sorted(collect(pool, 64)) == [(ticket, "") for ticket in range(64)]
    np.testing.assert_array_equal(memory.destination, memory.source)


@pytest.mark.parametrize("everything", [False, True], ids=["forget", "close"])
def test_after_the_end_nothing_lands_and_all_have_ended(pool, everything):
    memory = Memory(pool, 32 * MIB)
    other = Memory(pool, MIB)
    whole, jobs = rows(MIB, np.arange(32), np.arange(32)), 1000
    for ticket in range(jobs):
        pool.submit(memory.peer, ticket, [whole], memory.bases, 0)
    pool.submit(other.peer, jobs, [rows(MIB, [0], [0])], other.bases, 0)
    limit = time.monotonic() + LIMIT
    while (memory.destination == CANARY).all():
        assert time.monotonic() < limit
    if everything:
        pool.close("closed by the test")
    else:
        pool.forget(memory.peer, "forgotten by the test")
    memory.destination[:] = CANARY
    ended = dict(collect(pool, jobs + 1))
    assert "by the test" in ended[jobs - 1]
    assert everything or ended.pop(jobs) == ""
    assert all(error == "" or "by the test" in error for error in ended.values())
    time.sleep(0.02)
    assert (memory.destination == CANARY).all()
    for at_once in (0, MIB):
        with pytest.raises(ConnectionError):
            pool.submit(memory.peer, 99, [rows(MIB, [0], [0])], memory.bases, at_once)
    assert pool.drain() == []
    (pool.close if everything else lambda reason: pool.forget(memory.peer, reason))("again")


def test_forgetting_from_many_threads_waits_in_each(pool):
    memory = Memory(pool, 32 * MIB)
    for ticket in range(20):
        pool.submit(memory.peer, ticket, [rows(MIB, np.arange(32), np.arange(32))], memory.bases, 0)
    landed = []

    def forget():
        pool.forget(memory.peer, "forgotten")
        before = memory.destination.copy()
        time.sleep(0.02)
        landed.append((memory.destination != before).any())

    threads = [threading.Thread(target=forget) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert landed == [False] * 4
    collect(pool, 20)


def test_a_dead_peer_ends_what_is_queued_and_what_comes(pool):
    """Its death is a readable descriptor; here of a pipe, so that the moment is the test's."""
    alive, death = os.pipe()
    memory, other = Memory(pool, 32 * MIB, alive), Memory(pool, MIB)
    os.close(alive)  # the pool has its own
    whole, jobs = rows(MIB, np.arange(32), np.arange(32)), 50
    for ticket in range(jobs):
        pool.submit(memory.peer, ticket, [whole], memory.bases, 0)
    pool.submit(other.peer, jobs, [rows(MIB, [0], [0])], other.bases, 0)
    os.write(death, b"x")
    ended = dict(collect(pool, jobs + 1))
    os.close(death)
    assert ended[jobs - 1] == "the peer is dead"
    assert ended[jobs] == ""
    assert set(ended.values()) == {"", "the peer is dead"}
    assert pool.submit(memory.peer, 98, [rows(64, [0], [0])], memory.bases, 64) == "the peer is dead"
    pool.submit(memory.peer, 99, [rows(64, [0], [0])], memory.bases, 0)
    assert collect(pool, 1) == [(99, "the peer is dead")]
    np.testing.assert_array_equal(other.destination, other.source)


REFUSED = {
    "no tuple": (["nothing"], TypeError),
    "negative units": ([rows(64, [0], [-1])], ValueError),
    "units that differ in number": ([rows(64, [0, 1], [0])], ValueError),
    "a region that is none": ([rows(64, [0], [0])._replace(boxes=rows(64, [0], [0]).boxes._replace(
        destination=np.array([[1, 0, 64, 1, 0, 0, 0]], dtype=np.int64)))], ValueError),
    "units of another type": ([rows(64, [0], [0])._replace(source_units=np.zeros(1, dtype=np.int32))], TypeError),
    "more bytes than are counted": ([rows(1 << 62, [0, 1, 2], [0, 1, 2])], ValueError),
    "more bytes together than are counted": ([rows(1 << 62, [0], [0])] * 3, ValueError),
    "a good one and a bad one": ([rows(64, [0], [0]), rows(64, [0], [-1])], ValueError),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_hold_together_is_refused(pool, what):
    transfers, error = REFUSED[what]
    memory = Memory(pool, 4096)
    for at_once in (0, 1 << 20):
        with pytest.raises(error):
            pool.submit(memory.peer, 1, transfers, memory.bases, at_once)
    assert (memory.destination == CANARY).all()
    assert pool.submit(memory.peer, 1, [rows(64, [0], [0])], memory.bases, 64) == ""
    assert pool.drain() == []


@pytest.mark.parametrize(("workers", "chunk", "least"), [(0, 8, 8), (5000, 8, 8), (1, 4, 8), (1, 8, 0)])
def test_a_pool_that_makes_no_sense_is_refused(workers, chunk, least):
    with pytest.raises(ValueError, match="a pool needs"):
        kernel.Pool(workers, "test-pool", chunk, least)


def test_ends_make_a_descriptor_readable(pool):
    memory = Memory(pool, MIB)
    event = os.eventfd(0, os.EFD_NONBLOCK)
    readable = lambda seconds: bool(select.select([event], [], [], seconds)[0])  # noqa: E731
    pool.wake_by(event)
    assert not readable(0)
    for ticket in range(3):
        pool.submit(memory.peer, ticket, [rows(MIB, [0], [0])], memory.bases, 0)
        assert readable(LIMIT)
        os.eventfd_read(event)
        assert pool.drain() == [(ticket, "")]
    pool.submit(memory.peer, 3, [rows(MIB, [0], [0])], memory.bases, 0)
    assert readable(LIMIT)
    # Who comes late is told of what waits.
    other = os.eventfd(0, os.EFD_NONBLOCK)
    pool.wake_by(other)
    assert select.select([other], [], [], 0)[0]
    pool.wake_by(-1)
    os.close(event)
    os.close(other)
    assert collect(pool, 1) == [(3, "")]


def thread_names():
    return [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]


def test_threads_are_named_start_late_and_end():
    before = thread_names()
    pool = kernel.Pool(3, "a-name-of-many-letters", CHUNK, LEAST)
    memory = Memory(pool, MIB)
    pool.submit(memory.peer, 1, [rows(64, [0], [0])], memory.bases, 64)
    assert thread_names() == before
    pool.submit(memory.peer, 2, [rows(64, [0], [0])], memory.bases, 0)
    collect(pool, 1)
    assert sorted(set(thread_names()) - set(before)) == [f"a-name-of-ma-{number}" for number in range(3)]
    pool.close("over")
    assert sorted(thread_names()) == sorted(before)


def test_nothing_is_left_behind():
    """Neither descriptors nor memory: of jobs that ended, were refused, and never drained."""
    event = os.eventfd(0)

    def use():
        pool = kernel.Pool(2, "test-pool", CHUNK, LEAST)
        pool.wake_by(event)
        memory = Memory(pool, MIB, event)
        pool.submit(memory.peer, 0, [rows(64, [0], [0])], memory.bases, 64)
        units = np.arange(MIB // 64)
        for ticket in range(60):
            pool.submit(memory.peer, ticket, [rows(64, units, units)], memory.bases, 0)
            with pytest.raises(ValueError, match="negative"):
                pool.submit(memory.peer, ticket, [rows(64, units, -units)], memory.bases, 0)
        pool.forget(memory.peer, "over")
        # 60 jobs with tables of 256 KiB each.

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(3):
        use()
    descriptors, before = len(os.listdir("/proc/self/fd")), resident()
    for _ in range(30):
        use()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # What a leak of one table for each round would come to is 460 MiB.
    assert resident() - before < 64 * MIB
    os.close(event)


EXIT = """
import numpy as np
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import create
from kvbaton.transport.conformance.case import rows
transport = create("shm", instance="both")
memory = SharedMemory(256 << 20)
transport.register([Region.of(memory)])
peer = transport.connect(transport.describe())
half = np.arange(128)
for ticket in range(200):
    transport.write(peer, [rows(1 << 20, half, half + 128)], ticket)
"""


def test_a_process_that_ends_in_the_middle_of_copies_ends_well():
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
