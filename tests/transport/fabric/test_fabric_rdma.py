"""NIXL and Mooncake over RDMA: queue pairs between two devices with a link between them, and faults of that link.

One test for both libraries; what only one of them does is in its own file. Runs where there are soft-RoCE devices and
the right to break the link between them: `make test-rdma` makes such a machine, one for each library.
"""

import contextlib
import importlib
from functools import partial

import numpy as np
import pytest
from fabric_ends import let_go
from owner_process import Owner, finish, pieces
from peer_process import destination, eventually, receive, started
from rdma_link import HERE, THERE, link_with, packets, sent, take_time

from kvbaton.errors import TransportError
from kvbaton.memory import Region
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.conformance.case import CANARY, rows

MIB = 1 << 20
LIBRARIES = {"nixl": "nixl_cu13", "mooncake": "mooncake.engine"}


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    """What the processes of a library do. UCX may use reliable connections only, and take no other way in silence."""
    pytest.importorskip(LIBRARIES[request.param], reason="it is not installed: make setup-fabrics")
    monkeypatch.setenv("UCX_TLS", "rc")
    take_time(monkeypatch)
    return importlib.import_module(f"{request.param}_process")


@pytest.fixture
def data():
    return np.random.default_rng(1).integers(0, CANARY, 2 * MIB, dtype=np.uint8)


@pytest.fixture
def here(library, data):
    fabric = library.engine("here", HERE)
    fabric.register([Region.of(data), Region.of(data.copy())])
    yield fabric
    fabric.close()


@pytest.fixture
def owner(library):
    with Owner(partial(library.engine, place=THERE), 2 * MIB) as owner:
        yield owner


@pytest.fixture
def peer(here, owner):
    return here.connect(owner.descriptor, "owner")


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("executor", ["packed", "direct"])
def test_promise_is_kept_over_rdma(library, executor, check):
    made = []

    def make(instance):
        made.append(instance)
        return library.transport(executor, instance, THERE if len(made) % 2 else HERE)

    before = packets(HERE) + packets(THERE)
    try:
        Conformance(make, timeout=240.0).run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
    print(f"{executor} {check}: {packets(HERE) + packets(THERE) - before} packets")


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
    assert let_go(here, peer)


def test_memory_that_the_peer_takes_away(library, here, owner, peer):
    owner.ask(library.take_away, 1)
    with contextlib.suppress(TransportError):
        here.post(peer, pieces(np.arange(8), np.arange(8), 4096, region=1), 1)
        (error,) = finish(here, 1)
        assert "peer owner" in error, "the peer has let go of its memory, but a write to it succeeded"
    assert not peer.alive
    assert owner.process.is_alive()
    assert (owner.content(1) == CANARY).all()
    assert let_go(here, peer)


def test_killed_destination_ends_every_ticket_and_a_new_one_is_reached(library):
    # Soft-RoCE takes seven retries as "for ever", which are Mooncake's: its writes never end there, but tickets do.
    here = library.transport("direct", "here", HERE)
    here.register([Region.of(np.ones(4 * MIB, np.uint8))])
    there = partial(library.transport, "direct", place=THERE)
    everything = np.arange(64)
    with started(destination, there, 4 * MIB) as (process, connection):
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
    with started(destination, there, 4 * MIB) as (_, connection):
        here.write(here.connect(receive(connection)), [rows(65536, [3], [4])], 200)
        assert eventually(lambda: ended.update(dict(here.poll())) or 200 in ended)
        assert ended[200] == ""
    here.close()
