"""The loopback's switches for users' tests."""

import contextlib

import numpy as np
import pytest
from peer_process import eventually

from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport import NAMES, create
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric import FABRICS
from kvbaton.transport.loopback import Hub, LoopbackTransport


@pytest.fixture
def ends():
    hub = Hub()
    writer, target = LoopbackTransport("writer", hub=hub), LoopbackTransport("target", hub=hub)
    target.memory = np.full(64, CANARY, dtype=np.uint8)
    writer.register([Region.of(np.arange(64, dtype=np.uint8))])
    target.register([Region.of(target.memory)])
    yield writer, target
    writer.close()
    target.close()


def test_a_failing_write_moves_nothing(ends):
    writer, target = ends
    writer.fail = lambda ticket: "as the test wants" if ticket == 1 else ""
    peer = writer.connect(target.describe())
    writer.write(peer, [rows(64, [0], [0])], 1)
    ended = []
    assert eventually(lambda: ended.extend(writer.poll()) or ended)
    assert tuple(ended[0]) == (1, "as the test wants")
    assert (target.memory == CANARY).all()
    writer.write(peer, [rows(64, [0], [0])], 2)
    assert eventually(lambda: ended.extend(writer.poll()) or len(ended) == 2)
    assert tuple(ended[1]) == (2, "")


def test_a_copy_that_raises_ends_its_ticket_and_the_worker_lives(ends):
    writer, target = ends
    peer = writer.connect(target.describe())
    ended = []

    def fail(ticket):
        raise RuntimeError("a bug in the test's own switch")

    writer.fail = fail
    writer.write(peer, [rows(64, [0], [0])], 1)
    assert eventually(lambda: ended.extend(writer.poll()) or ended)
    assert "RuntimeError: a bug" in ended[0].error
    writer.fail = None
    writer.write(peer, [rows(64, [0], [0])], 2)
    assert eventually(lambda: ended.extend(writer.poll()) or len(ended) == 2)
    assert tuple(ended[1]) == (2, "")


def test_a_delayed_write_lands_later_or_ends_with_the_peer(ends):
    writer, target = ends
    peer = writer.connect(target.describe())
    writer.delay = 3600.0
    writer.write(peer, [rows(64, [0], [0])], 1)
    assert writer.poll() == []
    assert (target.memory == CANARY).all()
    writer.disconnect(peer)
    ended = writer.poll()
    assert len(ended) == 1
    assert "disconnected" in ended[0].error
    assert (target.memory == CANARY).all()


def test_a_closed_destination_takes_no_more(ends):
    writer, target = ends
    peer = writer.connect(target.describe())
    target.close()
    writer.write(peer, [rows(64, [0], [0])], 1)
    ended = []
    assert eventually(lambda: ended.extend(writer.poll()) or ended)
    assert "closed" in ended[0].error
    assert (target.memory == CANARY).all()


def test_hubs_are_apart(ends):
    stranger = LoopbackTransport("stranger", hub=Hub())
    with pytest.raises(TransportUnavailable, match="no loopback endpoint target"):
        stranger.connect(ends[1].describe())
    stranger.close()


def test_an_instance_id_is_used_once(ends):
    with pytest.raises(TransportError, match="writer has a loopback endpoint"):
        LoopbackTransport("writer", hub=ends[0]._hub)


def test_create_knows_its_names():
    for name in NAMES:
        # Libraries and drivers of vendors may be missing here.
        with contextlib.suppress(*[TransportUnavailable] * (name in {*FABRICS, "cuda"})):
            transport = create(name, instance=f"made-{name}")
            assert transport.name == name
            transport.close()
    with pytest.raises(ConfigurationError, match=", ".join(NAMES)):
        create("pigeon", instance="one")
