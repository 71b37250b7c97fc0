"""Prefill ranks that share the tokens of each request between them."""

from __future__ import annotations

import numpy as np
import pytest
from rank_world import wait

import kvbaton as kb
from kvbaton.layout import paged_kv, required_bytes

PAGE = 4
ROWS = 8


def _rank(coords: kb.Coords, owned: kb.Ownership, fill: int) -> tuple[kb.SharedMemory, kb.RankLayout]:
    kv = paged_kv(layers=[0], rows=ROWS, page_size=PAGE, heads=1, head_dim=1, dtype="uint8", placement="fused")
    memory = kb.SharedMemory(required_bytes([kv])[0])
    memory.array[:] = fill
    return memory, kb.RankLayout((kv,), coords, owned)


@pytest.mark.parametrize("chunks", [[(0, 16)], [(0, 6), (6, 16)], [(8, 16), (0, 8)]])
def test_each_rank_sends_the_tokens_that_it_owns(chunks: list[tuple[int, int]]) -> None:
    registry = kb.MemoryRegistry()
    sources = [_rank(kb.Coords(cp=(index, 2)), kb.Ownership(PAGE, 2, index), 0) for index in range(2)]
    target, layout = _rank(kb.Coords(), kb.Ownership(), 0xEE)
    for index, (memory, _) in enumerate(sources):
        # Local token n of rank r is the request's token n // 4 * 8 + r * 4 + n % 4: its number is its content.
        local = np.arange(8)
        number = local // PAGE * 2 * PAGE + index * PAGE + local % PAGE
        memory.array.reshape(ROWS, 2, PAGE)[:2] = number.reshape(2, 1, PAGE) + np.array([[[100], [200]]])
    managers = [
        kb.Manager(each, [kb.Region.of(memory)], role="prefill", registry=registry, transports=["loopback"])
        for memory, each in sources
    ]
    decode = kb.Manager(layout, [kb.Region.of(target)], role="decode", registry=registry, transports=["loopback"])
    try:
        receiver = decode.receiver(1, digest=True)
        receiver.offer({"kv": [5, 2, 7, 0]}, tokens=16)
        for manager, (_, each) in zip(managers, sources, strict=True):
            sender = manager.sender(1)
            for first, last in chunks:
                begin, end = each.owned.local_count(first), each.owned.local_count(last)
                pages = list(range(begin // PAGE, -(-end // PAGE))) if end > begin else []
                sender.send({"kv": pages}, tokens=(first, last))
            sender.finish()
        wait(lambda: receiver.poll().terminal, "the room to end")
        assert receiver.poll() is kb.Status.SUCCESS, receiver.reason
        held = target.array.reshape(ROWS, 2, PAGE)
        tokens = np.arange(16).reshape(4, PAGE)
        assert (held[[5, 2, 7, 0], 0] == tokens + 100).all()
        assert (held[[5, 2, 7, 0], 1] == tokens + 200).all()
        assert (held[[1, 3, 4, 6]] == 0xEE).all()
    finally:
        decode.close()
        for manager in managers:
            manager.close()
