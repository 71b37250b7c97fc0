"""What NIXL alone does over RDMA: it waits for outages, and notices a dead peer. See `test_fabric_rdma`."""

import contextlib
import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
from rdma_link import HERE, THERE, link_down, link_up, link_with, sent, take_time

pytest.importorskip("nixl_cu13", reason="NIXL is not installed: make setup-fabrics")

from fabric_ends import let_go
from nixl_process import engine
from owner_process import Owner, finish, pieces

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY
from kvbaton.transport.fabric.nixl.adapter import NixlFabric

MIB = 1 << 20


@pytest.fixture(autouse=True)
def rdma_only(monkeypatch):
    """UCX may use reliable connections only: with another way to the peer it could take that in silence."""
    monkeypatch.setenv("UCX_TLS", "rc")
    take_time(monkeypatch)


@pytest.fixture
def data():
    return np.random.default_rng(1).integers(0, CANARY, 2 * MIB, dtype=np.uint8)


@pytest.fixture
def here(data):
    fabric = engine("here", HERE)
    fabric.register([Region.of(data)])
    yield fabric
    fabric.close()


@pytest.fixture
def owner():
    with Owner(partial(engine, place=THERE), 2 * MIB) as owner:
        yield owner


def write_all(fabric, peer, owner, data):
    """One write of all of ``data``, checked by content."""
    everything = np.arange(len(data) // 4096)
    with sent(len(data)):
        fabric.post(peer, pieces(everything, everything[::-1], 4096), 1)
        assert finish(fabric, 1) == [""]
    np.testing.assert_array_equal(owner.content().reshape(-1, 4096)[::-1], data.reshape(-1, 4096))


def test_outage_of_a_second_is_waited_for(here, owner, data):
    peer = here.connect(owner.descriptor, "owner")
    ended = threading.Event()

    def outage():
        with link_with("loss", "100%"):
            time.sleep(1.0)
        ended.set()

    threading.Thread(target=outage).start()
    try:
        write_all(here, peer, owner, data)
    finally:
        assert ended.wait(60)
    assert let_go(here, peer)


def test_port_that_is_down_for_a_while_harms_no_idle_connection(here, owner, data):
    peer = here.connect(owner.descriptor, "owner")
    link_down()
    time.sleep(3.0)
    link_up()
    assert owner.process.is_alive()
    write_all(here, peer, owner, data)
    assert let_go(here, peer)


def test_peer_that_is_killed_in_the_middle_of_writes(here):
    everything = pieces(np.arange(32), np.arange(32), 65536)
    with Owner(partial(engine, place=THERE), 2 * MIB) as owner:
        peer = here.connect(owner.descriptor, "owner")
        for handle in range(4):
            here.post(peer, everything, handle)
        os.kill(owner.process.pid, signal.SIGKILL)
        began = time.monotonic()
        taken = 4
        with contextlib.suppress(TransportError):
            for taken in range(4, 20):
                here.post(peer, everything, taken)
            taken = 20
        errors = finish(here, *range(taken))
        print(
            f"{taken} writes were taken, all of them ended {time.monotonic() - began:.1f} s after the peer was killed"
        )
        assert any(errors) or taken < 20, "the peer was killed with 32 MiB to come, but all of it succeeded"
        assert not peer.alive
        with pytest.raises(TransportError):
            here.post(peer, everything, 100)
        assert let_go(here, peer)
        with pytest.raises(TransportUnavailable):
            here.connect(owner.descriptor, "owner")


def test_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(TransportUnavailable, match=r"no network device rxe7:1; found are rxe0:1 \(rdma\), rxe1:1"):
        NixlFabric("here", options={"devices": "rxe7:1"})
