"""Errors of our own, where nobody waits for them."""

import threading

import pytest
from rank_world import Model, wait, wait_over, wait_released
from room_pairs import broken, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors


class TestErrorsInside:
    """An error where nobody waits for it fails its room, says why, and harms no other."""

    @pytest.mark.parametrize("step", ["open", "submit", "finish", "offer"])
    @pytest.mark.parametrize("error", [errors.RowsError("broken inside"), ZeroDivisionError("broken inside")])
    def test_of_the_prefill_core(self, world, monkeypatch, step, error):
        source, destination = pair(world)
        hand_over(source, destination)
        core = source.manager.side.core
        good = getattr(core, step)
        monkeypatch.setattr(core, step, lambda room, *rest: broken(error) if room == 1 else good(room, *rest))
        sender, receiver = start(source, destination, 1)
        sender.send({"kv": [0]}, (0, 4))
        sender.finish({"kv": [1]}, (4, 8))
        failed(sender, "broken inside")
        receiver.abort()
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        hand_over(source, destination, 2)
        world.assert_empty()

    @pytest.mark.parametrize("step", ["open", "offer"])
    @pytest.mark.parametrize("error", [errors.RowsError("broken inside"), ZeroDivisionError("broken inside")])
    def test_of_the_decode_core(self, world, monkeypatch, step, error):
        source, destination = pair(world)
        core = destination.manager.side.core
        good = getattr(core, step)
        monkeypatch.setattr(core, step, lambda room, *a, **b: broken(error) if room == 1 else good(room, *a, **b))
        sender, receiver = start(source, destination, 1)
        failed(receiver, "broken inside")
        sender.close()
        receiver.close()
        wait_released(sender, receiver)
        hand_over(source, destination, 2)
        world.assert_empty()

    def test_in_a_room_that_was_closed_before_it_began(self, world, monkeypatch):
        """Its number is free again: the core never knew it, and nothing else will free it."""
        source, _ = pair(world)
        held = threading.Event()
        source.manager._control.post(lambda: held.wait(20))
        monkeypatch.setattr(source.manager.side.core, "open", lambda *arguments: broken(ZeroDivisionError()))
        sender = source.manager.sender(1)
        sender.close()
        held.set()
        wait_released(sender)
        world.assert_empty()
        assert sender.poll() is kb.Status.FAILED

    def test_of_a_write(self, world, monkeypatch):
        source, destination = pair(world)
        transport = source.manager._transports["loopback"]
        monkeypatch.setattr(transport, "write", lambda *arguments: broken(ZeroDivisionError("broken inside")))
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        failed(sender, "broken inside")
        failed(receiver, "broken inside")
        wait_released(sender, receiver)
        monkeypatch.undo()
        hand_over(source, destination, 1)

    def test_of_a_ticket(self, world):
        source, destination = pair(world)
        transport = source.manager._transports["loopback"]
        transport.fail = lambda ticket: "the wire broke"
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        failed(sender, "the wire broke")
        failed(receiver, "the wire broke")
        wait_released(sender, receiver)
        assert sender.bytes_by_component == {}
        transport.fail = None
        hand_over(source, destination, 1)

    @pytest.mark.parametrize(("side", "name"), [("source", "_with_aux"), ("destination", "_deliver")])
    def test_of_the_aux_data(self, world, monkeypatch, side, name):
        source, destination = pair(world, Model(("kv", "aux")))
        monkeypatch.setattr(
            {"source": source, "destination": destination}[side].manager.side,
            name,
            lambda *arguments: broken(ZeroDivisionError("broken inside")),
        )
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5]}, 8, aux=1)
        sender.finish({"kv": [0, 1]}, (0, 8), aux=1)
        failed(receiver, "broken inside")
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        world.assert_empty()

    @pytest.mark.parametrize("side", ["source", "destination"])
    def test_of_a_turn(self, world, monkeypatch, side):
        """Commands and frames go on while timers fail, and close still ends the thread."""
        source, destination = pair(world)
        rank = {"source": source, "destination": destination}[side]
        monkeypatch.setattr(rank.manager.side.core, "tick", lambda now: broken(ZeroDivisionError()))
        wait(lambda: rank.manager._control.faults > 1)
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        wait_over(receiver, sender)
        rank.manager.close()
        assert not rank.manager._control._thread.is_alive()
