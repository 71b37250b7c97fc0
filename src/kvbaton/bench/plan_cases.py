"""Pairs of layouts that the benchmark of the planner binds and compiles, as today's engines have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvbaton.bench import plan_lists
from kvbaton.layout import (
    Coords,
    Field,
    Kind,
    Ownership,
    RankLayout,
    compressed,
    conv_state,
    index_keys,
    mla_latent,
    paged_kv,
    recurrent_state,
    replicated_spans,
    ring,
    window,
)
from kvbaton.layout import component as dense
from kvbaton.plan import Int64s, Pages, PairPlan, Share, Transfer, assign, compile_pair

LAYERS = 64
TENSORS = 2 * LAYERS


@dataclass(frozen=True)
class BindCase:
    """One request of one pair of ranks. ``lists`` makes the same pieces as Python lists do."""

    name: str
    plan: PairPlan
    component: str
    tokens: tuple[int, int]
    source: Pages
    destination: Pages
    lists: Callable[[], list[plan_lists.Piece]]

    def bind(self) -> list[Transfer]:
        """Bind the request."""
        return self.plan.bind(self.component, self.tokens, self.source, self.destination)


@dataclass(frozen=True)
class PairCase:
    """The two sides of a hand-over: ``sources`` of one destination rank."""

    name: str
    sources: tuple[RankLayout, ...]
    destination: RankLayout

    def shares(self) -> list[tuple[RankLayout, Share]]:
        """Assign: the sources that send something, and what."""
        shares = assign(self.sources, self.destination, striped=True)
        return [pair for pair in zip(self.sources, shares, strict=True) if not pair[1].empty]

    def compile(self) -> list[PairPlan]:
        """Assign, and compile each pair of ranks that moves something."""
        return [compile_pair(source, self.destination, share) for source, share in self.shares()]


class _Shape(NamedTuple):
    """Where the tokens of one side are: how many tensors of how many heads, in pages of how many tokens."""

    page_size: int
    heads: int = 1
    head_spans: tuple[tuple[int, int], ...] | None = None
    owned: Ownership = Ownership()
    kind: Kind = Kind()


def bind_cases(pieces: int) -> list[BindCase]:
    """All requests of about ``pieces`` pieces: each in 64 layers of keys and values, and in a single tensor."""
    cases: list[BindCase] = []
    for layers, words in ((LAYERS, "64 layers"), (0, "1 tensor")):
        tokens = pieces // (2 * layers or 1)
        cases += [
            _case(f"page 1, {words}", layers, tokens, _Shape(1), _Shape(1)),
            _case(
                f"heads of tp 1 -> 2, page 16, {words}",
                layers,
                tokens,
                _Shape(16, 2),
                _Shape(16, 2, ((1, 1),)),
            ),
            *(
                _case(
                    f"token-interleaved dcp {before} -> {after}, page 16, {words}",
                    layers,
                    tokens * math.lcm(before, after),
                    _Shape(16, owned=Ownership(1, before, 1)),
                    _Shape(16, owned=Ownership(1, after, 1 % after)),
                )
                for before, after in ((4, 1), (4, 2), (2, 3))
            ),
            _case(f"page 16 -> 64, {words}", layers, tokens * 16, _Shape(16), _Shape(64)),
            _case(f"page 48 -> 64, {words}", layers, tokens * 16, _Shape(48), _Shape(64)),
            _case(
                f"window, page 1 -> 16, {words}",
                layers,
                tokens + tokens // 2,
                _Shape(1, kind=window(tokens)),
                _Shape(16, kind=window(tokens)),
            ),
            _case(
                f"ring -> window, page 1, {words}",
                layers,
                tokens + tokens // 2,
                _Shape(1, kind=ring(tokens)),
                _Shape(1, kind=Kind(window=tokens, reused=False)),
            ),
            _case(
                f"compressed, 4 tokens to an entry, page 16 -> 64, {words}",
                layers,
                tokens * 16,
                _Shape(16, kind=compressed(4)),
                _Shape(64, kind=compressed(4)),
            ),
        ]
    return cases


def pair_cases() -> list[PairCase]:
    """All pairs of ranks that are compiled."""
    one = (0, 1)
    return [
        PairCase("dense, equal", (_kv(one),), _kv(one)),
        PairCase("heads of tp 4 -> 8, 4 heads, replicated", _tp_ranks(4), _kv((5, 8), heads=4)),
        PairCase("heads of tp 8 -> 4, 4 heads, replicated, striped", _tp_ranks(8), _kv((1, 4), heads=4)),
        PairCase("hybrid (16 attention, 48 gated delta net), tp 1 -> 2", (_hybrid(one),), _hybrid((1, 2))),
        PairCase("HND -> NHD, page 16", (_kv(one, order="HND"),), _kv(one)),
        PairCase("blocks first -> layers first", (_kv(one, placement="blocks_first"),), _kv(one)),
        PairCase("blocks first HND, page 16 -> NHD, page 64", (_kv(one, 16, "HND", "blocks_first"),), _kv(one, 64)),
        PairCase("61 layers of latents and index keys, tp 8 -> 1, striped", (_latents(),) * 8, _latents()),
        PairCase("token-interleaved dcp 4 -> 2", tuple(_dcp(rank, 4) for rank in range(4)), _dcp(1, 2)),
        PairCase("64 pipeline stages -> 1", tuple(_stage(layer) for layer in range(LAYERS)), _kv(one)),
        PairCase("64 replicas -> 1, striped", (_latents(),) * 64, _latents()),
    ]


def grid(tp: int, pp: int = 1) -> list[RankLayout]:
    """All ranks of a dense model of 64 layers and 8 heads."""
    size = LAYERS // pp
    return [
        _kv((rank, tp), heads=8, layers=tuple(range(stage * size, (stage + 1) * size)), stage=(stage, pp))
        for stage in range(pp)
        for rank in range(tp)
    ]


def _case(name: str, layers: int, tokens: int, before: _Shape, after: _Shape) -> BindCase:
    tokens -= tokens % math.gcd(before.page_size, after.page_size)
    source, destination = (_pool(shape, layers, tokens) for shape in (before, after))
    plan = compile_pair(source, destination)
    (entry,) = source.components
    first, last = entry.kind.needed(tokens)
    at, to = _pages(before, tokens, first, 1), _pages(after, tokens, first, 2)
    return BindCase(
        name,
        plan,
        "kv",
        (first, last),
        at,
        to,
        lambda: plan_lists.pieces_of_request(source, destination, (first, last), at, to),
    )


def _pool(shape: _Shape, layers: int, tokens: int) -> RankLayout:
    """Enough rows for twice the tokens; no layers: one tensor."""
    rows = 2 * (tokens // shape.page_size + 1)
    axes = (("token", shape.page_size // shape.kind.ratio, None), ("head", shape.heads, shape.head_spans))
    roles = ("key", "value") if layers else ("latent",)
    fields = [Field(role, "bfloat16", (*axes, ("dim", 128, None))) for role in roles]
    entry = dense("kv", shape.kind, fields, layers=range(layers or 1), rows=rows, page_size=shape.page_size)
    return RankLayout((entry,), owned=shape.owned)


def _pages(shape: _Shape, tokens: int, first: int, seed: int) -> Pages:
    """Shuffled rows that hold the local tokens from ``first`` on."""
    count, size = shape.owned.local_count(tokens), shape.page_size
    begin = shape.owned.local_count(first) // size
    held = -(-shape.kind.window // size) if shape.kind.ring else -(-count // size) - begin
    return Pages(shuffled(held, seed), 0 if shape.kind.ring else begin * size)


def shuffled(count: int, seed: int) -> Int64s:
    """Return ``count`` different rows in no order."""
    return np.random.default_rng(seed).permutation(count).astype(np.int64)


def _kv(
    tp: tuple[int, int],
    page_size: int = 16,
    order: Literal["NHD", "HND"] = "NHD",
    placement: Literal["layers_first", "blocks_first"] = "layers_first",
    *,
    heads: int = 8,
    layers: tuple[int, ...] = tuple(range(LAYERS)),
    stage: tuple[int, int] = (0, 1),
) -> RankLayout:
    spans = replicated_spans(heads, *tp)
    made = paged_kv(
        layers=layers,
        rows=4096,
        page_size=page_size,
        heads=heads,
        head_dim=128,
        dtype="bfloat16",
        head_spans=spans,
        order=order,
        placement=placement,
    )
    return RankLayout((made,), Coords(tp=tp, pp=stage))


def _tp_ranks(size: int) -> tuple[RankLayout, ...]:
    return tuple(_kv((rank, size), heads=4) for rank in range(size))


def _hybrid(tp: tuple[int, int]) -> RankLayout:
    attention = tuple(range(3, LAYERS, 4))
    others = tuple(layer for layer in range(LAYERS) if layer not in attention)
    rank, size = tp
    (kv,) = _kv(tp, layers=attention).components
    blocks = {"q": 2048, "k": 2048, "v": 4096}
    conv = conv_state(
        layers=others, rows=64, blocks=blocks, columns=3, dtype="bfloat16", rank=rank, size=size, region=1
    )
    state = recurrent_state(
        layers=others, rows=64, heads=32, shape=(128, 128), dtype="float32", rank=rank, size=size, region=2
    )
    return RankLayout((kv, conv, state), Coords(tp=tp))


def _latents() -> RankLayout:
    layers = range(61)
    latent = mla_latent(layers=layers, rows=4096, page_size=64, latent_dim=576, dtype="bfloat16")
    index = index_keys(layers=layers, rows=4096, page_size=64, index_dim=128, dtype="bfloat16", region=1)
    return RankLayout((latent, index))


def _dcp(rank: int, size: int) -> RankLayout:
    (kv,) = _kv((0, 1)).components
    return RankLayout((kv,), Coords(cp=(rank, size)), Ownership(1, size, rank))


def _stage(layer: int) -> RankLayout:
    return _kv((0, 1), layers=(layer,), stage=(layer, LAYERS))


def piece_count(transfers: list[Transfer]) -> int:
    """Pieces of all transfers together."""
    return sum(transfer.pieces for transfer in transfers)
