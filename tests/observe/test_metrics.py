"""Prometheus metrics say what happened, their labels stay few, and counters never fall."""

import pytest
from heard import settle
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rank_world import Model, wait, wait_over, wait_released
from room_pairs import FULL, KV, Gate, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors
from kvbaton.observe import Metrics
from kvbaton.protocol import Done
from kvbaton.transport.loopback import LoopbackTransport


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"kvbaton_{name}", {key: str(each) for key, each in labels.items()})


def samples(metrics):
    return [
        sample
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith("kvbaton_")
    ]


def test_a_hand_over_is_counted_on_both_sides(world, metrics):
    source, destination = pair(world, observers=[metrics])
    for room in range(3):
        hand_over(source, destination, room)
        settle(world)
    nbytes = 3 * 2 * sum(tensor.row_stride for tensor in KV.layout().components[0].tensors)
    for side in ("prefill", "decode"):
        assert value(metrics, "rooms_opened_total", side=side) == 3
        assert value(metrics, "rooms_ended_total", side=side, status="success", error="") == 3
        assert value(metrics, "transfer_bytes_total", side=side, component="kv", transport="loopback") == nbytes
        assert value(metrics, "handover_seconds_count", side=side, status="success") == 3
        for stage in ("waiting", "transfer"):
            assert value(metrics, "room_stage_seconds_count", side=side, stage=stage) == 3
        assert value(metrics, "peers", side=side, transport="loopback") == 1
        assert value(metrics, "rows_held_seconds_count", side=side) is None
        for state in ("waiting", "transferring", "success", "failed"):
            assert value(metrics, "rooms", side=side, state=state) == 0
        assert value(metrics, "control_faults_total", side=side) == 0
    pieces = 3 * 2 * len(KV.layout().components[0].tensors)
    assert value(metrics, "transfer_pieces_total", side="prefill", component="kv", transport="loopback") == pieces
    assert value(metrics, "chunks_total", side="prefill", transport="loopback", outcome="ok") == 3
    assert value(metrics, "chunk_seconds_count", side="prefill", transport="loopback") == 3
    assert value(metrics, "tickets", side="prefill") == value(metrics, "parked_offers", side="prefill") == 0
    assert value(metrics, "unfenced_peers", side="decode") == 0


def test_the_stages_of_a_room_add_up_to_its_hand_over(world, metrics):
    source, destination = pair(world, observers=[metrics])
    hand_over(source, destination)
    settle(world)
    for side in ("prefill", "decode"):
        stages = [value(metrics, "room_stage_seconds_sum", side=side, stage=stage) for stage in ("waiting", "transfer")]
        whole = value(metrics, "handover_seconds_sum", side=side, status="success")
        assert sum(stages) == pytest.approx(whole, abs=1e-9)


def test_failures_by_reason_and_quarantined_rows(world, metrics):
    gate = Gate()
    (source,) = world.prefill(KV.layout(), transports=[LoopbackTransport("gated", fail=gate)], observers=[metrics])
    (destination,) = world.decode(KV.layout(), observers=[metrics])
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    gate.wait_entered()
    receiver.abort()
    wait_over(sender, receiver)
    settle(world)
    for side in ("prefill", "decode"):
        assert value(metrics, "rooms_ended_total", side=side, status="failed", error="TransferAborted") == 1
        assert value(metrics, "quarantined_rows", side=side) == 2
        assert value(metrics, "quarantined_rooms", side=side) == 1
        assert value(metrics, "rooms", side=side, state="failed") == 1
        assert value(metrics, "rows_held_seconds_count", side=side) is None
    assert value(metrics, "tickets", side="prefill") == 1
    gate.open()
    wait_released(sender, receiver)
    settle(world)
    for side in ("prefill", "decode"):
        wait(lambda side=side: value(metrics, "rows_held_seconds_count", side=side) == 1)
        assert value(metrics, "quarantined_rows", side=side) == 0
    # It is closed: nobody knows its number any more.
    sender.close()
    receiver.close()
    wait(lambda: value(metrics, "rooms", side="prefill", state="failed") == 0)


def test_a_failed_write_has_no_bytes(world, metrics):
    transport = LoopbackTransport("broken", fail=lambda ticket: "the wire broke")
    (source,) = world.prefill(KV.layout(), transports=[transport], observers=[metrics])
    (destination,) = world.decode(KV.layout(), observers=[metrics])
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    failed(sender, "the wire broke")
    failed(receiver, "the wire broke")
    settle(world)
    assert value(metrics, "chunks_total", side="prefill", transport="loopback", outcome="failed") == 1
    assert value(metrics, "transfer_bytes_total", side="prefill", component="kv", transport="loopback") is None
    assert value(metrics, "rooms_ended_total", side="prefill", status="failed", error="TransferFailed") == 1


def test_parked_offers_and_lost_peers(world, metrics):
    source, destination = pair(world, observers=[metrics])
    receiver = destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5]}, 8)
    wait(lambda: value(metrics, "parked_offers", side="prefill") == 1)
    source.manager.close()
    failed(receiver, error=errors.PeerLost)
    settle(world)
    wait(lambda: value(metrics, "peers_lost_total", side="decode") == 1)
    assert value(metrics, "peers", side="decode", transport="loopback") is None


def test_counters_stay_when_a_rank_closes(world, metrics):
    source, destination = pair(world, observers=[metrics])
    hand_over(source, destination)
    settle(world)
    side = source.manager.side
    source.manager._control.post(lambda: side.on_frame("in:stranger", b"hello?"))
    wait(lambda: value(metrics, "frames_dropped_total", side="prefill", kind="ProtocolError") == 1)
    before = {(each.name, str(each.labels)): each.value for each in samples(metrics) if each.name.endswith("_total")}
    source.manager.close()
    destination.manager.close()
    after = {(each.name, str(each.labels)): each.value for each in samples(metrics) if each.name.endswith("_total")}
    assert {key for key, number in before.items() if after[key] < number} == set()
    assert value(metrics, "rooms", side="prefill", state="success") is None


def test_what_peers_say_makes_no_labels(world, metrics):
    """Room numbers, reasons, and names that a peer made up are in no label."""
    source, destination = pair(world, FULL, observers=[metrics])
    sender, receiver = source.manager.sender(77_001), destination.manager.receiver(77_001)
    receiver.offer({"kv": [4, 5], "conv": [1]}, 8)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    side = destination.manager.side
    peer = next(iter(destination.manager._control._dialled))
    (part,) = side.core.account(77_001).parts
    lie = Done(77_001, part.epoch, 0, 1, {f"made up {number}": 9 for number in range(200)})
    destination.manager._control.post(lambda: side.perform(side.core.handle(peer, lie, side.context.now())))
    wait_over(receiver)
    settle(world)
    sender.abort("a reason of 77001")
    wait_over(sender)
    settle(world)
    told = samples(metrics)
    assert value(metrics, "transfer_bytes_total", side="decode", component="other", transport="loopback") == 1800
    labels = {text for sample in told for text in sample.labels.values()}
    assert not [text for text in labels if "made up" in text or "77001" in text or "reason" in text]
    assert {name for sample in told for name in sample.labels} <= {
        "side", "status", "error", "component", "transport", "outcome", "stage", "state", "kind", "le",
    }  # fmt: skip
    wait_released(sender, receiver)
    settle(world)


def test_a_handshake_that_does_not_hold(world, metrics):
    world.prefill(KV.layout(), observers=[metrics])
    (other,) = world.decode(Model(("kv",), dtype="float16").layout(), observers=[metrics])
    failed(other.manager.receiver(9), "dtype")
    settle(world)
    for side in ("prefill", "decode"):
        wait(lambda side=side: value(metrics, "handshakes_refused_total", side=side, error="LayoutMismatch") == 1)


def test_an_error_that_nobody_knows_is_other(metrics):
    from kvbaton.observe.base import Figures, ObservedRank

    rank = ObservedRank("decode", "i", kb.Coords(), frozenset(), 0.0, Figures)
    metrics.handshake_refused(rank, "Made Up By A Peer", "")
    assert value(metrics, "handshakes_refused_total", side="decode", error="other") == 1


def test_one_registry_takes_one(metrics):
    with pytest.raises(errors.ConfigurationError, match="make one Metrics"):
        Metrics(metrics.registry)


def test_several_ranks_of_one_process_add_up(world, metrics):
    layouts = [KV.layout(rank, 2) for rank in range(2)]
    world.prefill(*layouts, observers=[metrics])
    (destination,) = world.decode(KV.layout(), observers=[metrics])
    source, other = world.ranks[:2]
    receiver = destination.manager.receiver(0)
    receiver.offer({"kv": [4, 5]}, 8)
    senders = [rank.manager.sender(0) for rank in (source, other)]
    wait(lambda: value(metrics, "rooms", side="prefill", state="transferring") == 2)
    for sender in senders:
        sender.finish({"kv": [0, 1]}, (0, 8))
    wait_over(receiver, *senders)
    settle(world)
    assert value(metrics, "peers", side="decode", transport="loopback") == 2
    assert value(metrics, "peers", side="prefill", transport="loopback") == 2
    assert value(metrics, "rooms", side="prefill", state="success") == 2
