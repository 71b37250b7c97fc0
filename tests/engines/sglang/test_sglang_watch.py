from __future__ import annotations

import time

import pytest

import kvbaton as kb
from kvbaton.engines.sglang.watch import RoomWatch
from kvbaton.errors import RoomError
from kvbaton.layout import paged_kv, required_bytes


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self):
        self.events = []

    def room_offered(self):
        self.events.append("offered")

    def room_ended(self, status, reason, error):
        self.events.append((status.name, reason))


def manager(role, registry, watch):
    kv = paged_kv(layers=[0], rows=8, page_size=16, heads=2, head_dim=8, dtype="float16")
    memory = kb.SharedMemory(required_bytes([kv])[0])
    return kb.Manager(
        kb.RankLayout((kv,)), [kb.Region.of(memory)], role=role, registry=registry, model="m", observers=[watch]
    )


@pytest.fixture
def sides():
    registry, watch = kb.MemoryRegistry(), RoomWatch()
    with manager("prefill", registry, watch) as prefill, manager("decode", registry, RoomWatch()) as decode:
        yield prefill, decode, watch


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


def opened(prefill, watch, room):
    heard = Heard()
    with watch.opening(heard):
        return prefill.sender(room), heard


def test_a_listener_hears_the_offer_then_the_end(sides):
    prefill, decode, watch = sides
    sender, heard = opened(prefill, watch, 5)
    assert sender.offered is None
    receiver = decode.receiver(5)
    receiver.offer({"kv": [2]}, tokens=20, prefix=16)
    until(lambda: "offered" in heard.events)
    assert sender.offered == (20, 16)
    sender.finish({"kv": [3]}, tokens=(16, 20))
    until(lambda: len(heard.events) == 2)
    assert heard.events == ["offered", ("SUCCESS", "")]


def test_what_happens_to_an_earlier_life_of_a_number_is_not_told_to_the_next(sides):
    prefill, decode, watch = sides
    first, heard = opened(prefill, watch, 6)
    receiver = decode.receiver(6)
    receiver.offer({"kv": [1]}, tokens=16)
    until(lambda: heard.events)
    first.abort("not wanted any more")
    first.close()
    later = Heard()
    second = None

    def again():
        nonlocal second
        try:
            with watch.opening(later):
                second = prefill.sender(6)
        except RoomError:
            return False
        return True

    until(again)
    until(lambda: len(heard.events) == 2)
    assert heard.events[1] == ("FAILED", "not wanted any more")
    assert later.events == []
    second.close()


def test_rooms_that_nobody_listens_to_are_no_matter(sides):
    prefill, _, watch = sides
    sender = prefill.sender(7)
    sender.abort()
    until(lambda: sender.poll().terminal)
    sender.close()
    assert not watch._listeners


def test_listeners_are_dropped_at_the_end(sides):
    prefill, _, watch = sides
    sender, heard = opened(prefill, watch, 8)
    sender.abort("x")
    until(lambda: heard.events)
    sender.close()
    assert not watch._listeners
