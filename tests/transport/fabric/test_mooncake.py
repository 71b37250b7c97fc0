"""The adapter over the vendor's engine, over TCP, with the peer in a process of its own."""

import msgspec
import numpy as np
import pytest
from fabric_ends import let_go
from mooncake_process import MISSING, TCP, Relay, engine, give_back, port, take_away
from owner_process import Owner, finish, pieces
from peer_process import eventually, go_on, stand_still

from kvbaton.check.soak.descriptors import open_descriptors
from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY
from kvbaton.transport.fabric import descriptor
from kvbaton.transport.fabric.mooncake.adapter import MooncakeFabric
from kvbaton.transport.fabric.mooncake.descriptor import MooncakeDescriptor

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MIB = 1 << 20
SIZE = 32 * MIB


@pytest.fixture(scope="module")
def source():
    return np.random.default_rng(1).integers(0, CANARY, SIZE, dtype=np.uint8)


@pytest.fixture
def fabric(source):
    fabric = MooncakeFabric("writer", options=TCP)
    fabric.register([Region.of(source), Region.of(source.copy())])
    yield fabric
    fabric.close()


@pytest.fixture
def start():
    running = []

    def make(nbytes=SIZE):
        running.append(Owner(engine, nbytes))
        return running[-1]

    yield make
    for owner in running:
        owner.kill()


@pytest.fixture
def owner(start):
    return start()


@pytest.fixture
def peer(fabric, owner):
    return fabric.connect(owner.descriptor, "owner")


def test_pieces_land_where_they_belong_and_nowhere_else(fabric, owner, peer, source):
    count = SIZE // 4096
    local, remote = (np.random.default_rng(seed).permutation(count)[: count // 2] for seed in (2, 3))
    fabric.post(peer, pieces(local, remote, 4096), 1)
    fabric.post(peer, pieces([5], [7], MIB, region=1), 2)
    assert finish(fabric, 1, 2) == ["", ""]
    wanted = np.full((count, 4096), CANARY, np.uint8)
    wanted[remote] = source.reshape(count, 4096)[local]
    np.testing.assert_array_equal(owner.content().reshape(count, 4096), wanted)
    other = np.full((32, MIB), CANARY, np.uint8)
    other[7] = source.reshape(32, MIB)[5]
    np.testing.assert_array_equal(owner.content(1).reshape(32, MIB), other)


def test_a_hundred_thousand_pieces_in_one_post_are_not_refused(fabric, owner, peer, source):
    everything = np.arange(100_000)
    fabric.post(peer, pieces(everything, everything[::-1], 256), 1)
    assert finish(fabric, 1) == [""]
    nbytes = len(everything) * 256
    found = owner.content()
    np.testing.assert_array_equal(found[:nbytes].reshape(-1, 256), source[:nbytes].reshape(-1, 256)[::-1])
    assert (found[nbytes:] == CANARY).all()


def test_full_queues_of_many_posts_are_not_refused(fabric, peer):
    for handle in range(20):
        fabric.post(peer, pieces(np.arange(1000), np.arange(1000), 512), handle)
    assert finish(fabric, *range(20)) == [""] * 20


def test_an_empty_post_ends(fabric, peer):
    fabric.post(peer, pieces([], [], 1), 1)
    assert finish(fabric, 1) == [""]


def test_arrays_may_be_used_again_after_the_post(fabric, owner, peer, source):
    writes = pieces(np.arange(1000), np.arange(1000), 4096)
    fabric.post(peer, writes, 1)
    for column in writes[2:]:
        column[:] = 1
    assert finish(fabric, 1) == [""]
    np.testing.assert_array_equal(owner.content()[: 1000 * 4096], source[: 1000 * 4096])


def test_killed_peer_ends_every_handle_and_a_new_one_is_reached(fabric, owner, peer, start):
    for handle in range(8):
        fabric.post(peer, pieces(np.arange(32), np.arange(32), MIB), handle)
    while not (first := fabric.poll()):
        fabric.wait(1e-3)
    owner.kill()
    errors = finish(fabric, *(set(range(8)) - {ended.handle for ended in first}))
    assert any("failed with" in error and "peer owner" in error for error in errors)
    assert peer.alive is False
    with pytest.raises(TransportUnavailable, match="does not answer"):
        fabric.connect(owner.descriptor, "owner")
    assert let_go(fabric, peer)
    other = start()
    fabric.post(fabric.connect(other.descriptor, "owner"), pieces([1], [1], MIB), 100)
    assert finish(fabric, 100) == [""]


def test_no_more_sockets_are_kept_of_dead_peers_than_it_says(fabric, start):
    # An end of a pipe to each owner is the test's own.
    before = open_descriptors()["socket:[N]"]
    for count in range(1, 4):
        owner = start(MIB)
        peer = fabric.connect(owner.descriptor, "owner")
        fabric.post(peer, pieces(np.arange(200), np.arange(200), 4096), 1)
        assert finish(fabric, 1) == [""]
        owner.kill()
        assert let_go(fabric, peer)
        most = before + count * fabric.kept_sockets
        assert eventually(lambda most=most: open_descriptors()["socket:[N]"] <= most)


def test_revoked_memory_fails_its_write_only_and_the_peer_comes_back(fabric, owner, peer):
    assert owner.ask(take_away, 1) == 0
    fabric.post(peer, pieces([0, 1], [0, 1], 4096, region=1), 1)
    fabric.post(peer, pieces(np.arange(100), np.arange(100), 4096), 2)
    refused, fine = finish(fabric, 1, 2)
    assert "2 of 2 writes to peer owner" in refused
    assert fine == ""
    assert peer.alive is False
    assert owner.ask(give_back, 1) == 0
    assert let_go(fabric, peer)
    again = fabric.connect(owner.descriptor, "owner")
    assert again.alive is True
    fabric.post(again, pieces([3], [4], 4096, region=1), 3)
    assert finish(fabric, 3) == [""]
    assert (owner.content(1)[4 * 4096 : 5 * 4096] != CANARY).all()


def test_process_that_took_the_place_of_another_is_reached(fabric, start):
    # A port cannot be listened at again for a minute after its process was killed: here the relay's stays the same.
    with Relay() as relay:
        old, new = start(MIB), start(MIB)
        relay.port = old.ask(port)
        described = [
            msgspec.structs.replace(MooncakeDescriptor.decode(owner.descriptor, "owner"), port=relay.own_port).encode()
            for owner in (old, new)
        ]
        fabric.post(fabric.connect(described[0], "old"), pieces([0], [0], MIB), 1)
        assert finish(fabric, 1) == [""]
        old.kill()
        relay.port = new.ask(port)
        with pytest.raises(TransportUnavailable, match="taken its place"):
            fabric.connect(described[0], "old")
        fabric.post(fabric.connect(described[1], "new"), pieces([0], [0], MIB), 2)
        assert finish(fabric, 2) == [""]
        assert (new.content() != CANARY).all()


def test_post_does_not_wait_for_a_peer_that_stands_still(fabric, owner, peer):
    other = fabric.connect(owner.descriptor, "owner")
    stand_still(owner.process)
    fabric.post(peer, pieces(np.arange(32), np.arange(32), MIB), 1)
    fabric.post(other, pieces(np.arange(1000), np.arange(1000), 1024), 2)
    assert fabric.poll() == []
    # What the library got it still may read; the rest is taken back. Both are reported when nothing is read any more.
    assert fabric.disconnect(other) is False
    assert fabric.poll() == []
    go_on(owner.process)
    done, dropped = finish(fabric, 1, 2)
    assert done == ""
    assert "was closed" in dropped
    with pytest.raises(TransportError, match="connect again"):
        fabric.post(other, pieces([0], [0], 1), 3)


def test_disconnect_takes_back_what_waits(fabric, owner, peer):
    fabric.post(peer, pieces(np.arange(50_000), np.arange(50_000), 256), 1)
    assert let_go(fabric, peer)
    ((handle, error),) = fabric.poll()
    assert (handle, "was closed" in error) == (1, True)
    found = owner.content()
    assert fabric.poll() == []
    np.testing.assert_array_equal(owner.content(), found)
    assert (found[50_000 * 256 - 4096 :] == CANARY).all()


def test_close_in_the_middle_of_writes(source, owner):
    fabric = MooncakeFabric("writer", options=TCP)
    fabric.register([Region.of(source)])
    peer = fabric.connect(owner.descriptor, "owner")
    fabric.post(peer, pieces(np.arange(32), np.arange(32), MIB), 1)
    fabric.close()
    fabric.close()
    with pytest.raises(TransportError, match="connect again"):
        fabric.post(peer, pieces([0], [0], 1), 2)
    found = owner.content()
    np.testing.assert_array_equal(owner.content(), found)


def test_descriptor_of_another_process_or_protocol_is_refused(fabric, owner):
    mine = MooncakeDescriptor.decode(owner.descriptor, "owner")
    other = MooncakeDescriptor(mine.host, mine.port, "tcp", mine.token_address, b"x" * 16, mine.regions)
    with pytest.raises(TransportUnavailable, match="another process has taken its place"):
        fabric.connect(other.encode(), "owner")
    other = MooncakeDescriptor(mine.host, mine.port, "rdma", mine.token_address, mine.token, mine.regions)
    with pytest.raises(TransportUnavailable, match="over rdma, this side over tcp; set protocol=rdma here"):
        fabric.connect(other.encode(), "owner")
    with pytest.raises(TransportError, match="peer owner was damaged"):
        fabric.connect(b"nonsense", "owner")


def test_memory_that_cannot_be_registered_is_named():
    array = np.zeros(8192, np.uint8)
    fabric = MooncakeFabric("here", options=TCP)
    with pytest.raises(TransportUnavailable, match="region 1, 4096 bytes of host memory"):
        fabric.register([Region.of(array), Region.of(array[4096:])])
    if "cuda" not in fabric.memory_kinds:
        with pytest.raises(TransportUnavailable, match="region 0 is cuda memory"):
            fabric.register([Region(1, 1, "cuda")])
    fabric.close()


def test_empty_regions_keep_their_number(fabric, source, owner):
    here = MooncakeFabric("here", options=TCP)
    here.register([Region.of(np.zeros(0, np.uint8)), Region.of(source.copy())])
    peer = here.connect(owner.descriptor, "owner")
    here.post(peer, pieces([1], [2], 4096, region=1), 1)
    assert finish(here, 1) == [""]
    here.close()
    np.testing.assert_array_equal(owner.content(1)[2 * 4096 : 3 * 4096], source[4096 : 2 * 4096])


def test_too_many_regions_for_a_descriptor_are_refused(monkeypatch):
    monkeypatch.setattr(descriptor, "MAX_BYTES", 100)
    fabric = MooncakeFabric("here", options=TCP)
    fabric._bases = np.zeros(7000, np.int64)
    with pytest.raises(TransportError, match="7000 regions"):
        fabric.describe()
    fabric.close()


def test_devices_are_found(fabric):
    assert all(line.endswith("(rdma)") for line in fabric.found())
