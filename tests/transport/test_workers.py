"""What copies for mapped transports: threads of the native kernel, and those of Python behind the same interface."""

import os
import select
import threading
from functools import partial

import numpy as np
import pytest
from peer_process import destination, eventually, named, started

from kvbaton.errors import TransportError
from kvbaton.memory import Region, SharedMemory
from kvbaton.runtime.wake import Wake
from kvbaton.transport import mapped
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.native_workers import AVAILABLE, NativeWorkers
from kvbaton.transport.python_workers import PythonWorkers
from kvbaton.transport.shm import ShmTransport
from kvbaton.transport.workers import AT_ONCE

MIB = 1 << 20
KINDS = {"python": PythonWorkers}
if AVAILABLE:
    KINDS["native"] = NativeWorkers


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    monkeypatch.setattr(mapped, "AVAILABLE", request.param == "native")
    return KINDS[request.param]


@pytest.fixture
def writer(kind):
    writer = ShmTransport("writer")
    assert isinstance(writer._workers, kind)
    writer.source = np.random.default_rng(1).integers(0, CANARY, 32 * MIB, dtype=np.uint8)
    writer.register([Region.of(writer.source)])
    yield writer
    writer.close()


@pytest.fixture
def target():
    target = ShmTransport("target")
    target.memory = SharedMemory(32 * MIB)
    target.memory.array[:] = CANARY
    target.register([Region.of(target.memory)])
    yield target
    target.close()
    target.memory.close()


def collect(transport, count):
    ended = []
    assert eventually(lambda: ended.extend(transport.poll()) or len(ended) >= count)
    return ended


@pytest.mark.parametrize("check", Conformance.names())
def test_promises_are_kept_where_the_kernel_is_missing(monkeypatch, check):
    monkeypatch.setattr(mapped, "AVAILABLE", False)
    try:
        Conformance(lambda instance: ShmTransport(instance)).run(check)
    except NotApplicable as missing:
        pytest.skip(f"shm without the native kernel: {missing}")


def test_arrays_may_be_used_again_when_write_returns(writer, target):
    peer = writer.connect(target.describe())
    order = np.random.default_rng(2).permutation(32 * MIB // 4096)
    parts = np.array_split(order, 40)
    units = np.empty(len(parts[0]), dtype=np.int64)
    for ticket, part in enumerate(parts):
        units[:] = -1
        units[: len(part)] = part
        writer.write(peer, [rows(4096, units[: len(part)], units[: len(part)])], ticket)
    units[:] = 0
    assert sorted(collect(writer, 40)) == [(ticket, "") for ticket in range(40)]
    np.testing.assert_array_equal(target.memory.array, writer.source)


def test_units_of_any_strides_are_taken(writer, target):
    peer = writer.connect(target.describe())
    count = 8 * MIB // 4096
    unaligned = np.frombuffer(b"x" + np.arange(count)[::-1].tobytes(), dtype=np.uint8)[1:].view(np.int64)
    writer.write(peer, [rows(4096, np.arange(count)[::-1], unaligned)], 1)
    assert collect(writer, 1) == [(1, "")]
    np.testing.assert_array_equal(target.memory.array[: 8 * MIB], writer.source[: 8 * MIB])
    assert (target.memory.array[8 * MIB :] == CANARY).all()


@pytest.mark.parametrize("nbytes", [1, AT_ONCE, AT_ONCE + 1, 16 * MIB])
def test_a_waker_with_a_descriptor_is_woken(writer, target, nbytes):
    peer = writer.connect(target.describe())
    wake = Wake()
    writer.set_waker(wake)
    for ticket in range(3):
        writer.write(peer, [rows(nbytes, [0], [0])], ticket)
        assert select.select([wake.descriptor], [], [], 30)[0]
        wake.clear()
        assert collect(writer, 1) == [(ticket, "")]
    writer.close()
    wake.close()


def test_a_descriptor_that_is_closed_harms_nobody(writer, target):
    """The control plane may end before the transport does, and its number may be another file's then."""
    peer = writer.connect(target.describe())
    wake = Wake()
    writer.set_waker(wake)
    number = wake.descriptor
    wake.close()
    here, there = os.pipe()
    assert number in (here, there)
    writer.write(peer, [rows(16 * MIB, [0], [0])], 1)
    assert collect(writer, 1) == [(1, "")]
    assert not select.select([here], [], [], 0)[0]
    os.close(here)
    os.close(there)


@pytest.mark.parametrize("nbytes", [64, 8 * MIB])
def test_a_waker_of_any_kind_is_called_and_may_be_replaced(writer, target, nbytes):
    peer = writer.connect(target.describe())
    for ticket in range(3):
        woken = threading.Event()
        writer.set_waker(woken.set)
        writer.write(peer, [rows(nbytes, [0], [0])], ticket)
        assert woken.wait(30)
        assert collect(writer, 1) == [(ticket, "")]


def test_a_ticket_that_is_outstanding_is_refused_and_one_that_was_refused_is_free(writer, target):
    peer = writer.connect(target.describe())
    everything = [rows(MIB, np.arange(32), np.arange(32))]
    for ticket in range(10):
        writer.write(peer, everything, ticket)
    with pytest.raises(TransportError, match="ticket 9 is outstanding"):
        writer.write(peer, everything, 9)
    other = writer.connect(target.describe())
    writer.disconnect(other)
    with pytest.raises(TransportError, match="disconnected"):
        writer.write(other, everything, 10)
    writer.write(peer, everything, 10)
    assert sorted(collect(writer, 11)) == [(ticket, "") for ticket in range(11)]


def test_a_disconnected_peer_takes_nothing_of_others_with_it(writer, target):
    peer, other = (writer.connect(target.describe()) for _ in range(2))
    for ticket in range(40):
        writer.write((peer, other)[ticket % 2], [rows(MIB, np.arange(16), np.arange(16) + ticket % 2 * 16)], ticket)
    writer.disconnect(peer)
    target.memory.array[: 16 * MIB] = CANARY
    ended = dict(collect(writer, 40))
    assert {ended[ticket] for ticket in range(1, 40, 2)} == {""}
    assert "disconnected" in ended[38]
    np.testing.assert_array_equal(target.memory.array[16 * MIB :], writer.source[: 16 * MIB])
    assert (target.memory.array[: 16 * MIB] == CANARY).all()


@pytest.mark.parametrize("pidfd", [True, False])
def test_the_death_of_a_peer_ends_its_tickets(writer, pidfd, monkeypatch):
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    with started(destination, partial(named, "shm"), 32 * MIB) as (process, connection):
        assert connection.poll(30)
        peer = writer.connect(connection.recv())
        everything = [rows(MIB, np.arange(32), np.arange(32))]
        for ticket in range(100):
            writer.write(peer, everything, ticket)
        assert collect(writer, 1)
        process.kill()
        process.join()
        for ticket, nbytes in ((200, 64), (201, 32 * MIB)):
            writer.write(peer, [rows(nbytes, [0], [0])], ticket)
        ended = {}
        assert eventually(lambda: ended.update(dict(writer.poll())) or {200, 201} <= ended.keys())
        assert "has ended" in ended[200]
        assert "has ended" in ended[201]
        writer.disconnect(peer)
