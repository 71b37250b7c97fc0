"""Mooncake over RDMA: queue pairs between two devices with a link between them, and faults of that link.

Runs where there are soft-RoCE devices rxe0 and rxe1 on the interfaces v0 and v1 and the right to break the link between
them: `make test-rdma` makes such a machine.
"""

import contextlib
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("RDMA_VM") != "1":
    pytest.skip("this machine has no RDMA devices to break: make test-rdma", allow_module_level=True)

from fabric_ends import let_go
from mooncake_process import (
    CANARY,
    MISSING,
    PLACES,
    Owner,
    destination,
    engine,
    eventually,
    finish,
    pieces,
    receive,
    started,
    transport,
)

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.conformance.case import rows
from kvbaton.transport.fabric.mooncake.adapter import MooncakeFabric

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MIB = 1 << 20
RDMA_MTU = 4096


def packets(device):
    """Packets that a device has sent so far."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


@contextlib.contextmanager
def sent(nbytes):
    """Fails unless as many packets as ``nbytes`` need left the device of this side, and some came from the other.

    The library falls back to TCP in silence: the data would arrive all the same.
    """
    before = packets("rxe0"), packets("rxe1")
    yield
    assert packets("rxe0") - before[0] >= nbytes // RDMA_MTU, "the bytes did not go over RDMA"
    assert packets("rxe1") > before[1], "the other device acknowledged nothing"


def run(*command):
    subprocess.run(command, check=True, timeout=60)


@contextlib.contextmanager
def link_with(*faults):
    """The link loses or delays packets meanwhile."""
    run("tc", "qdisc", "add", "dev", "v1", "root", "netem", *faults)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", "v1", "root")


@pytest.fixture
def data():
    return np.random.default_rng(1).integers(0, CANARY, 2 * MIB, dtype=np.uint8)


@pytest.fixture
def here(data):
    fabric = engine("here", "rxe0")
    fabric.register([Region.of(data), Region.of(data.copy())])
    yield fabric
    fabric.close()


@pytest.fixture
def owner():
    owner = Owner(2 * MIB, "rxe1")
    yield owner
    owner.kill()


@pytest.fixture
def peer(here, owner):
    return here.connect(owner.descriptor, "owner")


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("executor", ["packed", "direct"])
def test_promise_is_kept_over_rdma(executor, check):
    def make(instance):
        return transport(executor, instance, "rxe0" if instance.startswith("writer") else "rxe1")

    before = packets("rxe0") + packets("rxe1")
    try:
        Conformance(make, timeout=240.0).run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
    print(f"{executor} {check}: {packets('rxe0') + packets('rxe1') - before} packets")


@pytest.mark.parametrize("faults", [(), ("loss", "0.5%"), ("delay", "2ms")], ids=["whole", "loss", "delay"])
@pytest.mark.parametrize("piece", [512, 65536])
def test_content_arrives_over_the_link(here, owner, peer, data, faults, piece):
    order = np.random.default_rng(piece).permutation(len(data) // piece)
    with link_with(*faults) if faults else contextlib.nullcontext(), sent(len(data) // 2):
        here.post(peer, pieces(order[::2], order[1::2], piece), 1)
        assert finish(here, 1) == [""]
    wanted = np.full((len(order), piece), CANARY, np.uint8)
    wanted[order[1::2]] = data.reshape(-1, piece)[order[::2]]
    np.testing.assert_array_equal(owner.content().reshape(-1, piece), wanted)


def test_link_that_goes_down_for_a_second(here, owner, peer, data):
    everything = np.arange(len(data) // 4096)
    here.post(peer, pieces(everything, everything, 4096), 1)
    run("ip", "link", "set", "v0", "down")
    here.post(peer, pieces([0], [1], 4096, region=1), 2)
    run("bash", "-c", "sleep 1; ip link set v0 up; bash /run/rdma-vm/net.sh")
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
    assert owner.ask("take away", 1) == 0
    here.post(peer, pieces(np.arange(8), np.arange(8), 4096, region=1), 1)
    assert "8 of 8 writes to peer owner" in finish(here, 1)[0]
    assert peer.alive is False
    assert (owner.content(1) == CANARY).all()
    assert owner.ask("give back", 1) == 0
    assert let_go(here, peer)
    again = here.connect(owner.descriptor, "owner")
    here.post(again, pieces([3], [4], 4096, region=1), 2)
    assert finish(here, 2) == [""]
    assert (owner.content(1)[4 * 4096 : 5 * 4096] != CANARY).all()


def test_killed_destination_ends_every_ticket_and_a_new_one_is_reached():
    # Soft-RoCE takes the library's number of retries as "for ever": the writes themselves never end, their tickets do.
    source = np.ones(4 * MIB, np.uint8)
    here = transport("direct", "here", "rxe0")
    here.register([Region.of(source)])
    everything = np.arange(64)
    with started(destination, "direct", 4 * MIB, "rxe1") as (process, connection):
        peer = here.connect(receive(connection))
        for ticket in range(16):
            here.write(peer, [rows(65536, everything, everything)], ticket)
        process.kill()
        ended = {}
        assert eventually(lambda: ended.update(dict(here.poll())) or len(ended) == 16)
        assert any(ended.values()), "the peer was killed with tickets outstanding, but all of them succeeded"
        assert eventually(lambda: not peer.alive)
        with pytest.raises(TransportError):
            here.write(peer, [rows(65536, [0], [0])], 100)
        here.disconnect(peer)
    with started(destination, "direct", 4 * MIB, "rxe1") as (_, connection):
        here.write(here.connect(receive(connection)), [rows(65536, [3], [4])], 200)
        assert eventually(lambda: ended.update(dict(here.poll())) or 200 in ended)
        assert ended[200] == ""
    here.close()


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
