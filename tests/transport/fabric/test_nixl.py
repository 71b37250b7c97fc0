"""NIXL's adapter against the library itself, over UCX on this machine: shared memory and TCP, two real processes."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import msgspec
import numpy as np
import pytest

pytest.importorskip("nixl_cu13", reason="NIXL is not installed: make setup-fabrics")

from fabric_ends import let_go
from nixl_process import SMALL, engine, leaving_writer, stuck_writer, take_away, transport
from owner_process import Owner, finish, pieces
from peer_process import destination, eventually, receive, started, writer

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric import descriptor
from kvbaton.transport.fabric.nixl.adapter import NixlFabric
from kvbaton.transport.fabric.nixl.descriptor import NixlDescriptor
from kvbaton.transport.fabric.scratch import TOKEN_BYTES
from kvbaton.transport.fabric.transport import FabricTransport

MIB = 1 << 20
SHM, TCP = "tcp,posix,sysv,cma", "tcp"
"""UCX needs TCP beside shared memory, to notice that a peer died; the bytes go through shared memory."""
LESS_USUAL = [pytest.param(tls, marks=pytest.mark.long) for tls in ("tcp,posix", "tcp,sysv", "tcp,cma")]


@pytest.fixture(params=[SHM, TCP, *LESS_USUAL])
def tls(request, monkeypatch):
    """What UCX may use, here and in processes that are started."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


@pytest.fixture
def here(tls):
    fabric = NixlFabric("here")
    yield fabric
    fabric.close()


def source(nbytes):
    return np.random.default_rng(1).integers(0, CANARY, nbytes, dtype=np.uint8)


def post_until_refused(fabric, peer, writes, handle):
    """Post the same again and again; the first handle that was refused."""
    while handle < 10_000:
        try:
            fabric.post(peer, writes, handle)
        except TransportError:
            return handle
        handle += 1
    pytest.fail("10,000 writes to a peer that is gone were taken")


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("way", ["packed", "direct", "auto"])
def test_promise_is_kept_over_nixl(tls, way, check):
    options = {"executor": way, **SMALL}
    suite = Conformance(lambda instance: FabricTransport(instance, NixlFabric(instance), options=options))
    try:
        suite.run(check)
    except NotApplicable as missing:
        pytest.skip(f"{way}: {missing}")


def test_a_hundred_thousand_pieces_in_one_write(here):
    size, count = 64, 100_000
    data = source(size * count)
    here.register([Region.of(data)])
    order = np.random.default_rng(2).permutation(count)
    with Owner(engine, 2 * size * count) as owner:
        peer = here.connect(owner.descriptor, "owner")
        here.post(peer, pieces(order, order[::-1], size, stride=2 * size), 1)
        assert finish(here, 1) == [""]
        # The content is taken at the time the handle has ended: visibility, not luck.
        found = owner.content().reshape(count, 2 * size)
        assert let_go(here, peer)
    np.testing.assert_array_equal(found[order[::-1], :size], data.reshape(count, size)[order])
    assert (found[:, size:] == CANARY).all()


def test_threads_of_the_library_post_long_lists(tls):
    data = source(2 * MIB)
    fabric = NixlFabric("here", options={"num_threads": "2"})
    fabric.register([Region.of(data)])
    everything = np.arange(8192)
    with Owner(engine, 2 * MIB) as owner:
        peer = fabric.connect(owner.descriptor, "owner")
        fabric.post(peer, pieces(everything, everything, 256), 1)
        assert finish(fabric, 1) == [""]
        np.testing.assert_array_equal(owner.content(), data)
    fabric.close()


def test_peer_that_is_killed_in_the_middle_of_writes(here):
    here.register([Region.of(source(32 * MIB))])
    everything = pieces(np.arange(16384), np.arange(16384), 2048)
    with Owner(engine, 32 * MIB) as owner:
        peer = here.connect(owner.descriptor, "owner")
        here.post(peer, everything, 0)
        assert finish(here, 0) == [""]
        for handle in range(1, 4):
            here.post(peer, everything, handle)
        os.kill(owner.process.pid, signal.SIGKILL)
        taken = post_until_refused(here, peer, everything, 4)
        finish(here, *range(1, taken))
        assert not peer.alive
        # It is not reaped yet: a zombie must count as gone.
        with pytest.raises(TransportUnavailable):
            here.connect(owner.descriptor, "owner")
        assert let_go(here, peer)
        assert here.poll() == []


def test_memory_that_the_peer_takes_away(here):
    here.register([Region.of(source(8 * MIB))])
    everything = pieces(np.arange(4096), np.arange(4096), 2048)
    with Owner(engine, 8 * MIB) as owner:
        peer = here.connect(owner.descriptor, "owner")
        for handle in range(8):
            here.post(peer, everything, handle)
        owner.connection.send((take_away, 0))
        taken = post_until_refused(here, peer, everything, 8)
        finish(here, *range(taken))
        assert not peer.alive
        assert receive(owner.connection) is None
        assert owner.process.is_alive()
        assert let_go(here, peer)


def test_more_writes_under_way_than_anybody_needs(here):
    here.register([Region.of(source(MIB))])
    with Owner(engine, MIB) as owner:
        peer = here.connect(owner.descriptor, "owner")
        for handle in range(1000):
            here.post(peer, pieces([handle % 256], [handle % 256], 4096), handle)
        assert finish(here, *range(1000)) == [""] * 1000
        assert let_go(here, peer)


def test_peer_that_is_stopped_is_not_waited_for_for_ever(tls):
    with (
        Owner(engine, 4 * MIB) as owner,
        started(leaving_writer, 4 * MIB, owner.descriptor, owner.process.pid) as (process, connection),
    ):
        assert connection.poll(30), "the writer hangs"
        assert connection.recv() == "freed"
        process.join(30)
        assert process.exitcode == 0, "the writer crashed after it had freed its memory"


def test_writes_that_were_not_taken_back_are_reported_when_they_are_over(tls):
    with (
        Owner(engine, 4 * MIB) as owner,
        started(stuck_writer, 4 * MIB, owner.descriptor, owner.process.pid) as (process, connection),
    ):
        assert connection.poll(60), "the writer hangs"
        clean, early, late = connection.recv()
        process.join(30)
        assert process.exitcode == 0
    assert sorted(early + late) == list(range(8))
    assert clean is not bool(late), "disconnect must say False exactly if something was left behind"


@pytest.fixture(params=["packed", "direct"])
def executor(request):
    return request.param


@pytest.fixture
def whole(tls, executor):
    """The whole transport, and not the fabric alone."""
    made = transport(executor, "here")
    yield made
    made.close()


def test_killed_destination_ends_every_ticket_of_the_transport(executor, whole):
    whole.register([Region.of(source(4 * MIB))])
    with started(destination, partial(transport, executor), 4 * MIB) as (process, connection):
        peer = whole.connect(receive(connection))
        everything = np.arange(1024)
        for ticket in range(200):
            whole.write(peer, [rows(4096, everything, everything)], ticket)
        ended = {}
        assert eventually(lambda: ended.update(whole.poll()) or ended)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: ended.update(whole.poll()) or len(ended) == 200)
        assert any(ended.values()), "the peer was killed with tickets outstanding, but all of them succeeded"
        assert not peer.alive
        whole.disconnect(peer)


def test_killed_writer_can_be_fenced(executor, whole):
    memory = np.full(4 * MIB, CANARY, dtype=np.uint8)
    whole.register([Region.of(memory)])
    with started(writer, partial(transport, executor), 4 * MIB, whole.describe()) as (process, connection):
        whole.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory[-1] not in (CANARY, 0)), "nothing was written"
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: whole.fence("writer"))
        seen = memory.copy()
        time.sleep(0.1)
        np.testing.assert_array_equal(memory, seen)


def test_a_write_outside_the_peers_memory_harms_nothing_else(here):
    here.register([Region.of(source(MIB))])
    with Owner(engine, MIB // 2) as owner:
        peer = here.connect(owner.descriptor, "owner")
        with pytest.raises(TransportError, match="refused"):
            here.post(peer, pieces([0, 255], [0, 255], 4096), 1)
        assert peer.alive
        here.post(peer, pieces([127], [127], 4096), 2)
        assert finish(here, 2) == [""]
        assert (owner.content()[:4096] == CANARY).all()


def test_two_connections_to_one_peer_end_apart(here):
    here.register([Region.of(source(MIB))])
    with Owner(engine, MIB) as owner:
        first, second = here.connect(owner.descriptor, "owner"), here.connect(owner.descriptor, "owner")
        here.post(first, pieces([0], [0], 4096), 1)
        assert let_go(here, first)
        here.post(second, pieces([1], [1], 4096), 2)
        assert finish(here, 1, 2) == ["", ""]
        assert let_go(here, second)
        third = here.connect(owner.descriptor, "owner")
        here.post(third, pieces([2], [2], 4096), 3)
        assert finish(here, 3) == [""]


@pytest.fixture
def described(monkeypatch):
    """An agent with one region over TCP, and its descriptor."""
    monkeypatch.setenv("UCX_TLS", TCP)
    fabric = NixlFabric("there")
    fabric.register([Region.of(np.zeros(4096, dtype=np.uint8))])
    yield fabric, fabric.describe()
    fabric.close()


def test_descriptor_that_was_damaged_is_not_shown_to_the_library(here, described):
    here.register([])
    told = described[1]
    for changed in (b"", told[:-1], told[:40] + b"\xff" + told[41:], told + b"\0"):
        with pytest.raises(TransportError, match="damaged"):
            here.connect(changed, "there")


def test_another_process_in_the_place_of_the_peer_is_found_out(here, described):
    here.register([])
    other = msgspec.structs.replace(descriptor.decode(NixlDescriptor, described[1], "there"), token=bytes(TOKEN_BYTES))
    with pytest.raises(TransportUnavailable, match="another process"):
        here.connect(descriptor.encode(other, 1), "there")
    assert here.connect(described[1], "there").alive


@pytest.mark.parametrize("count", [1, 16, 200])
def test_descriptor_stays_small(tls, count):
    fabric = NixlFabric("here")
    fabric.register([Region.of(np.zeros(4096, dtype=np.uint8)) for _ in range(count)])
    assert len(fabric.describe()) < 600 + 100 * count
    fabric.close()


def test_descriptor_that_grows_too_large_is_refused(monkeypatch):
    monkeypatch.setenv("UCX_TLS", TCP)
    monkeypatch.setattr(descriptor, "MAX_BYTES", 1000)
    fabric = NixlFabric("here")
    fabric.register([Region.of(np.zeros(64, dtype=np.uint8)) for _ in range(200)])
    with pytest.raises(TransportError, match=r"200 regions .* more than 1000"):
        fabric.describe()
    fabric.close()


def test_memory_that_it_does_not_reach_is_refused_by_number(described):
    fabric = NixlFabric("here")
    memory = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(TransportUnavailable, match="region 1 is tape memory"):
        fabric.register([Region.of(memory), Region(memory.ctypes.data, 4096, "tape")])
    fabric.close()


def test_transports_that_do_not_notice_a_death_are_refused(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "posix,sysv,cma")
    with pytest.raises(TransportUnavailable, match="notices the death of a peer"):
        NixlFabric("here")


def test_backend_whose_libraries_are_missing_is_refused_with_their_names():
    try:
        NixlFabric("here", options={"backend": "LIBFABRIC"}).close()
    except TransportUnavailable as error:
        assert "libfabric.so.1" in str(error)  # noqa: PT017 - on a machine that has them it works
    assert "UCX_MODULES" not in os.environ


@pytest.mark.parametrize("tls", [TCP, "posix"])
def test_process_ends_in_the_ordinary_way(tls):
    code = (
        "from kvbaton.transport.fabric.nixl.adapter import NixlFabric\n"
        "try: fabric = NixlFabric('here')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "else: fabric.register([]); fabric.describe(); print('made')\n"
    )
    environment = {**os.environ, "UCX_TLS": tls}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split()[-1] == ("made" if tls == TCP else "TransportUnavailable")
    assert ended.returncode == 0, ended.stderr
