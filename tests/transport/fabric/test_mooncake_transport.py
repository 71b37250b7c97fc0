"""The transport over Mooncake's engine, with the other side in a process of its own: its memory, and its death."""

import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from mooncake_process import MISSING, transport
from peer_process import ROW, content, destination, eventually, receive, started, writer

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY, rows

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MIB = 1 << 20


@pytest.fixture(params=["packed", "direct"])
def executor(request):
    return request.param


@pytest.fixture
def here(executor):
    here = transport(executor, "here")
    yield here
    here.close()


def ended(here, count):
    """The completions of that many tickets, by ticket."""
    found = {}
    assert eventually(lambda: found.update(dict(here.poll())) or len(found) == count)
    return found


def test_a_hundred_thousand_small_pieces_in_one_write(here, executor):
    source = np.random.default_rng(1).integers(0, CANARY, 100_000 * 256, dtype=np.uint8)
    here.register([Region.of(source)])
    order = np.random.default_rng(2).permutation(100_000)
    with started(destination, partial(transport, executor), 100_000 * 512) as (_, connection):
        peer = here.connect(receive(connection))
        here.write(peer, [rows(256, order, order[::-1], stride=512)], 1)
        assert ended(here, 1) == {1: ""}
        found = content(connection).reshape(-1, 512)
    np.testing.assert_array_equal(found[order[::-1], :256], source.reshape(-1, 256)[order])
    assert (found[:, 256:] == CANARY).all()


def test_killed_destination_ends_every_ticket_and_a_new_one_is_reached(here, executor):
    source = np.ones(32 * MIB, np.uint8)
    here.register([Region.of(source)])
    everything = np.arange(32)
    with started(destination, partial(transport, executor), 32 * MIB) as (process, connection):
        descriptor = receive(connection)
        peer = here.connect(descriptor)
        for ticket in range(100):
            here.write(peer, [rows(ROW, everything, everything)], ticket)
        found = {}
        assert eventually(lambda: found.update(dict(here.poll())) or found)
        process.kill()
        assert eventually(lambda: found.update(dict(here.poll())) or len(found) == 100)
        assert any(found.values()), "the peer was killed with tickets outstanding, but all of them succeeded"
        with pytest.raises(TransportUnavailable):
            here.connect(descriptor)
        assert eventually(lambda: not peer.alive)
        with pytest.raises(TransportError):
            here.write(peer, [rows(ROW, [0], [0])], 1000)
        here.disconnect(peer)
    with started(destination, partial(transport, executor), 32 * MIB) as (_, connection):
        here.write(here.connect(receive(connection)), [rows(ROW, [3], [4])], 2000)
        assert ended(here, 1) == {2000: ""}
        assert (content(connection)[4 * ROW : 5 * ROW] == 1).all()


def test_killed_writer_can_be_fenced(here, executor):
    memory = np.full(8 * MIB, CANARY, np.uint8)
    here.register([Region.of(memory)])
    with started(writer, partial(transport, executor), 8 * MIB, here.describe()) as (process, connection):
        here.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory[-1] not in (CANARY, 0)), "nothing was written"
        process.kill()
        assert eventually(lambda: here.fence("writer"))
        seen = memory.copy()
        time.sleep(0.1)
        np.testing.assert_array_equal(memory, seen)
        assert here.fence("writer") is True


def test_living_writer_is_fenced(here, executor):
    memory = np.full(8 * MIB, CANARY, np.uint8)
    here.register([Region.of(memory)])
    with started(writer, partial(transport, executor), 8 * MIB, here.describe()) as (_, connection):
        here.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory[-1] not in (CANARY, 0)), "nothing was written"
        assert eventually(lambda: here.fence("writer"))
        seen = memory.copy()
        assert receive(connection), "the fenced writer's ticket ended without an error"
        np.testing.assert_array_equal(memory, seen)


def test_peers_that_come_and_die_leave_no_more_than_their_lanes(here, executor):
    here.register([Region.of(np.zeros(ROW, np.uint8))])
    threads, descriptors = set(), []
    for ticket in range(4):
        with started(destination, partial(transport, executor), ROW) as (process, connection):
            peer = here.connect(receive(connection))
            here.write(peer, [rows(ROW, [0], [0])], ticket)
            assert ended(here, 1) == {ticket: ""}
            process.kill()
            process.join()
            here.disconnect(peer)
        assert eventually(lambda: not threads or threading.active_count() in threads)
        threads.add(threading.active_count())
        descriptors.append(len(os.listdir("/proc/self/fd")))
    # The library keeps its connections to an address, at most four, whether somebody lives there or not.
    assert descriptors[3] - descriptors[0] <= 3 * 4
