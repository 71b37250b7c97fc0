"""What observers hear, in which order and on which thread; and that they can do no harm."""

import logging
import threading

import pytest
from heard import Heard, settle
from rank_world import FAST, Model, succeeded, wait, wait_over, wait_released
from room_pairs import FULL, KV, Gate, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors
from kvbaton.observe import Observer
from kvbaton.observe.base import CONTROL
from kvbaton.transport.loopback import LoopbackTransport


def test_a_room_that_succeeds_is_told_in_order(world):
    heard = Heard()
    source, destination = pair(world, observers=[heard])
    hand_over(source, destination, 5)
    settle(world)
    assert heard.of_room(5, "prefill") == [
        "room_opened",
        "room_offered",
        "room_transferring",
        "chunk_written",
        "room_ended",
        "rows_released",
    ]
    told = heard.of_room(5, "decode")
    # The engine offers while the prefill rank is greeted: whichever is first.
    assert told[0] == "room_opened"
    assert sorted(told[1:3]) == ["room_connected", "room_offered"]
    assert told[3:] == ["room_transferring", "part_delivered", "room_ended", "rows_released"]
    for side in ("prefill", "decode"):
        (room,) = heard.rooms(side)
        assert room.status is kb.Status.SUCCESS
        assert room.opened <= room.offered <= room.transferring <= room.ended <= room.released
        assert room.error is None
        assert not room.held
        assert [part.done for part in room.parts] == [True]
        assert (room.parts[0].tokens, room.parts[0].prefix) == (8, 0)
    assert heard.rooms("prefill")[0].sent_tokens == 8
    assert heard.rooms("decode")[0].parts[0].peer.instance == source.manager.instance


def test_who_hears_on_which_thread(world):
    heard = Heard()
    source, destination = pair(world, observers=[heard])
    hand_over(source, destination)
    settle(world)
    mine = threading.current_thread().name
    for each in heard.events:
        if each.name in ("rank_started", "room_opened"):
            assert each.thread == mine
        else:
            assert each.thread.startswith("kvbaton-control-"), each
    for rank in (source, destination):
        rank.manager.close()
    assert [each.name for each in heard.events[:2]] == ["rank_started", "rank_started"]
    assert [each.thread for each in heard.named("rank_closed")] == [mine, mine]


MODELS = {
    "all kinds": Model(("kv", "window", "latent", "conv", "recurrent", "aux")),
    "heads": Model(("kv", "aux")),
}
GRIDS = {"one to one": (1, 1), "two to one": (2, 1), "one to two": (1, 2), "replicas share": (2, 2)}


@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("aux", ["control", "fabric"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_that_are_expected_are_those_that_move(world, model, grid, aux, prefix):
    """Both sides know beforehand, by component, how many bytes a room moves; what moved was counted by the writes."""
    heard, parts = Heard(), MODELS[model].parts
    prefills, decodes = GRIDS[grid]
    settings = kb.Settings(**{**vars(FAST), "aux": aux})
    options = {"observers": [heard], "settings": settings}
    world.prefill(*(MODELS[model].layout(rank, prefills) for rank in range(prefills)), **options)
    world.decode(*(MODELS[model].layout(rank, decodes, page_size=2) for rank in range(decodes)), **options)
    source, destination = world.ranks[:prefills], world.ranks[prefills:]
    paged = [name for name in parts if name in ("kv", "window", "latent")]
    slots = {name: [2] for name in parts if name in ("conv", "recurrent")}
    receivers = [rank.manager.receiver(3) for rank in destination]
    for receiver in receivers:
        first = {"window": max(prefix, 14 - 10)}
        pages = {name: list(range(7 - first.get(name, prefix) // 2)) for name in paged}
        receiver.offer({**pages, **slots}, 14, prefix=prefix, aux=1)
    senders = [rank.manager.sender(3) for rank in source]
    for sender in senders:
        sender.send({name: [0, 1, 2] for name in paged}, (0, 9))
        sender.finish({**{name: [2, 3] for name in paged}, **slots}, (9, 14), aux=0)
    succeeded(*receivers, *senders)
    settle(world)
    for room in (*heard.rooms("prefill"), *heard.rooms("decode")):
        expected = {}
        for part in room.parts:
            for name, nbytes in part.expected.items():
                expected[name] = expected.get(name, 0) + nbytes
        assert {name: nbytes for name, nbytes in room.moved.items() if nbytes} == expected
        assert set(expected) <= set(parts)
    moved = [room.moved for room in heard.rooms("decode")]
    assert any(moved)
    # What chunks told adds up to what rooms counted.
    for name, side in (("chunk_written", "prefill"), ("part_delivered", "decode")):
        told = sum(nbytes for each in heard.named(name) for nbytes in each.more[0].moved.values())
        assert told == sum(nbytes for room in heard.rooms(side) for nbytes in room.moved.values())
        by_control = [each for each in heard.named(name) if each.more[0].transport == CONTROL]
        assert bool(by_control) == (aux == "control")


def test_chunks_have_their_pieces_and_times(world):
    heard = Heard()
    source, destination = pair(world, observers=[heard])
    hand_over(source, destination)
    settle(world)
    (written,) = [each.more[0] for each in heard.named("chunk_written")]
    (layer_bytes,) = {tensor.row_stride for tensor in KV.layout().components[0].tensors}
    tensors = len(KV.layout().components[0].tensors)
    assert written.moved == {"kv": 2 * layer_bytes * tensors}
    assert written.pieces == {"kv": 2 * tensors}
    assert (written.transport, written.part, written.error) == ("loopback", 0, "")
    assert written.started <= written.ended
    assert written.ticket > 0


def test_a_write_that_fails_is_told(world):
    heard = Heard()
    transport = LoopbackTransport("broken-one", fail=lambda ticket: "the wire broke")
    (source,) = world.prefill(KV.layout(), transports=[transport], observers=[heard])
    (destination,) = world.decode(KV.layout())
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    failed(sender, "the wire broke")
    failed(receiver, "the wire broke")
    wait_released(sender, receiver)
    settle(world)
    (written,) = [each.more[0] for each in heard.named("chunk_written")]
    assert written.error == "the wire broke"
    assert heard.rooms("prefill")[0].error is errors.TransferFailed
    assert heard.rooms("prefill")[0].moved == {}


def test_rows_are_held_back_while_a_write_goes_on(world):
    heard, gate = Heard(), Gate()
    (source,) = world.prefill(KV.layout(), transports=[LoopbackTransport("gated", fail=gate)], observers=[heard])
    (destination,) = world.decode(KV.layout())
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    gate.wait_entered()
    sender.abort("enough")
    wait_over(sender, receiver)
    settle(world)
    figures = source.manager.side.figures()
    assert (figures.quarantined_rooms, figures.quarantined_rows, figures.tickets) == (1, 2, 1)
    (room,) = heard.rooms("prefill")
    assert room.held
    assert room.aborted
    assert room.released is None
    assert [part.writes for part in room.parts] == [1]
    gate.open()
    wait_released(sender, receiver)
    settle(world)
    wait(lambda: room.released is not None)
    assert source.manager.side.figures().quarantined_rows == 0


def test_an_observer_that_raises_changes_nothing(world, caplog):
    class Broken(Heard):
        pass

    def broken(self, *arguments):
        raise ZeroDivisionError("an observer's own")

    for name in list(vars(Heard)):
        if name in vars(Observer) and not name.startswith("_"):
            setattr(Broken, name, broken)
    heard = Heard()
    source, destination = pair(world, observers=[Broken(), heard])
    hand_over(source, destination, 1)
    hand_over(source, destination, 2)
    settle(world)
    assert heard.of_room(2, "prefill")[-1] == "rows_released"
    world.assert_no_faults()
    said = [record for record in caplog.records if "an observer failed" in record.message]
    told = [record.message for record in said if record.levelno == logging.ERROR]
    # Once for each of its methods and each rank, not for each room.
    assert len(told) == len(set(told)) > 5


def test_what_is_no_observer_is_refused(world):
    with pytest.raises(errors.ConfigurationError, match="observers has a str"):
        world.prefill(KV.layout(), observers=["metrics"])


def test_peers_and_refusals_are_told(world):
    heard = Heard()
    source, destination = pair(world, observers=[heard])
    hand_over(source, destination)
    settle(world)
    (other,) = world.decode(Model(("kv",), dtype="float16").layout(), observers=[heard])
    failed(other.manager.receiver(9), "dtype")
    settle(world)
    destination.manager.close()
    wait(lambda: len(heard.named("peer_lost")) == 1)
    joined = {(each.subject.side, each.more[0].instance) for each in heard.named("peer_joined")}
    assert joined == {("prefill", destination.manager.instance), ("decode", source.manager.instance)}
    (lost,) = heard.named("peer_lost")
    assert lost.more[0].instance == destination.manager.instance
    wait(lambda: len(heard.named("handshake_refused")) == 2)
    assert {(each.subject.side, each.more[0]) for each in heard.named("handshake_refused")} == {
        ("prefill", "LayoutMismatch"),
        ("decode", "LayoutMismatch"),
    }


def test_a_frame_of_a_stranger_is_told(world):
    heard = Heard()
    source, _ = pair(world, observers=[heard])
    control = source.manager._control
    control.post(lambda: source.manager.side.on_frame("in:stranger", b"hello?"))
    wait(lambda: heard.named("frame_dropped"))
    (dropped,) = heard.named("frame_dropped")
    assert dropped.more[0] == "ProtocolError"
    assert source.manager.side.figures().dropped_frames == {"ProtocolError": 1}


def test_figures_of_a_rank_with_rooms(world):
    source, destination = pair(world, FULL)
    receiver = destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [1]}, 8, aux=0)
    wait(lambda: receiver.poll() is kb.Status.TRANSFERRING)
    wait(lambda: source.manager.side.figures().parked_offers == 1)
    sender = source.manager.sender(1)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    for rank in (source, destination):
        figures = rank.manager.side.figures()
        assert figures.rooms == {"transferring": 1}
        assert figures.peers == {"loopback": 1}
        assert figures.parked_offers == figures.quarantined_rows == figures.control_faults == 0
    sender.abort()
    wait_over(sender, receiver)
    wait_released(sender, receiver)
    settle(world)
