"""Aborts, and numbers that are in use: each room fails alone, and its rows come back when nothing can write them."""

import random

import pytest
from rank_world import succeeded, wait, wait_over, wait_released
from room_pairs import failed, gated, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors


class TestAborts:
    def test_after_success_and_twice(self, any_world):
        """D07: success is final, on both sides, and the next life of the number starts clean."""
        source, destination = pair(any_world)
        sender, receiver = start(source, destination, 41)
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        for _ in range(2):
            sender.abort()
            receiver.abort()
        destination.manager.receiver(99).abort()
        source.manager.sender(98).abort()
        hand_over(source, destination, 42)
        assert (sender.poll(), receiver.poll()) == (kb.Status.SUCCESS, kb.Status.SUCCESS)
        assert (sender.reason, receiver.reason) == ("", "")
        sender.close()
        receiver.close()
        hand_over(source, destination, 41)

    def test_of_a_room_that_the_other_side_never_saw(self, any_world):
        source, destination = pair(any_world)
        hand_over(source, destination)
        receiver = destination.manager.receiver(99)
        receiver.offer({"kv": [4, 5]}, 8)
        receiver.abort("not wanted any more")
        failed(receiver, "not wanted any more", error=errors.TransferAborted)
        wait_released(receiver)
        receiver.close()
        any_world.assert_empty()
        destination.check_rest()

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_before_the_data(self, any_world, side):
        source, destination = pair(any_world)
        sender, receiver = start(source, destination)
        (sender if side == "prefill" else receiver).abort("stop here")
        failed(sender, "stop here", error=errors.TransferAborted)
        failed(receiver, "stop here", error=errors.TransferAborted)
        wait_released(sender, receiver)
        sender.finish({"kv": [0, 1]}, (0, 8))
        sender.close()
        receiver.close()
        any_world.assert_empty()
        destination.check_rest()
        hand_over(source, destination)

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_in_flight(self, world, side):
        """D08: failed at once, released only when the write is over; the gate stands for a write of six seconds."""
        source, destination, gate = gated(world)
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        gate.wait_entered()
        (sender if side == "prefill" else receiver).abort("too slow")
        failed(sender, "too slow")
        failed(receiver, "too slow")
        # Two rounds on the control connection have passed by now; the rows are still in use.
        other = start(source, destination, 1)
        other[1].abort()
        wait_released(*other)
        assert not receiver.rows_released
        assert not sender.rows_released
        destination.check_rest()
        gate.open()
        wait_released(sender, receiver)
        assert receiver.poll() is kb.Status.FAILED
        for room in (sender, receiver, *other):
            room.close()
        world.assert_empty()

    def test_a_number_is_in_use_until_its_last_write(self, world):
        source, destination, gate = gated(world)
        sender, receiver = start(source, destination, 3)
        sender.finish({"kv": [0, 1]}, (0, 8))
        gate.wait_entered()
        sender.close()
        receiver.close()
        failed(receiver)
        with pytest.raises(errors.RoomError, match="room 3 is in use"):
            source.manager.sender(3)
        with pytest.raises(errors.RoomError, match="room 3 is in use"):
            destination.manager.receiver(3)
        gate.open()
        wait_released(sender, receiver)
        wait(lambda: not source.manager.side.rooms.entries() and not destination.manager.side.rooms.entries())
        world.assert_empty()


class TestRoomsInUse:
    def test_d09(self, any_world):
        source, destination = pair(any_world)
        sender, receiver = start(source, destination, 7)
        with pytest.raises(errors.RoomError, match="room 7 is in use"):
            source.manager.sender(7)
        with pytest.raises(errors.RoomError, match="room 7 is in use"):
            destination.manager.receiver(7)
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        assert (sender.poll(), receiver.poll()) == (kb.Status.SUCCESS, kb.Status.SUCCESS)
        hand_over(source, destination, 7)
        assert sender.poll() is kb.Status.SUCCESS

    @pytest.mark.parametrize("seed", range(4))
    def test_any_order_of_calls(self, world, seed):
        """D09's property run at the managers: nothing but RoomError, and nothing is kept."""
        draw = random.Random(seed)
        source, destination = pair(world)
        rooms = []
        for _ in range(250):
            call = draw.choice(("sender", "receiver", "offer", "finish", "abort", "close", "poll"))
            made = source.manager.sender if call == "sender" else destination.manager.receiver
            try:
                if call in ("sender", "receiver"):
                    rooms.append(made(draw.randrange(3)))
                elif rooms:
                    room = draw.choice(rooms[-6:])
                    if call == "offer" and isinstance(room, kb.Receiver):
                        room.offer({"kv": [4, 5]}, 8)
                    elif call == "finish" and isinstance(room, kb.Sender):
                        room.finish({"kv": [0, 1]}, (0, 8))
                    elif call in ("abort", "close", "poll"):
                        getattr(room, call)()
            except errors.RoomError:
                pass
        for room in rooms:
            room.close()
        wait_released(*rooms)
        wait_over(*rooms)
        world.assert_empty()
        assert source.manager._control.faults == destination.manager._control.faults == 0
        # Another number: an abort of an earlier life may still be on its way, and says nothing of which life it means.
        hand_over(source, destination, 9)

    def test_used_against_its_life_cycle(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        with pytest.raises(errors.RoomError, match="offered already"):
            receiver.offer({"kv": [4, 5]}, 8)
        sender.finish({"kv": [0, 1]}, (0, 8))
        with pytest.raises(errors.RoomError, match="finished"):
            sender.send({"kv": [0]}, (0, 4))
        succeeded(sender, receiver)
        sender.close()
        receiver.close()
        with pytest.raises(errors.RoomError, match="closed"):
            sender.finish()
        with pytest.raises(errors.RoomError, match="closed"):
            receiver.offer({"kv": [4, 5]}, 8)
