"""The same hand-overs by way of managers and rooms: chunks, states with the last one, lists that are empty."""

from __future__ import annotations

import time

import numpy as np
import pytest
import sglang_pools as pools
from sglang_world import World, tp

import kvbaton as kb

KV_HEADS = 4


def hand_over(world, sources, destinations, room):
    """What SGLang's senders and receivers do, without SGLang; gives the states in which they ended."""
    registry = kb.MemoryRegistry()
    managers = []
    try:
        for role, ranks in (("prefill", sources), ("decode", destinations)):
            for each, _ in ranks:
                made = kb.Manager(
                    each.described.layout,
                    each.described.regions,
                    role=role,
                    registry=registry,
                    model="m",
                    transports=["loopback"],
                )
                managers.append((made, each))
        rooms = []
        for manager, each in managers[len(sources) :]:
            receiver = manager.receiver(room)
            pages, start, _ = each.chunks[0]
            rows = each.described.kv_rows(pages, start)
            rows |= each.described.state_rows(each.states, world.tokens, world.prefix).slots
            receiver.offer(rows, each.described.tokens(world.tokens), world.prefix, aux=each.aux)
            rooms.append(receiver)
        for manager, each in managers[: len(sources)]:
            sender = manager.sender(room)
            for pages, start, tokens in each.chunks[:-1]:
                sender.send(each.described.kv_rows(pages, start), tokens)
            pages, start, (first, last) = each.chunks[-1]
            rows = each.described.kv_rows(pages, start)
            rows |= each.described.state_rows(each.states, world.tokens, world.prefix).slots
            sender.finish(rows, (first, each.described.tokens(last)), aux=each.aux)
            rooms.append(sender)
        deadline = time.monotonic() + 20
        while not all(each.poll().terminal for each in rooms) and time.monotonic() < deadline:
            time.sleep(0.001)
        ended = [(each.poll().name, each.reason) for each in rooms]
        for each in rooms:
            each.close()
        return ended
    finally:
        for manager, _ in managers:
            manager.close()


def many_states(world, side, place):
    """Attention, linear attention, a window, and a tail that may be empty."""
    pools.mha(side, place, world.positions(side.role), layers=range(2), heads=KV_HEADS)
    pools.mamba(side, place, layers=[2, 3])
    pages = np.arange(max(world.prefix, world.tokens - 9) // 4, -(-world.tokens // 4))
    pools.window(side, place, pages, layers=range(2), heads=KV_HEADS)
    pools.alike(side, "request_row", [place.row], count=1, row_bytes=8, total=6)
    pools.alike(side, "c128_state", [], count=2, row_bytes=8, total=6)


def payloads(world, side, place):
    window = np.arange(max(world.prefix, world.tokens - 9) // 4, -(-world.tokens // 4))
    return [[np.array(place.slot)], place.swa_pages[window], [place.row], []]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("cut", [None, 20])
def test_rooms_of_ranks_with_many_states(prefill, decode, cut):
    world = World(tokens=45, prefix=8, cut=cut)
    sources = world.ranks("prefill", many_states, tp(prefill), payloads, total_kv_heads=KV_HEADS)
    destinations = world.ranks("decode", many_states, tp(decode), payloads, total_kv_heads=KV_HEADS)
    ended = hand_over(world, sources, destinations, 11)
    assert {state for state, _ in ended} == {"SUCCESS"}, ended
    assert [side.wrong_buffers() for _, side in destinations] == [[]] * decode


def test_rooms_of_the_stages_of_a_pipeline():
    """Each stage sends its layers; the metadata are those of the last one, whatever the buffers of the others hold."""

    def fill(world, side, place):
        stage = side.own.get("pp", (None,))[0]
        if side.role == "prefill":
            side.args.prefill_start_layer = 2 * stage
        layers = {None: range(4), 0: range(2), 1: range(2, 4)}[stage]
        pools.mha(side, place, world.positions(side.role), layers=layers, heads=KV_HEADS)
        pools.mamba(side, place, layers={None: [5, 6], 0: [], 1: [5, 6]}[stage])

    def slot(world, side, place):
        return [[np.array(place.slot)]]

    world = World(tokens=45, prefix=8, cut=20)
    grid = [{"pp": (stage, 2), "tp": (rank, 2)} for stage in range(2) for rank in range(2)]
    sources = world.ranks("prefill", fill, grid, slot, total_kv_heads=KV_HEADS)
    destinations = world.ranks("decode", fill, tp(1), slot, total_kv_heads=KV_HEADS)
    ended = hand_over(world, sources, destinations, 15)
    assert {state for state, _ in ended} == {"SUCCESS"}, ended
    assert [side.wrong_buffers() for _, side in destinations] == [[]]


def test_a_prefix_that_is_the_whole_request():
    """Nothing of the main cache moves, and all of the states do."""
    world = World(tokens=44, prefix=44)
    sources = world.ranks("prefill", many_states, tp(2), payloads, total_kv_heads=KV_HEADS)
    destinations = world.ranks("decode", many_states, tp(1), payloads, total_kv_heads=KV_HEADS)
    ended = hand_over(world, sources, destinations, 12)
    assert {state for state, _ in ended} == {"SUCCESS"}, ended
    assert [side.wrong_buffers() for _, side in destinations] == [[]]


@pytest.mark.parametrize("cut", [None, 20])
def test_rooms_of_pages_that_move_as_a_whole(cut):
    def fill(world, side, place):
        pools.opaque(side, place, world.pages(side.role), widths=[96], per_rank=True)

    world = World(tokens=45, prefix=8, cut=cut)
    sources = world.ranks("prefill", fill, tp(2), unified=True)
    destinations = world.ranks("decode", fill, tp(2), unified=True)
    ended = hand_over(world, sources, destinations, 13)
    assert {state for state, _ in ended} == {"SUCCESS"}, ended
    assert [side.wrong_buffers() for _, side in destinations] == [[], []]


def test_lists_of_unequal_length_fail_the_room_with_both_numbers():
    def shorter(world, side, place):
        slot, window, *rest = payloads(world, side, place)
        return [slot, window[1:] if side.role == "decode" else window, *rest]

    world = World(tokens=45)
    sources = world.ranks("prefill", many_states, tp(1), shorter, total_kv_heads=KV_HEADS)
    destinations = world.ranks("decode", many_states, tp(1), shorter, total_kv_heads=KV_HEADS)
    ended = hand_over(world, sources, destinations, 14)
    assert {state for state, _ in ended} == {"FAILED"}
    assert "component swa: 3 rows at the source and 2 at the destination" in ended[0][1]
