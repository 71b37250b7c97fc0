"""What only another process can show: its memory, and its death in the middle of writes."""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from peer_process import ROW, content, destination, eventually, named, receive, resources, started, writer

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import create
from kvbaton.transport.conformance.case import CANARY, rows

TRANSPORTS = ["shm", "tcp"]
MIB = 1 << 20


@pytest.fixture(params=TRANSPORTS)
def name(request):
    return request.param


@pytest.fixture
def transport(name):
    transport = create(name, instance="here")
    yield transport
    transport.close()


def test_content_arrives_in_another_process(name, transport):
    source = np.random.default_rng(1).integers(0, CANARY, 4 * MIB, dtype=np.uint8)
    transport.register([Region.of(source)])
    order = np.random.default_rng(2).permutation(1024)
    with started(destination, partial(named, name), 8 * MIB) as (_, connection):
        peer = transport.connect(receive(connection))
        transport.write(peer, [rows(4096, order, order[::-1], stride=8192)], 1)
        ended = []
        assert eventually(lambda: ended.extend(transport.poll()) or ended)
        assert [tuple(completion) for completion in ended] == [(1, "")]
        # The content is taken at the time the ticket has ended: visibility, not luck.
        found = content(connection).reshape(1024, 8192)
    np.testing.assert_array_equal(found[order[::-1], :4096], source.reshape(1024, 4096)[order])
    assert (found[:, 4096:] == CANARY).all()


def test_killed_destination_ends_every_ticket(name, transport):
    source = np.ones(32 * MIB, dtype=np.uint8)
    transport.register([Region.of(source)])
    with started(destination, partial(named, name), 32 * MIB) as (process, connection):
        descriptor = receive(connection)
        peer = transport.connect(descriptor)
        everything = np.arange(32)
        for ticket in range(400):
            transport.write(peer, [rows(ROW, everything, everything)], ticket)
        ended = {}

        def collect():
            ended.update(dict(transport.poll()))
            return ended

        assert eventually(collect)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: len(collect()) == 400)
        assert any(ended.values()), "the peer was killed with tickets outstanding, but all of them succeeded"
        # It is not reaped yet: a zombie must count as gone.
        with pytest.raises(TransportUnavailable):
            transport.connect(descriptor)
        assert ends_with_an_error(transport, peer)
        transport.disconnect(peer)


def ends_with_an_error(transport, peer):
    """Whether a further write is refused, at once or by its ticket."""
    try:
        transport.write(peer, [rows(ROW, [0], [0])], 1000)
    except TransportError:
        return True
    ended = []
    return eventually(lambda: ended.extend(transport.poll()) or ended) and bool(ended[0].error)


def test_killed_writer_can_be_fenced(name, transport):
    memory = SharedMemory(8 * MIB)
    memory.array[:] = CANARY
    transport.register([Region.of(memory)])
    with started(writer, partial(named, name), 8 * MIB, transport.describe()) as (process, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.array[-1] not in (CANARY, 0)), "nothing was written"
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: transport.fence("writer"))
        seen = memory.array.copy()
        time.sleep(0.1)
        np.testing.assert_array_equal(memory.array, seen)
        assert transport.fence("writer") is True
    memory.close()


def test_living_writer_is_fenced_where_the_transport_can():
    transport = create("tcp", instance="here")
    memory = SharedMemory(8 * MIB)
    transport.register([Region.of(memory)])
    with started(writer, partial(named, "tcp"), 8 * MIB, transport.describe()) as (_, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.array[-1] != 0)
        assert transport.fence("writer") is True
        seen = memory.array.copy()
        assert receive(connection), "the fenced writer's ticket ended without an error"
        np.testing.assert_array_equal(memory.array, seen)
    transport.close()
    memory.close()


def test_living_writer_over_shared_memory_is_not_declared_fenced():
    transport = create("shm", instance="here")
    memory = SharedMemory(MIB)
    transport.register([Region.of(memory)])
    with started(writer, partial(named, "shm"), MIB, transport.describe()) as (process, connection):
        transport.admit(receive(connection))
        assert transport.fence("writer") is False
        process.kill()
        assert eventually(lambda: transport.fence("writer"))
    transport.close()
    memory.close()


def test_peers_that_come_and_die_leave_nothing(name, transport):
    transport.register([Region.of(np.zeros(ROW, dtype=np.uint8))])
    counts = []
    for _ in range(3):
        with started(destination, partial(named, name), ROW) as (process, connection):
            peer = transport.connect(receive(connection))
            transport.write(peer, [rows(ROW, [0], [0])], len(counts))
            assert eventually(transport.poll)
            process.kill()
            process.join()
            transport.disconnect(peer)
        counts.append(resources())
    assert counts[2] == counts[0]
