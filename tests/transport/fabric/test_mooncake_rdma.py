"""What Mooncake alone does over RDMA: a link that is down, memory that comes back, TCP that it may not take.

See `test_fabric_rdma` for what it has in common with others.
"""

import contextlib
import time
from functools import partial

import numpy as np
import pytest
from fabric_ends import let_go
from mooncake_process import MISSING, PLACES, engine, give_back, take_away
from owner_process import Owner, finish, pieces
from peer_process import eventually
from rdma_link import HERE, THERE, link_down, link_up, sent

from kvbaton.errors import TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY
from kvbaton.transport.fabric.mooncake.adapter import MooncakeFabric

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MIB = 1 << 20


@pytest.fixture
def data():
    return np.random.default_rng(1).integers(0, CANARY, 2 * MIB, dtype=np.uint8)


@pytest.fixture
def here(data):
    fabric = engine("here", HERE)
    fabric.register([Region.of(data), Region.of(data.copy())])
    yield fabric
    fabric.close()


@pytest.fixture
def owner():
    with Owner(partial(engine, place=THERE), 2 * MIB) as owner:
        yield owner


@pytest.fixture
def peer(here, owner):
    return here.connect(owner.descriptor, "owner")


def test_link_that_goes_down_for_a_second(here, owner, peer, data):
    everything = np.arange(len(data) // 4096)
    here.post(peer, pieces(everything, everything, 4096), 1)
    link_down()
    here.post(peer, pieces([0], [1], 4096, region=1), 2)
    time.sleep(1.0)
    link_up()
    first, second = finish(here, 1, 2)
    print(f"in the middle of it: {first or 'no error'}; posted while it was down: {second or 'no error'}")
    if not first:
        np.testing.assert_array_equal(owner.content(), data)
    if not second:
        assert (owner.content(1)[4096:8192] != CANARY).all()
    assert let_go(here, peer)
    # The library uses a device again some seconds after its port came back.
    again = []

    def reached():
        with contextlib.suppress(TransportUnavailable):
            again.append(here.connect(owner.descriptor, "owner"))
        return again

    assert eventually(reached)
    with sent(len(data)):
        here.post(again[0], pieces(everything, everything, 4096), 3)
        assert finish(here, 3) == [""]
    np.testing.assert_array_equal(owner.content(), data)


def test_memory_that_the_peer_takes_away_and_gives_back(here, owner, peer):
    assert owner.ask(take_away, 1) == 0
    here.post(peer, pieces(np.arange(8), np.arange(8), 4096, region=1), 1)
    assert "8 of 8 writes to peer owner" in finish(here, 1)[0]
    assert peer.alive is False
    assert (owner.content(1) == CANARY).all()
    assert owner.ask(give_back, 1) == 0
    assert let_go(here, peer)
    again = here.connect(owner.descriptor, "owner")
    here.post(again, pieces([3], [4], 4096, region=1), 2)
    assert finish(here, 2) == [""]
    assert (owner.content(1)[4 * 4096 : 5 * 4096] != CANARY).all()


def test_peer_without_rdma_is_refused(here):
    other = engine("other")
    other.register([])
    with pytest.raises(TransportUnavailable, match="over tcp, this side over rdma"):
        here.connect(other.describe(), "other")
    other.close()


def test_tcp_is_taken_where_it_is_asked_for_and_rdma_where_nothing_is():
    for options, protocol in (({"protocol": "tcp"}, "tcp"), ({}, "rdma")):
        fabric = MooncakeFabric("here", PLACES["rxe0"][0], options=options)
        assert fabric.protocol == protocol
        assert fabric.found() == ["rxe0 (rdma)", "rxe1 (rdma)"]
        fabric.close()


def test_device_that_is_not_there_is_refused_unless_tcp_is_allowed():
    options = {"protocol": "rdma", "devices": "rxe7"}
    with pytest.raises(TransportUnavailable, match="rdma with rxe7, but this machine has rxe0, rxe1"):
        MooncakeFabric("here", "10.77.0.1", options=options)
    fabric = MooncakeFabric("here", "10.77.0.1", options=options | {"allow_tcp": "1"})
    assert fabric.protocol == "tcp"
    fabric.close()
