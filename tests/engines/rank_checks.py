"""Checks of every byte of the ranks of a `Pair`: what arrived, what had to stay, and how many bytes that took.

They know the layouts and the sentence of the design, and neither planner nor pools: which bytes of which row hold a
token is computed here, token by token.
"""

from __future__ import annotations

import collections
import itertools

import numpy as np
import torch

from kvbaton.layout import TOKEN, Component, RankLayout

CANARY = 0x5A


class Watch:
    """Looks on while the two engines of a pair, both idle so far, serve requests of different lengths."""

    def __init__(self, pair) -> None:
        self.pair = pair
        self.given = {engine: [] for engine in (pair.prefill, pair.decode)}
        self.prefilled: dict[int, dict] = {}
        self.compared = 0
        for engine, given in self.given.items():
            for rank in engine.pools.ranks:
                for memory in rank.memory:
                    memory.fill_(CANARY)
            self._record_rows(engine.pools, given)
        self._keep_cache(pair.prefill.pools)
        self._compare_cache(pair.decode.pools)

    def _record_rows(self, pools, given) -> None:
        allocate = pools.allocate

        def recording(tokens):
            rows = allocate(tokens)
            if rows is not None:
                given.append((tokens, pools.all_rows(rows), rows.slot))
            return rows

        pools.allocate = recording

    def _keep_cache(self, pools) -> None:
        write_state = pools.write_state

        def keeping(cache, rows):
            self.prefilled[rows.tokens] = {place: _clone(place.get(cache)) for place in pools.description.places}
            write_state(cache, rows)

        pools.write_state = keeping

    def _compare_cache(self, pools) -> None:
        read = pools.read

        def comparing(rows, others=None):
            cache = read(rows, others)
            expected = self.prefilled[rows.tokens]
            for place in pools.description.places:
                assert _same(place.get(cache), expected[place]), f"layer {place.layer} {place.role} differs"
            for rank in pools.ranks:
                for held in itertools.chain(*rank.shard.held.values()):
                    # Ranks that hold the same must all have got it.
                    if expected[held.place] is not None:
                        whole = _clone(expected[held.place])
                        seen = whole[0].movedim(held.place.token_axis - 1, 0) if held.place.token_axis > 0 else whole[0]
                        first, last = held.place.held(rows.tokens)
                        at = torch.from_numpy(held.numbers(first, last) - first) if held.place.token_axis > 0 else None
                        held.join(rank.take(held, rows), seen, at)
                        assert torch.equal(whole, expected[held.place]), f"rank {rank.shard.coords}: {held.place}"
            self.compared += 1
            return cache

        pools.read = comparing

    def check(self, requests: int, moved: collections.Counter) -> None:
        """After ``requests`` requests whose bytes by component are ``moved`` in all."""
        assert self.compared == requests
        wanted: collections.Counter = collections.Counter()
        for engine, given in self.given.items():
            assert len(given) == requests
            for index, rank in enumerate(engine.pools.ranks):
                may_change = [np.zeros(memory.nbytes, bool) for memory in rank.memory]
                for tokens, rows, slot in given:
                    for name, region, at in held_bytes(rank.layout, rows[index], slot, tokens):
                        may_change[region][at] = True
                        if engine is self.pair.decode:
                            wanted[name] += at.size
                for memory, may in zip(rank.memory, may_change, strict=True):
                    assert (memory.numpy()[~may] == CANARY).all(), f"{engine.role} rank {rank.shard.coords}"
        assert moved == wanted


def held_bytes(layout: RankLayout, rows, slot: int, tokens: int):
    """``(component, region, byte offsets)`` of all that a rank holds of a request of ``tokens`` tokens."""
    for component in layout.components:
        places = _places(layout, component, rows.get(component.name, ()), slot, tokens)
        for tensor in component.tensors:
            inside = np.arange(tensor.itemsize)
            stride = 0
            for axis in tensor.axes:
                if axis.name == TOKEN:
                    stride = axis.stride
                else:
                    inside = (inside[:, None] + np.arange(axis.local_size) * axis.stride).reshape(-1)
            for row, place in places:
                yield component.name, tensor.region, tensor.offset + row * tensor.row_stride + place * stride + inside


def _places(layout: RankLayout, component: Component, rows, slot: int, tokens: int) -> list[tuple[int, int]]:
    """Row, and place in it, of each entry that the rank holds."""
    kind, size = component.kind, component.page_size
    if not kind.has_tokens:
        return [(slot, 0)]
    owned = layout.owned_of(component)
    first, last = kind.needed(tokens)
    first_page = owned.local_count(first) // size
    found = []
    for entry in range(first // kind.ratio, last // kind.ratio):
        token = entry * kind.ratio
        if token // owned.unit % owned.modulus == owned.remainder:
            local = sum(t // owned.unit % owned.modulus == owned.remainder for t in range(token))
            page = local // size
            row = rows[page % len(rows)] if kind.ring else rows[page - first_page]
            found.append((int(row), local % size // kind.ratio))
    return found


def bytes_of(handles) -> collections.Counter:
    """The bytes by component of several requests together."""
    return sum((collections.Counter(handle.bytes_by_component) for handle in handles), collections.Counter())


def _clone(tensor):
    return None if tensor is None else tensor.clone()


def _same(one, other) -> bool:
    return (one is None and other is None) or torch.equal(one, other)
