"""The layouts of all ranks of a side, written by hand: any order of axes, any placement, padding anywhere."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import msgspec
import numpy as np

from kvbaton.check.models import DRAFT_LAYERS, Format, ModelComponent, ModelTensor, Placed, Side, World
from kvbaton.check.oracle import local_places, needed_entries
from kvbaton.layout import DTYPE_BYTES, TOKEN, Axis, Component, Coords, Ownership, RankLayout, Span, Tensor

Placement = Literal["layers_first", "fused", "blocks_first", "rows_inside"]
PLACEMENTS: tuple[Placement, ...] = ("layers_first", "fused", "blocks_first", "rows_inside")
SLOTS = 4
"""Registered rows of a component without tokens."""


@dataclass(frozen=True)
class Arrangement:
    """What a rank may choose freely about one component."""

    placement: Placement = "layers_first"
    padding: int = 0
    gap: int = 0
    orders: tuple[int, ...] = (0,)
    """Seeds for the order of axes in memory, by tensor: 0 is tokens outermost."""
    listed: int = 0
    """Seed for the order in which the axes are listed."""
    spans: int = 0
    """Seed for the order of spans; 0 is ascending."""
    interleaved: bool = False
    """Whether replicas are dealt out in turn, instead of neighbours holding the same."""
    absent: Literal["left out", "empty", "elided"] = "left out"
    """How layers of other stages are written down."""
    spare: int = 1
    """Rows that nobody needs."""


def arrangement(seed: int, tensors: int) -> Arrangement:
    """Make an arrangement of ``seed``, for a component of so many tensors a layer; 0 is the plainest."""
    if seed == 0:
        return Arrangement()
    chance = Random(seed)
    usual = chance.random() < 0.4
    return Arrangement(
        chance.choice(PLACEMENTS),
        chance.choice((0, 0, 0, 1, 4)),
        chance.choice((0, 0, 3, 5)),
        tuple(0 if usual else chance.getrandbits(30) for _ in range(tensors)),
        chance.choice((0, chance.getrandbits(30))),
        chance.choice((0, 0, chance.getrandbits(30))),
        chance.random() < 0.3,
        chance.choice(("left out", "empty", "elided")),
        chance.randrange(1, 4),
    )


def grid(world: World, side: Side) -> list[RankLayout]:
    """The layouts of all ranks of ``side``, tp outermost, then pp, then cp."""
    ranks: list[RankLayout] = []
    seeds = Random(side.arrangement)
    each_by_itself = bool(side.arrangement) and seeds.random() < 0.2
    one_region = bool(side.arrangement) and seeds.random() < 0.3
    # By family and not by number, so that a component is laid out the same when it stands alone.
    mixed = [zlib.crc32(f"{side.arrangement}/{entry.family}".encode()) for entry in world.model]
    chosen = [seed if side.arrangement else 0 for seed in mixed]
    for t, p, c in itertools.product(range(side.tp), range(side.pp), range(side.cp)):
        components: list[Component] = []
        rank_owned = Ownership(side.unit, side.cp, c) if side.cp > 1 else Ownership()
        region, cursor = 0, 0
        for entry, placed, seed in zip(world.model, side.placed, chosen, strict=True):
            listed = stored_as(entry.tensors, entry.numbers, placed.format)
            choice = common = arrangement(seed, len(listed))
            if each_by_itself:
                # Which replicas hold the same is agreed between all ranks.
                choice = arrangement(seed + 1 + len(ranks), len(listed))
                choice = replace(choice, interleaved=common.interleaved)
            owned = own_of(placed, c) if entry.kind.has_tokens else None
            rows = _row_count(world, entry, placed, owned or rank_owned) + choice.spare
            tensors, end = _tensors(world, side, entry, listed, placed, rows, (t, p), (region, cursor), choice)
            region, cursor = (region, end) if one_region else (region + 1, 0)
            if tensors or choice.absent != "left out":
                kind = msgspec.structs.replace(entry.kind, ring=placed.ring)
                components.append(Component(entry.name, kind, tuple(tensors), placed.page_size, owned))
        coords = Coords((t, side.tp), (p, side.pp), (c, side.cp))
        ranks.append(RankLayout(tuple(components), coords, rank_owned))
    return ranks


def own_of(placed: Placed, rank: int) -> Ownership | None:
    """The tokens that context-parallel rank ``rank`` owns of a component, where it is not what the rank says."""
    if not placed.modulus:
        return None
    return Ownership() if placed.modulus == 1 else Ownership(placed.unit, placed.modulus, rank)


def stage_of(layer: int, tensor: ModelTensor, layers: int, stages: int) -> int:
    """The pipeline stage that holds a layer of a tensor."""
    if tensor.stage is not None:
        return tensor.stage % stages
    return stages - 1 if layer >= DRAFT_LAYERS else layer * stages // layers


def spans_of(tensor: ModelTensor, axis: str, rank: int, size: int, choice: Arrangement) -> tuple[Span, ...]:
    """The indices of ``axis`` that tensor-parallel rank ``rank`` of ``size`` holds."""
    if tensor.last != "free" and axis == tensor.axes[-1][0]:
        return ((0, tensor.axes[-1][1]),)
    if axis != tensor.cut:
        spans = [(0, dict(tensor.axes)[axis])]
    else:
        spans, base = [], 0
        for block in tensor.blocks:
            if block >= size:
                spans.append((base + rank * (block // size), block // size))
            else:
                spans.append((base + (rank % block if choice.interleaved else rank * block // size), 1))
            base += block
    if choice.spans:
        if choice.spans % 3 == 0:
            spans = [(index, 1) for start, count in spans for index in range(start, start + count)]
        Random(choice.spans).shuffle(spans)
    return tuple(spans)


def stored_as(tensors: Sequence[ModelTensor], numbers: Set[str], stored: Format | None) -> tuple[ModelTensor, ...]:
    """The tensors of a component on a side that stores those whose roles are in ``numbers`` as ``stored``."""
    if stored is None:
        return tuple(tensors)
    found: list[ModelTensor] = []
    for tensor in tensors:
        if tensor.role not in numbers:
            found.append(tensor)
            continue
        scale = f"{tensor.role}_{stored.scales}" if stored.scales else ""
        last = stored.last if tensor.axes else "free"
        found.append(replace(tensor, dtype=stored.dtype, factors=stored.factors, scale=scale, last=last))
        if scale:
            found.append(_scales_of(found[-1], stored))
    return tuple(found)


def _scales_of(tensor: ModelTensor, stored: Format) -> ModelTensor:
    name, size = tensor.axes[-1] if tensor.axes else ("", 1)
    parts = {"all": 1, "halves": 1 if size % 2 else 2, "each": size}[stored.parts]
    cut = "" if stored.cut_shared else tensor.cut
    axes = [axis for axis in tensor.axes[:-1] if axis[0] != tensor.cut or cut]
    axes += [(name, parts)] if parts > 1 else []
    return replace(
        tensor,
        role=tensor.scale,
        dtype="float32",
        axes=tuple(axes),
        cut=cut,
        blocks=tensor.blocks if cut else (),
        factors=(1.0,),
        scale="",
        scale_of=tensor.role,
        last=tensor.last if parts > 1 else "free",
    )


def _row_count(world: World, entry: ModelComponent, placed: Placed, owned: Ownership) -> int:
    """The rows that the request of ``world`` needs."""
    if not entry.kind.has_tokens:
        return SLOTS
    places = local_places(owned, entry.kind.ratio, world.tokens)
    if placed.ring:
        places = places[needed_entries(entry.kind, world.tokens, world.prefix)]
    count = int(np.count_nonzero(places >= 0))
    return -(-(count * entry.kind.ratio) // placed.page_size) + 1


def _tensors(
    world: World,
    side: Side,
    entry: ModelComponent,
    listed: Sequence[ModelTensor],
    placed: Placed,
    rows: int,
    rank: tuple[int, int],
    place: tuple[int, int],
    choice: Arrangement,
) -> tuple[list[Tensor], int]:
    """The tensors of one component on one rank from ``place`` (region, byte) on, and the byte at which they end."""
    region, cursor = place
    cursor += choice.gap
    made: list[Tensor] = []
    held: list[tuple[int, list[_Shape]]] = []
    shapes = [
        _Shape.of(tensor, entry, placed, (rank[0], side.tp), rows, choice, number)
        for number, tensor in enumerate(listed)
    ]
    for layer in entry.layers:
        here: list[_Shape] = []
        for shape in shapes:
            mine = stage_of(layer, shape.tensor, world.layers, side.pp) == rank[1]
            elided = (shape.tensor.scale_of or shape.tensor.role, layer) in entry.elided and (
                entry.elided_at_source or side is world.destination
            )
            if mine and not elided:
                here.append(shape)
            elif elided or choice.absent == "elided":
                made.append(shape.at(layer, region, 0, 0, shape.row_stride))
        held.append((layer, here))
    if choice.placement in ("layers_first", "rows_inside"):
        for layer, here in held:
            for shape in here:
                made.append(shape.at(layer, region, cursor, rows, shape.row_stride))
                cursor += shape.size if choice.placement == "rows_inside" else shape.row_stride * rows
        return made, cursor
    groups = [held] if choice.placement == "blocks_first" else [[one] for one in held]
    for group in groups:
        stride = sum(shape.row_stride for _, here in group for shape in here)
        inside = cursor
        for layer, here in group:
            for shape in here:
                made.append(shape.at(layer, region, inside, rows, stride))
                inside += shape.row_stride
        cursor += stride * rows
    return made, cursor


@dataclass(frozen=True)
class _Shape:
    """The axes of one tensor on one rank; ``size`` is the bytes of all rows where rows lie inside."""

    tensor: ModelTensor
    axes: tuple[Axis, ...]
    row_stride: int
    size: int

    @staticmethod
    def of(
        tensor: ModelTensor,
        entry: ModelComponent,
        placed: Placed,
        tp: tuple[int, int],
        rows: int,
        choice: Arrangement,
        number: int,
    ) -> _Shape:
        entries = placed.page_size // entry.kind.ratio
        names = [*([TOKEN] if entry.kind.has_tokens else []), *(name for name, _ in tensor.axes)]
        seed = choice.orders[number % len(choice.orders)]
        if seed:
            Random(seed).shuffle(names)
        if tensor.last == "run":
            names.append(names.pop(names.index(tensor.axes[-1][0])))
        inside = choice.placement == "rows_inside" and len(names) > (tensor.last == "run")
        sizes = dict(tensor.axes)
        stride = row_stride = DTYPE_BYTES[tensor.dtype]
        axes: list[Axis] = []
        for position, name in enumerate(reversed(names)):
            if inside and position == len(names) - 1:
                row_stride = stride + choice.padding
                stride = row_stride * rows
            spans = ((0, entries),) if name == TOKEN else spans_of(tensor, name, *tp, choice)
            axes.append(Axis(name, entries if name == TOKEN else sizes[name], stride, spans))
            stride = stride * axes[-1].local_size + choice.padding
        axes.reverse()
        if choice.listed:
            Random(choice.listed).shuffle(axes)
        if inside:
            return _Shape(tensor, tuple(axes), row_stride, stride)
        return _Shape(tensor, tuple(axes), stride, stride * (rows if choice.placement == "rows_inside" else 1))

    def at(self, layer: int, region: int, offset: int, rows: int, row_stride: int) -> Tensor:
        tensor = self.tensor
        factor = tensor.factors[layer % len(tensor.factors)]
        return Tensor(
            tensor.role, layer, region, offset, rows, row_stride, tensor.dtype, self.axes, tensor.scale, factor
        )
