"""The mori fabric on the library itself: on AMD hardware, or in a bed without it (`make test-mori`)."""

import importlib.util
import os
import signal
import socket
import time
from functools import partial

import numpy as np
import peer_process
import pytest
from fabric_ends import let_go
from mori_process import engine, take_away, taken_port, transport
from owner_process import Owner
from peer_process import LIMIT, eventually, go_on, receive, stand_still, started

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric.base import Writes
from kvbaton.transport.fabric.mori.adapter import MoriFabric

if importlib.util.find_spec("mori") is None:
    pytest.skip("amd-mori is not installed here: see `make test-mori`", allow_module_level=True)

MIB = 1 << 20
OPTIONS = {
    "one queue pair": {},
    "four queue pairs, four threads": {"qp_per_transfer": "4", "num_worker_threads": "4"},
    "two queue pairs, events": {"qp_per_transfer": "2", "poll_cq_mode": "event"},
}


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


@pytest.fixture
def writer(options):
    """A fabric with 32 MiB of random bytes in region 0."""
    fabric = MoriFabric("writer", options)
    fabric.source = np.random.default_rng(1).integers(0, CANARY, 32 * MIB, dtype=np.uint8)
    fabric.register([Region.of(fabric.source)])
    yield fabric
    fabric.close()


def scattered(count, nbytes, total, seed=2):
    """Writes of so many bytes, each in a row of its own on either side, in random order."""
    random = np.random.default_rng(seed)
    row = total // count
    return Writes(0, 0, random.permutation(count) * row, random.permutation(count) * row, np.full(count, nbytes))


def applied(writes, source, nbytes):
    target = np.full(nbytes, CANARY, dtype=np.uint8)
    for local, remote, length in zip(writes.local_offsets, writes.remote_offsets, writes.lengths, strict=True):
        target[remote : remote + length] = source[local : local + length]
    return target


def cut(writes, most):
    """Writes in lists of at most ``most``."""
    for begin in range(0, len(writes.lengths), most):
        yield writes._replace(
            local_offsets=writes.local_offsets[begin : begin + most],
            remote_offsets=writes.remote_offsets[begin : begin + most],
            lengths=writes.lengths[begin : begin + most],
        )


def end(fabric, handles):
    """Wait until ``handles`` handles ended: their errors."""
    ended = {}
    limit = time.monotonic() + LIMIT
    while len(ended) < handles:
        fabric.wait(1e-3)
        for handle, error in fabric.poll():
            assert handle not in ended
            ended[handle] = error
        assert time.monotonic() < limit, f"{len(ended)} of {handles} handles ended"
    return ended


@pytest.mark.parametrize("executor", ["packed", "direct", "auto"])
@pytest.mark.parametrize("check", Conformance.names())
def test_promise_is_kept_by_the_library(check, executor):
    suite = Conformance(partial(transport, executor, {"qp_per_transfer": "2"}), timeout=60)
    try:
        suite.run(check)
    except NotApplicable as missing:
        pytest.skip(f"mori, {executor}: {missing}")


def test_scattered_writes_land_in_another_process(writer, options):
    with Owner(partial(engine, options), 4 * MIB) as owner:
        peer = writer.connect(owner.descriptor, "owner")
        writes = scattered(4096, 500, 4 * MIB)
        posts = list(cut(writes, writer.limits.writes))
        assert len(posts) <= writer.limits.posts
        for handle, some in enumerate(posts):
            writer.post(peer, some, handle)
        assert set(end(writer, len(posts)).values()) == {""}
        np.testing.assert_array_equal(owner.content(), applied(writes, writer.source, 4 * MIB))
        assert peer.alive
        assert let_go(writer, peer)


def test_as_much_as_the_limits_allow_never_fills_a_queue(writer, options):
    with Owner(partial(engine, options), 32 * MIB) as owner:
        peer = writer.connect(owner.descriptor, "owner")
        limits = writer.limits
        for turn in range(3):
            for handle in range(limits.posts):
                writer.post(peer, scattered(limits.writes, 64, 32 * MIB, seed=handle), turn * limits.posts + handle)
            assert set(end(writer, limits.posts).values()) == {""}


def test_a_peer_killed_in_the_middle_of_writes_fails_them(writer, options):
    with Owner(partial(engine, options), 32 * MIB) as owner:
        peer = writer.connect(owner.descriptor, "owner")
        everything = np.array([0]), np.array([0]), np.array([32 * MIB])
        for handle in range(writer.limits.posts):
            writer.post(peer, Writes(0, 0, *everything), handle)
        os.kill(owner.process.pid, signal.SIGKILL)
        ended = end(writer, writer.limits.posts)
        assert any(ended.values()), "the peer was killed with writes under way, but all of them succeeded"
        assert all("owner" in error for error in ended.values() if error)
        assert not peer.alive
        with pytest.raises(TransportError, match="owner"):
            writer.post(peer, Writes(0, 0, *everything), 1000)
        with pytest.raises(TransportUnavailable):
            writer.connect(owner.descriptor, "owner")
        assert let_go(writer, peer)
    # Another life of it is another peer.
    with Owner(partial(engine, options), 4 * MIB) as owner:
        peer = writer.connect(owner.descriptor, "owner")
        writes = scattered(100, 500, 4 * MIB)
        writer.post(peer, writes, 2000)
        assert end(writer, 1) == {2000: ""}
        np.testing.assert_array_equal(owner.content(), applied(writes, writer.source, 4 * MIB))


def test_a_process_that_comes_again_at_its_port_is_another_peer(writer, options):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = {**options, "port": str(port)}
    with Owner(partial(engine, there), MIB) as owner:
        old = owner.descriptor
        peer = writer.connect(old, "owner")
        writes = scattered(100, 500, MIB)
        writer.post(peer, writes, 1)
        assert end(writer, 1) == {1: ""}
    with Owner(partial(engine, there), MIB) as owner:
        with pytest.raises(TransportUnavailable):
            writer.connect(old, "owner")
        assert (owner.content() == CANARY).all()
        again = writer.connect(owner.descriptor, "owner")
        writer.post(again, writes, 2)
        assert end(writer, 1) == {2: ""}
        np.testing.assert_array_equal(owner.content(), applied(writes, writer.source, MIB))


def test_memory_that_the_peer_gave_up_fails_the_write_and_the_peer_can_be_connected_to_again(writer, options):
    with Owner(partial(engine, options), MIB) as owner:
        peer = writer.connect(owner.descriptor, "owner")
        owner.ask(take_away, 0)
        writer.post(peer, scattered(100, 500, MIB), 1)
        assert end(writer, 1)[1]
        assert not peer.alive
        assert (owner.content() == CANARY).all()
        # Its memory is gone for good, and said to be.
        with pytest.raises(TransportUnavailable):
            writer.connect(owner.descriptor, "owner")


def test_a_broken_connection_to_a_living_peer_is_made_anew(writer, options):
    with Owner(partial(engine, options), MIB) as owner:
        first = writer.connect(owner.descriptor, "owner")
        # A key that the peer does not know: its NIC refuses, and the queue pairs are dead.
        session = first.route.session(1, 1)
        own = writer._engine
        own.engine.deregister_memory(own.memories[1])
        status = session.write(0, 0, 64, 0)
        assert int(status.WaitFor(int(LIMIT * 1000))) > 10
        own.memories[1] = own.engine.register_memory(
            writer.source.ctypes.data, writer.source.nbytes, -1, own.io.MemoryLocationType.CPU
        )
        second = writer.connect(owner.descriptor, "owner")
        assert second.route is not first.route
        writes = scattered(100, 500, MIB)
        writer.post(second, writes, 1)
        assert end(writer, 1) == {1: ""}
        np.testing.assert_array_equal(owner.content(), applied(writes, writer.source, MIB))
        assert not first.alive


def test_regions_at_one_address_and_empty_regions():
    writer, destination = MoriFabric("writer"), MoriFabric("destination")
    source, target = np.arange(100, dtype=np.uint8), np.full(MIB, CANARY, dtype=np.uint8)
    writer.register([Region.of(source), Region.of(np.zeros(0, np.uint8))])
    destination.register([Region.of(target[:100]), Region.of(target), Region.of(target[50:])])
    peer = writer.connect(destination.describe(), "destination")
    for handle, (region, offset) in enumerate(((0, 0), (1, 1000), (2, 5000))):
        writer.post(peer, Writes(0, region, np.array([0]), np.array([offset]), np.array([100])), handle)
    assert end(writer, 3) == {0: "", 1: "", 2: ""}
    expected = np.full(MIB, CANARY, dtype=np.uint8)
    for at in (0, 1000, 5050):
        expected[at : at + 100] = source
    np.testing.assert_array_equal(target, expected)
    writer.close()
    destination.close()


def test_every_pair_of_regions_can_be_written_to_while_the_peer_is_stopped():
    writer = MoriFabric("writer")
    sources = [np.full(64, number, np.uint8) for number in range(20)]
    writer.register([Region.of(source) for source in sources])
    with Owner(partial(engine, {}), MIB) as owner:
        peer = writer.connect(owner.descriptor, "owner")
        stand_still(owner.process)
        for number in range(20):
            writer.post(peer, Writes(number, 0, np.array([0]), np.array([64 * number]), np.array([64])), number)
        # A NIC needs no process; where the library's stand-in does, they end when it goes on.
        go_on(owner.process)
        assert set(end(writer, 20).values()) == {""}
        np.testing.assert_array_equal(owner.content()[:1280], np.repeat(np.arange(20, dtype=np.uint8), 64))
    writer.close()


def test_a_port_that_is_taken_ends_nobody():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started(taken_port, taken.getsockname()[1]) as (_, connection),
    ):
        assert receive(connection).startswith("AddressError")


def test_engines_that_come_and_go_leave_no_threads_and_files():
    counts = []
    for _ in range(3):
        writer, destination = MoriFabric("writer"), MoriFabric("destination")
        memory = [np.zeros(4096, np.uint8) for _ in range(2)]
        for fabric, array in zip((writer, destination), memory, strict=True):
            fabric.register([Region.of(array)])
        peer = writer.connect(destination.describe(), "destination")
        writer.post(peer, Writes(0, 0, np.array([0]), np.array([0]), np.array([10])), 1)
        assert end(writer, 1) == {1: ""}
        writer.close()
        destination.close()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    assert counts[2] == counts[1]


@pytest.mark.parametrize("executor", ["packed", "direct"])
def test_killed_destination_ends_every_ticket(executor):
    here = transport(executor, {"qp_per_transfer": "2"}, "here")
    here.register([Region.of(np.ones(32 * MIB, dtype=np.uint8))])
    make = partial(transport, executor, {"qp_per_transfer": "2"})
    with started(peer_process.destination, make, 32 * MIB) as (process, connection):
        descriptor = receive(connection)
        peer = here.connect(descriptor)
        everything = np.arange(32)
        for ticket in range(200):
            here.write(peer, [rows(MIB, everything, everything)], ticket)
        ended = {}

        def collect():
            ended.update(dict(here.poll()))
            return ended

        assert eventually(collect)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: len(collect()) == 200)
        assert any(ended.values()), "the peer was killed with tickets outstanding, but all of them succeeded"
        with pytest.raises(TransportUnavailable):
            here.connect(descriptor)
        here.disconnect(peer)
    here.close()


@pytest.mark.parametrize("executor", ["packed", "direct"])
def test_killed_writer_can_be_fenced(executor):
    here = transport(executor, {"qp_per_transfer": "2"}, "here")
    memory = np.full(8 * MIB, CANARY, dtype=np.uint8)
    here.register([Region.of(memory)])
    make = partial(transport, executor, {"qp_per_transfer": "2"})
    with started(peer_process.writer, make, 8 * MIB, here.describe()) as (process, connection):
        here.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory[-1] not in (CANARY, 0)), "nothing was written"
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: here.fence("writer"))
        seen = memory.copy()
        time.sleep(0.1)
        np.testing.assert_array_equal(memory, seen)
        assert here.fence("writer") is True
    here.close()
