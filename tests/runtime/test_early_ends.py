"""Rooms that one side gives up before the other has begun: nobody waits for the deadline."""

import pytest
from rank_world import Model, succeeded, wait_over, wait_released
from room_pairs import KV, failed, pair

import kvbaton as kb


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_gives_up_before_the_other_opens_the_room(world, side):
    source, destination = pair(world)
    # So that the handshake is over.
    receiver, sender = destination.manager.receiver(0), source.manager.sender(0)
    receiver.offer({"kv": []}, 0)
    sender.finish()
    succeeded(receiver, sender)
    if side == "prefill":
        room = source.manager.sender(1)
        room.abort("the client went away")
        room.close()
        other = destination.manager.receiver(1)
        other.offer({"kv": [4]}, 4)
    else:
        room = destination.manager.receiver(1)
        room.offer({"kv": [4]}, 4)
        room.abort("the client went away")
        room.close()
        # The Offer and the Abort are on their way.
        receiver = destination.manager.receiver(2)
        receiver.offer({"kv": []}, 0)
        sender = source.manager.sender(2)
        sender.finish()
        succeeded(receiver, sender)
        other = source.manager.sender(1)
    failed(other, "the client went away")


def test_a_number_that_is_used_again_while_its_first_room_waits_for_the_handshake(world):
    """The first room's end is no news for the second."""
    (source,) = world.prefill(KV.layout())
    (destination,) = world.decode(KV.layout())
    first = destination.manager.receiver(1)
    first.abort("changed its mind")
    wait_released(first)
    first.close()
    receiver, sender = destination.manager.receiver(1), source.manager.sender(1)
    source.fill("kv", [3], (0, 4))
    receiver.offer({"kv": [4]}, 4)
    sender.finish({"kv": [3]}, (0, 4))
    succeeded(receiver, sender)
    destination.check("kv", [4], (0, 4))
    destination.check_rest()


def test_one_of_two_decode_ranks_is_refused_after_the_other_has_offered(world):
    (source,) = world.prefill(KV.layout())
    good, bad = world.decode(KV.layout(0, 2), Model(("kv",), dtype="int16").layout(1, 2))
    sender, receiver = source.manager.sender(1), good.manager.receiver(1)
    receiver.offer({"kv": [4]}, 4)
    other = bad.manager.receiver(1)
    wait_over(other, sender, receiver)
    assert [room.poll() for room in (other, sender, receiver)] == [kb.Status.FAILED] * 3
    for room in (other, sender, receiver):
        assert "dtype is bfloat16 at the source and int16 at the destination" in room.reason
