"""Aux data by the transport: written with the last chunk where that can be, and inside messages everywhere else."""

import logging

import numpy as np
import pytest
from rank_world import FAST, Model, World, in_region, succeeded, wait_released
from room_pairs import failed

import kvbaton as kb
from kvbaton.errors import ConfigurationError
from kvbaton.protocol import Done

FABRIC = kb.Settings(
    heartbeat_seconds=0.2, peer_timeout_seconds=1.0, connect_seconds=0.5, handshake_seconds=5.0, aux="fabric"
)
FULL = Model(("kv", "conv", "aux"))


def ranks(world, model=FULL, sources=1, destinations=1, **options):
    made = world.prefill(*(model.layout(rank, sources) for rank in range(sources)))
    for source in made:
        source.fill("kv", [0, 1], (0, 8))
        source.fill("conv", [1])
        source.fill("aux", [6])
    layouts = (model.layout(rank, destinations) for rank in range(destinations))
    return made, world.decode(*layouts, **{"settings": FABRIC, **options})


def hand_over(sources, destinations, room=1):
    senders = [source.manager.sender(room) for source in sources]
    receivers = [destination.manager.receiver(room) for destination in destinations]
    for receiver in receivers:
        receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
    for sender in senders:
        sender.send({"kv": [0]}, (0, 4))
        sender.finish({"kv": [1], "conv": [1]}, (4, 8), aux=6)
    succeeded(*senders, *receivers)
    wait_released(*senders, *receivers)
    for destination in destinations:
        destination.check("kv", [4, 5], (0, 8))
        destination.check("conv", [2])
        destination.check("aux", [3])
        destination.check_rest()
    for each in (*senders, *receivers):
        each.close()
    return senders, receivers


@pytest.fixture(params=["loopback", "shm", "tcp", "memory"])
def any_world(request):
    """Also over the fabric that is there everywhere: packed for small pieces, as those of a vendor's library."""
    made = World(request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 2), (2, 1)])
def test_it_is_written_with_the_last_chunk(any_world, dones, prefills, decodes):
    sources, destinations = ranks(any_world, sources=prefills, destinations=decodes)
    senders, receivers = hand_over(sources, destinations)
    assert [done.aux for done in dones] == [b""] * len(dones)
    (nbytes,) = {sum(done.bytes.get("aux", 0) for done in dones) / decodes}
    assert nbytes == 8 + 3 * 4
    assert sum(sender.bytes_by_component.get("aux", 0) for sender in senders) == decodes * nbytes
    assert [receiver.bytes_by_component["aux"] for receiver in receivers] == [nbytes] * decodes
    assert {peer.aux for rank in (*sources, *destinations) for peer in rank.manager.peers} == {"fabric"}
    any_world.assert_empty()
    any_world.assert_no_faults()


def test_by_default_it_is_in_done(any_world, dones):
    sources, destinations = ranks(any_world, settings=FAST)
    hand_over(sources, destinations)
    assert [len(done.aux) for done in dones] == [20]
    assert destinations[0].manager.peers[0].aux == "control"


def test_the_prefill_side_need_not_be_told(any_world, dones):
    """The decode side decides."""
    sources, destinations = ranks(any_world)
    assert sources[0].manager._context.settings.aux == "control"
    hand_over(sources, destinations)
    assert [done.aux for done in dones] == [b""]


def test_a_request_that_moves_nothing_else(any_world, dones):
    (source,), (destination,) = ranks(any_world)
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [], "conv": []}, 8, prefix=8, aux=3)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
    succeeded(sender, receiver)
    destination.check("aux", [3])
    destination.check_rest()
    assert [(done.chunks, done.aux, dict(done.bytes)) for done in dones] == [(1, b"", {"aux": 20})]


def test_an_offer_without_an_aux_slot_gets_none(any_world):
    (source,), (destination,) = ranks(any_world)
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
    succeeded(sender, receiver)
    destination.check("kv", [4, 5], (0, 8))
    destination.check("conv", [2])
    destination.check_rest()


def test_an_offer_that_comes_last(any_world):
    (source,), (destination,) = ranks(any_world)
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
    succeeded(sender, receiver)
    destination.check("aux", [3])


def test_memory_that_the_transport_does_not_reach_falls_back_and_says_so_once(world, dones, caplog):
    """Shared memory for the cache, none for the small values: the usual case."""
    (source,) = world.prefill(FULL.layout(), transports=["shm"])
    layout = in_region(FULL.layout(), "aux", 1)
    shared, plain = kb.SharedMemory(source.memory.nbytes), np.zeros(source.memory.nbytes, np.uint8)
    regions = [kb.Region.of(shared), kb.Region.of(plain)]
    source.fill("aux", [6])
    options = {"role": "decode", "registry": world.registry, "transports": ["shm"], "settings": FABRIC}
    with kb.Manager(layout, regions, **options) as manager:
        for room in range(3):
            sender, receiver = source.manager.sender(room), manager.receiver(room)
            receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
            sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
            succeeded(sender, receiver)
        assert [len(done.aux) for done in dones] == [20] * 3
        for tensor in layout.component("aux").tensors:
            width = tensor.itemsize * tensor.axes[0].local_size if tensor.axes else tensor.itemsize
            here, there = (tensor.offset + row * tensor.row_stride for row in (6, 3))
            np.testing.assert_array_equal(plain[there : there + width], source.memory.array[here : here + width])
        (peer,) = manager.peers
        assert (peer.transport, peer.aux) == ("shm", "control")
        assert "it cannot write into region 1 of the decode rank (component aux)" in peer.reason
    said = [record for record in caplog.records if "aux data come over the control channel" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING]


def test_a_write_that_leaves_it_out_fails_the_room(world, monkeypatch):
    monkeypatch.setattr("kvbaton.runtime.prefill.bind_aux", lambda *arguments: {})
    (source,), (destination,) = ranks(world)
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
    failed(receiver, "0 bytes of aux data were written where 20 belong")


def test_a_done_with_both_is_refused(world, monkeypatch):
    from kvbaton.runtime.prefill import PrefillSide

    def with_aux(self, action):
        done = action.done
        self.context.send(action.peer, Done(done.room, done.epoch, done.part, done.chunks, done.bytes, b"x" * 20))
        return []

    carry_out = PrefillSide._carry_out

    def spy(self, action):
        return with_aux(self, action) if type(action).__name__ == "SendDone" else carry_out(self, action)

    monkeypatch.setattr(PrefillSide, "_carry_out", spy)
    (source,), (destination,) = ranks(world)
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
    failed(receiver, "of aux data")


def test_a_slot_that_is_not_there_fails_the_room_before_a_byte_moves(world, monkeypatch):
    monkeypatch.setattr("kvbaton.runtime.rows.EngineRows.aux", lambda self, row: 1 << 30)
    (source,), (destination,) = ranks(world)
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=6)
    failed(sender, "row 1073741824")
    failed(receiver, "row 1073741824")


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigurationError, match="aux is 'rdma'; it must be one of control, fabric"):
        kb.Settings(aux="rdma")
