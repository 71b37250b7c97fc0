"""What only another process can show: its memory, its death in the middle of writes, and its standing still."""

import contextlib
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from peer_process import (
    ROW,
    content,
    destination,
    eventually,
    go_on,
    receive,
    stand_still,
    started,
    writer,
)
from shared_fabric import OPTIONS, end

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric import slabs
from kvbaton.transport.fabric.link import DRAINING, LEAVING, LETTING_GO, Link

MIB = 1 << 20


@pytest.fixture(params=["packed", "direct"])
def executor(request):
    return request.param


@pytest.fixture
def transport(executor):
    made = end(executor, "here")
    yield made
    made.close()


def shared(nbytes, value=CANARY):
    memory = SharedMemory(nbytes)
    memory.array[:] = value
    return memory


def test_content_arrives_in_another_process(executor, transport):
    memory = shared(2 * MIB)
    memory.array[:] = np.random.default_rng(1).integers(0, CANARY, 2 * MIB, dtype=np.uint8)
    transport.register([Region.of(memory)])
    order = np.random.default_rng(2).permutation(512)
    with started(destination, partial(end, executor), 4 * MIB) as (_, connection):
        peer = transport.connect(receive(connection))
        transport.write(peer, [rows(4096, order, order[::-1], stride=8192)], 1)
        ended = []
        assert eventually(lambda: ended.extend(transport.poll()) or ended)
        assert [tuple(completion) for completion in ended] == [(1, "")]
        # The content is taken at the time the ticket has ended: visibility, not luck.
        found = content(connection).reshape(512, 8192)
    np.testing.assert_array_equal(found[order[::-1], :4096], memory.array.reshape(512, 4096)[order])
    assert (found[:, 4096:] == CANARY).all()


def test_killed_destination_ends_every_ticket(executor, transport):
    transport.register([Region.of(shared(4 * MIB, 1))])
    with started(destination, partial(end, executor), 4 * MIB) as (process, connection):
        descriptor = receive(connection)
        peer = transport.connect(descriptor)
        everything = np.arange(4 * MIB // ROW)
        for ticket in range(300):
            transport.write(peer, [rows(ROW, everything, everything)], ticket)
        ended = {}

        def collect():
            ended.update(dict(transport.poll()))
            return ended

        assert eventually(collect)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: len(collect()) == 300)
        assert any(ended.values()), "the peer was killed with tickets outstanding, but all of them succeeded"
        assert not peer.alive
        with pytest.raises(TransportUnavailable):
            transport.connect(descriptor)
        with pytest.raises(TransportError, match="connect again"):
            transport.write(peer, [rows(ROW, [0], [0])], 1000)
        transport.disconnect(peer)


def test_killed_writer_can_be_fenced_and_its_slabs_come_back(executor, transport):
    memory = shared(4 * MIB)
    transport.register([Region.of(memory)])
    with started(writer, partial(end, executor), 4 * MIB, transport.describe()) as (process, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.array[-1] not in (CANARY, 0)), "nothing was written"
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: transport.fence("writer"))
        seen = memory.array.copy()
        time.sleep(0.1)
        np.testing.assert_array_equal(memory.array, seen)
        assert transport.fence("writer") is True
        # The process was seen to be dead: its slabs are free when what it had sent must have landed.
        assert eventually(lambda: transport._receiver.free_slabs == int(OPTIONS["slabs"]))


def test_a_death_is_no_proof_before_what_was_sent_has_landed(monkeypatch):
    monkeypatch.setattr(slabs, "LINGER_SECONDS", 3600.0)
    transport = end("direct", "here")
    memory = shared(4 * MIB)
    transport.register([Region.of(memory)])
    with started(writer, partial(end, "direct"), 4 * MIB, transport.describe()) as (process, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.array[-1] != CANARY)
        process.kill()
        process.join()
        assert transport.fence("writer") is False
        assert transport.fence("writer") is False
        monkeypatch.setattr(slabs, "LINGER_SECONDS", 0.0)
        assert transport.fence("writer") is True
    transport.close()


def test_living_writer_is_fenced(executor, transport):
    memory = shared(4 * MIB)
    transport.register([Region.of(memory)])
    with started(writer, partial(end, executor), 4 * MIB, transport.describe()) as (_, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.array[-1] != CANARY)
        assert eventually(lambda: transport.fence("writer"))
        seen = memory.array.copy()
        assert receive(connection), "the fenced writer's ticket ended without an error"
        np.testing.assert_array_equal(memory.array, seen)
        assert eventually(lambda: transport._receiver.free_slabs == int(OPTIONS["slabs"]))


def test_a_writer_that_stands_still_is_fenced_where_it_only_packs(executor, transport):
    memory = shared(4 * MIB)
    transport.register([Region.of(memory)])
    with started(writer, partial(end, executor), 4 * MIB, transport.describe()) as (process, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.array[-1] != CANARY)
        stand_still(process)
        fenced = [transport.fence("writer") for _ in range(3)]
        seen = memory.array.copy()
        go_on(process)
        if executor == "packed":
            assert fenced == [True] * 3
            assert receive(connection)
            np.testing.assert_array_equal(memory.array, seen)
        else:
            # Its library may write on when it wakes up; then it says that it does not.
            assert fenced == [False] * 3
            assert eventually(lambda: transport.fence("writer"))


def test_a_destination_that_stands_still_does_not_hold_up_a_disconnect(executor, transport):
    transport.register([Region.of(shared(4 * MIB, 1))])
    with started(destination, partial(end, executor), 4 * MIB) as (process, connection):
        peer = transport.connect(receive(connection))
        stand_still(process)
        everything = np.arange(4 * MIB // ROW)
        for ticket in range(4):
            transport.write(peer, [rows(ROW, everything, everything)], ticket)
        transport.disconnect(peer)
        ended = dict(transport.poll())
        assert sorted(ended) == [0, 1, 2, 3]
        go_on(process)


def test_a_close_lets_go_of_peers_that_stand_still_all_at_a_time(monkeypatch):
    entered = []
    enter = Link._enter

    def noting(self, state):
        entered.append((state, self.instance))
        enter(self, state)

    monkeypatch.setattr(Link, "_enter", noting)
    transport = end("packed", "here")
    transport.register([Region.of(shared(4 * MIB, 1))])
    everything = np.arange(4 * MIB // ROW)
    names = {f"destination-{number}" for number in range(3)}
    with contextlib.ExitStack() as stack:
        processes = []
        for place, name in enumerate(sorted(names)):
            process, connection = stack.enter_context(started(destination, partial(end, "packed"), 4 * MIB, name=name))
            peer = transport.connect(receive(connection))
            stand_still(process)
            processes.append(process)
            for ticket in range(4):
                transport.write(peer, [rows(ROW, everything, everything)], 4 * place + ticket)
        transport.close()
        ended = dict(transport.poll())
        for process in processes:
            go_on(process)
    assert sorted(ended) == list(range(12))
    assert all("the transport was closed" in error for error in ended.values())
    assert [{name for state, name in entered if state == one} for one in (DRAINING, LETTING_GO, LEAVING)] == [names] * 3
    assert [state for state, _ in entered[:3]] == [DRAINING] * 3, "one peer was waited for before the next was asked"
