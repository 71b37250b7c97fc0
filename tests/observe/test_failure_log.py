"""The line of a room that failed explains it; there is one, and one when rows that were held back came free."""

import json
import logging
import re

import pytest
from heard import settle
from rank_world import Model, wait, wait_over, wait_released
from room_pairs import KV, Gate, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors
from kvbaton.observe.log import one_line
from kvbaton.transport.loopback import LoopbackTransport

BOTH = Model(("kv", "conv"))


def lines(caplog, side, event="room_failed"):
    found = [record for record in caplog.records if record.name == "kvbaton.rooms"]
    return [record for record in found if record.kvbaton["side"] == side and record.kvbaton["event"] == event]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "kvbaton")
    return caplog


def test_the_line_of_a_room_whose_peer_died(world, log):
    source, destination = pair(world, BOTH)
    sender, receiver = source.manager.sender(3), destination.manager.receiver(3)
    receiver.offer({"kv": [4, 5], "conv": [1]}, 8)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    sender.send({"kv": [0, 1]}, (0, 8))
    wait(lambda: sender.bytes_by_component)
    control = destination.manager._control
    control.post(lambda: control._lost(next(iter(control._dialled)), "its process ended"))
    failed(receiver, "its process ended", error=errors.PeerLost)
    failed(sender, error=errors.PeerLost)
    wait_released(sender, receiver)
    settle(world)
    (line,) = lines(log, "decode")
    told = line.kvbaton
    assert line.levelno == logging.WARNING
    assert (told["room"], told["error"], told["reason"]) == (3, "PeerLost", receiver.reason)
    assert (told["instance"], told["rank"]) == (destination.manager.instance, "tp0/1 pp0/1 cp0/1 dp0/1")
    assert told["stage"] == "transfer"
    assert (told["offered_tokens"], told["prefix"], told["rows"]) == (8, 0, 3)
    kv = sum(2 * tensor.row_stride for tensor in BOTH.layout().components[0].tensors)
    conv = sum(tensor.row_stride for tensor in BOTH.layout().components[1].tensors)
    # The Done that would have said what came never came.
    assert told["bytes"] == {"kv": {"done": 0, "expected": kv}, "conv": {"done": 0, "expected": conv}}
    (part,) = told["parts"]
    assert part == {
        "part": 0,
        "rank": "tp0/1 pp0/1 cp0/1 dp0/1",
        "instance": source.manager.instance,
        "transport": "loopback",
        "epoch": 1,
        "state": "may write",
        "writes": 0,
    }
    assert set(told["seconds"]) == {"waiting", "transfer", "connected_after", "offered_after"}
    assert all(0 <= seconds < 60 for seconds in told["seconds"].values())
    assert told["rows_released"] is False
    assert told["held_by"] == ["part 0 (tp0/1 pp0/1 cp0/1 dp0/1): it has not confirmed that it writes no more"]
    (free,) = lines(log, "decode", "rows_released")
    assert free.kvbaton["rows"] == 3
    assert free.kvbaton["held_seconds"] >= 0

    (line,) = lines(log, "prefill")
    told = line.kvbaton
    assert (told["room"], told["sent_tokens"], told["offered_tokens"]) == (3, 8, 8)
    assert told["bytes"] == {"kv": {"done": kv, "expected": kv}, "conv": {"done": 0, "expected": conv}}
    assert told["parts"][0]["instance"] == destination.manager.instance
    assert told["rows_released"] is True
    assert lines(log, "prefill", "rows_released") == []


def test_the_text_alone_has_all_of_it(world, log):
    source, destination = pair(world)
    sender, receiver = start(source, destination, 4)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    receiver.abort("the client went away")
    wait_over(sender, receiver)
    settle(world)
    for side, room in (("prefill", sender), ("decode", receiver)):
        (line,) = lines(log, side)
        text = line.getMessage()
        assert line.levelno == logging.INFO
        head, details = re.fullmatch(r"(.*?) (\{.*\})", text).groups()
        assert head == f"{side}: room 4 failed: {room.reason}"
        left = {key: value for key, value in line.kvbaton.items() if key not in ("event", "side", "room", "reason")}
        assert json.loads(details) == left
        assert json.loads(json.dumps(line.kvbaton)) == line.kvbaton


def test_a_write_under_way_holds_rows_back_and_it_is_said_why(world, log):
    gate = Gate()
    (source,) = world.prefill(KV.layout(), transports=[LoopbackTransport("gated", fail=gate)])
    (destination,) = world.decode(KV.layout())
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    gate.wait_entered()
    sender.abort("enough")
    wait_over(sender, receiver)
    settle(world)
    (line,) = lines(log, "prefill")
    assert line.kvbaton["rows_released"] is False
    assert line.kvbaton["rows"] == 2
    assert line.kvbaton["held_by"] == ["part 0 (tp0/1 pp0/1 cp0/1 dp0/1): 1 writes have not ended"]
    (theirs,) = lines(log, "decode")
    assert theirs.kvbaton["parts"][0]["state"] == "may write"
    assert lines(log, "prefill", "rows_released") == []
    gate.open()
    wait_released(sender, receiver)
    settle(world)
    wait(lambda: lines(log, "prefill", "rows_released") and lines(log, "decode", "rows_released"))
    assert len(lines(log, "prefill")) == len(lines(log, "decode")) == 1


def test_a_room_that_nobody_joined(world, log):
    """It failed before the other side was there: the line says how far it came."""
    (destination,) = world.decode(KV.layout())
    receiver = destination.manager.receiver(2)
    receiver.offer({"kv": [4, 5]}, 8)
    failed(receiver, "default")
    settle(world)
    (line,) = lines(log, "decode")
    assert line.kvbaton["stage"] == "handshake"
    assert line.kvbaton["parts"] == []
    assert line.kvbaton["rows_released"] is True
    (source,) = world.prefill(KV.layout())
    sender = source.manager.sender(7)
    sender.close()
    wait_over(sender)
    settle(world)
    (line,) = lines(log, "prefill")
    assert line.kvbaton["stage"] == "waiting"
    assert "closed before the room had ended" in line.kvbaton["reason"]


def test_a_room_closed_in_the_middle_is_explained_all_the_same(world, log):
    """The core forgets it at once, the line has its parts."""
    source, destination = pair(world)
    sender, receiver = start(source, destination, 6)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    sender.close()
    wait_over(sender, receiver)
    settle(world)
    (line,) = lines(log, "prefill")
    assert [part["instance"] for part in line.kvbaton["parts"]] == [destination.manager.instance]
    assert line.kvbaton["rows_released"] is True
    wait_released(receiver)
    settle(world)


def test_a_room_that_succeeds_says_nothing(world, log):
    source, destination = pair(world)
    hand_over(source, destination)
    settle(world)
    assert lines(log, "prefill") == lines(log, "decode") == []


def test_an_error_of_our_own_makes_one_line(world, log, monkeypatch):
    """What cannot be delivered fails a room that counts as well ended for the core."""
    source, destination = pair(world)
    side = destination.manager.side
    monkeypatch.setattr(side, "_deliver", lambda action: 1 / 0)
    sender, receiver = start(source, destination, 8)
    sender.finish({"kv": [0, 1]}, (0, 8))
    failed(receiver, "division by zero")
    wait_released(receiver)
    settle(world)
    (line,) = lines(log, "decode")
    assert line.kvbaton["error"] == "TransferFailed"
    assert line.levelno == logging.WARNING


def test_a_reason_of_a_peer_cannot_break_the_line(world, log):
    source, destination = pair(world)
    sender, receiver = start(source, destination, 9)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    sender.abort("first\nWARNING kvbaton: room 1 failed\x1b[2J")
    wait_over(sender, receiver)
    settle(world)
    for side in ("prefill", "decode"):
        (line,) = lines(log, side)
        assert line.getMessage().isprintable()
    assert "\n" in line.kvbaton["reason"]
    assert one_line("as it is: é漢") == "as it is: é漢"
    assert one_line("a\nb\x00") == "a\\nb\\x00"


def test_names_of_components_that_a_peer_made_up_are_left_out(world, log):
    """A Done names components as it likes; one that a second part still waits for has counted them."""
    source, destination = pair(world)
    sender, receiver = start(source, destination, 5)
    wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
    receiver.count("nonsense\n", 7)
    receiver.abort()
    wait_over(sender, receiver)
    settle(world)
    (line,) = lines(log, "decode")
    assert list(line.kvbaton["bytes"]) == ["kv"]
