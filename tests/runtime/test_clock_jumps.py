"""The time of day is set while rooms are under way: nothing of kvbaton counts it."""

import time

import pytest
from rank_world import World, succeeded, wait_released
from room_pairs import hand_over, pair, start


@pytest.mark.parametrize("jump", [-1e9, 1e9])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_time_of_day_jumps(monkeypatch, transport, jump):
    world = World(transport)
    try:
        source, destination = pair(world)
        hand_over(source, destination)
        sender, receiver = start(source, destination, 1)
        real, nanoseconds = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(jump * 1e9))
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        wait_released(sender, receiver)
        for room in (sender, receiver):
            room.close()
        hand_over(source, destination, 2)
        world.assert_empty()
        world.assert_no_faults()
    finally:
        world.close()
