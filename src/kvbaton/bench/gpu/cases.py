"""What is moved on GPUs: made by the planner from layouts, as a request of an engine is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbaton.bench.contenders.work import LAYERS, Work
from kvbaton.bench.transfer import size_words
from kvbaton.layout import (
    PAGED,
    TOKEN,
    Axis,
    Component,
    Coords,
    RankLayout,
    Tensor,
    conv_state,
    paged_kv,
    replicated_spans,
    required_bytes,
)
from kvbaton.plan import Int64s, Pages, PairPlan, Transfer, assign, compile_pair

CONV_BLOCKS = {"query": 2048, "key": 2048, "value": 4096}
HEADS, HEAD_DIM = 8, 128


class Case(NamedTuple):
    """Transfers from the pools of some source ranks to that of one destination rank.

    ``transfers`` has those of each source rank. ``pool_bytes`` are the regions' lengths, of each source rank and of the
    destination.
    """

    name: str
    transfers: tuple[tuple[Transfer, ...], ...]
    source_bytes: tuple[int, ...]
    destination_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return sum(transfer.nbytes for each in self.transfers for transfer in each)

    @property
    def pieces(self) -> int:
        """Pieces that move."""
        return sum(transfer.pieces for each in self.transfers for transfer in each)


def in_pieces(piece: int, nbytes: int, *, shuffled: bool = True) -> tuple[Case, Work]:
    """Pages of one token, in 64 tensors; about ``nbytes``, or at least one page."""
    work = Work.of(piece, nbytes)
    layout = _pieces_layout(work)
    rows = [work.chosen(role) if shuffled else np.arange(work.pages) for role in ("source", "destination")]
    words = f"{size_words(piece)} pieces, {'shuffled' if shuffled else 'contiguous'}"
    return _paged(words, (layout,), layout, work.pages, rows), work


def request(tokens: int, layers: int) -> tuple[PairPlan, tuple[Pages, Pages], int]:
    """One request with pages of one token, eight heads: its plan, its pages on both sides, and bytes of a pool."""
    layout = _heads_layout(layers, 2 * tokens, 1, 0, 1)
    (share,) = assign((layout,), layout)
    at, to = (Pages(np.random.default_rng(seed).permutation(2 * tokens)[:tokens], 0) for seed in (1, 2))
    return compile_pair(layout, layout, share), (at, to), required_bytes(layout.components)[0]


def head_slices(prefill: int, decode: int, page_size: int, nbytes: int) -> Case:
    """Keys and values from ``prefill`` tensor-parallel ranks to one of ``decode``: what its senders give it."""
    tokens = nbytes // (LAYERS * 2 * (HEADS // decode) * HEAD_DIM * 2) // page_size * page_size
    pages = tokens // page_size
    sources = [_heads_layout(LAYERS, 2 * pages, page_size, rank, prefill) for rank in range(prefill)]
    destination = _heads_layout(LAYERS, 2 * pages, page_size, 0, decode)
    rows = [np.random.default_rng(seed).permutation(2 * pages)[:pages] for seed in (1, 2)]
    name = f"head slices, TP {prefill} to {decode}, page {page_size}"
    return _paged(name, sources, destination, tokens, rows)


def conv_blocks(nbytes: int) -> Case:
    """Convolution states from two ranks to one: three sub-blocks of each, in many slots."""
    sources, destination = [], None
    for rank, size in ((0, 2), (1, 2), (0, 1)):
        slots = nbytes // (LAYERS * sum(CONV_BLOCKS.values()) * 3 * 2)
        state = conv_state(
            layers=range(LAYERS), rows=2 * slots, blocks=CONV_BLOCKS, columns=3, dtype="bfloat16", rank=rank, size=size
        )
        layout = RankLayout((state,), Coords(tp=(rank, size)))
        if size == 2:
            sources.append(layout)
        else:
            destination = layout
    assert destination is not None
    rows = [np.random.default_rng(seed).permutation(2 * slots)[:slots] for seed in (1, 2)]
    made = []
    for source, share in zip(sources, assign(sources, destination), strict=True):
        made.append(tuple(compile_pair(source, destination, share).bind_slots("conv", *rows)))
    return _case("conv sub-blocks, TP 2 to 1", made, sources, destination)


def _paged(
    name: str, sources: Sequence[RankLayout], destination: RankLayout, tokens: int, rows: Sequence[Int64s]
) -> Case:
    made, used = [], []
    for source, share in zip(sources, assign(tuple(sources), destination), strict=True):
        if not share.empty:
            plan = compile_pair(source, destination, share)
            made.append(tuple(plan.bind("kv", (0, tokens), Pages(rows[0], 0), Pages(rows[1], 0))))
            used.append(source)
    return _case(name, made, used, destination)


def _case(name: str, made: list[tuple[Transfer, ...]], sources: Sequence[RankLayout], destination: RankLayout) -> Case:
    nbytes = [required_bytes(layout.components)[0] for layout in (*sources, destination)]
    return Case(name, tuple(made), tuple(nbytes[:-1]), nbytes[-1])


def _heads_layout(layers: int, rows: int, page_size: int, rank: int, size: int) -> RankLayout:
    component = paged_kv(
        layers=range(layers),
        rows=rows,
        page_size=page_size,
        heads=HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        head_spans=replicated_spans(HEADS, rank, size),
        order="NHD",
    )
    return RankLayout((component,), Coords(tp=(rank, size)))


def _pieces_layout(work: Work) -> RankLayout:
    axes = (Axis(TOKEN, 1, work.piece, ((0, 1),)), Axis("byte", work.piece, 1, ((0, work.piece),)))
    tensors = tuple(
        Tensor(role, layer, 0, (2 * layer + index) * work.rows * work.piece, work.rows, work.piece, "uint8", axes)
        for layer in range(LAYERS)
        for index, role in enumerate(("key", "value"))
    )
    return RankLayout((Component("kv", PAGED, tensors, 1),))
