"""Small models for the simulation: the layouts of all ranks, with few rows, so that rooms fight for them."""

from __future__ import annotations

import functools
from typing import Literal

import msgspec

from kvbaton.layout import Component, Coords, RankLayout, build

LAYERS, HEADS, DIM, WINDOW = 2, 2, 2, 6
MOST_TOKENS = 18
"""Of one request."""


class Shape(msgspec.Struct, frozen=True):
    """How many ranks a world has, and what they hold."""

    parts: tuple[str, ...]
    """Components by name: "kv", "swa" (a window), "conv" (a state), "aux"."""
    prefill_tp: int = 1
    prefill_pp: int = 1
    replicas: int = 1
    """Data-parallel replicas of the prefill side."""
    decode_tp: int = 1
    groups: int = 1
    """Decode deployments; each serves whole requests."""
    prefill_page: int = 4
    decode_page: int = 4
    pool_tokens: int = 32
    """Tokens that the pages of a rank have room for: fewer than a few requests want."""
    slots: int = 2
    """Requests that the states of a rank have room for."""

    @property
    def prefill_ranks(self) -> int:
        """Of one replica."""
        return self.prefill_tp * self.prefill_pp


def prefill_layout(shape: Shape, replica: int, rank: int) -> RankLayout:
    """The layout of a rank of one replica."""
    pp, tp = divmod(rank, shape.prefill_tp)
    coords = Coords((tp, shape.prefill_tp), (pp, shape.prefill_pp), dp=(replica, shape.replicas))
    return _layout(shape.parts, coords, shape.prefill_page, shape.pool_tokens, shape.slots, "NHD")


def decode_layout(shape: Shape, rank: int) -> RankLayout:
    """The layout of a decode rank; all groups have the same ones."""
    coords = Coords((rank, shape.decode_tp))
    return _layout(shape.parts, coords, shape.decode_page, shape.pool_tokens, shape.slots, "HND")


@functools.lru_cache(1 << 10)
def _layout(
    parts: tuple[str, ...], coords: Coords, page_size: int, tokens: int, slots: int, order: Literal["NHD", "HND"]
) -> RankLayout:
    tp, size = coords.tp
    stages = coords.pp[1]
    layers = [layer for layer in range(LAYERS) if stages == 1 or layer * stages // LAYERS == coords.pp[0]]
    made: list[Component] = []
    offset = 24
    for name in parts:
        if name in ("kv", "swa"):
            part = build.paged_kv(
                name,
                layers=layers,
                rows=tokens // page_size,
                page_size=page_size,
                heads=HEADS,
                head_dim=DIM,
                dtype="uint8",
                head_spans=build.replicated_spans(HEADS, tp, size),
                order=order,
                window=WINDOW if name == "swa" else 0,
                offset=offset,
            )
        elif name == "conv":
            blocks = {"q": 2, "k": 2, "v": 4}
            part = build.conv_state(
                name,
                layers=layers,
                rows=slots,
                blocks=blocks,
                columns=3,
                dtype="uint8",
                rank=tp,
                size=size,
                offset=offset,
            )
        else:
            part = build.aux_fields({"token": ("int64", 1)}, name, rows=slots + 1, offset=offset)
        made.append(part)
        offset = build.required_bytes([part])[0] + 8
    return RankLayout(tuple(made), coords)


def nbytes_of(layout: RankLayout) -> int:
    """Bytes of the one region of a rank, with some that belong to nobody at its end."""
    return build.required_bytes(layout.components)[0] + 24
