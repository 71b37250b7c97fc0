"""Makes the plan of a pair of ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Component, RankLayout, Tensor
from kvbaton.plan.assign import overlap
from kvbaton.plan.boxes import Boxes, Int64s
from kvbaton.plan.cast import Change, Kind, cast_boxes, change_of, join, tracks_of
from kvbaton.plan.fit import Tensors, tensors_of, where
from kvbaton.plan.fold import fold
from kvbaton.plan.pair import End, PairPlan, Stream
from kvbaton.plan.share import EVERY_TOKEN, Part, Share, TokenClasses
from kvbaton.plan.stretch import Track
from kvbaton.plan.template import template

MAX_TABLE = 1 << 18
"""Bound of the boxes of a pair of ranks, all components together."""


class _Room:
    """How many boxes there is room for."""

    def __init__(self) -> None:
        self.left = MAX_TABLE


class _Pair(NamedTuple):
    source: Tensor
    destination: Tensor
    change: Change | None


class _Geometry(NamedTuple):
    """The units of one stream: entries in a unit (0: rows without tokens), and units in a row of each side."""

    entries: int
    units: tuple[int, int]


def compile_pair(
    source: RankLayout, destination: RankLayout, share: Share | None = None, *, cast: bool = False
) -> PairPlan:
    """Compile what ``source`` sends to ``destination``: its ``share`` of `assign`, or all that both hold if None.

    Both layouts must have passed `check_layout`. With ``cast``, dtypes, factors and scales may differ, as for `assign`.
    Raises `LayoutMismatch` where the two do not fit each other, where ``share`` was not made for them, and where a
    scale of the destination is that of elements that this source does not hold, or not next to each other.
    """
    if share is None:
        share = overlap(source, destination, cast=cast)
    kinds = {component.name: component.kind for layout in (source, destination) for component in layout.components}
    streams: dict[str, tuple[Stream, ...]] = {}
    room = _Room()
    for component in destination.components:
        by_tokens: dict[TokenClasses, list[Part]] = {}
        for part in share.parts:
            if part.component == component.name:
                by_tokens.setdefault(part.tokens, []).append(part)
        if by_tokens:
            ends = _component(source, component.name, "source"), component
            made = (
                _stream(source, destination, *ends, parts, tokens, cast, room) for tokens, parts in by_tokens.items()
            )
            streams[component.name] = tuple(made)
    return PairPlan(streams, kinds)


def _component(layout: RankLayout, name: str, side: str) -> Component:
    try:
        return layout.component(name)
    except KeyError:
        raise LayoutMismatch(f"component {name}: the share names it, but the {side} has no such component") from None


def _stream(
    source_layout: RankLayout,
    destination_layout: RankLayout,
    source: Component,
    destination: Component,
    parts: list[Part],
    tokens: TokenClasses,
    cast: bool,
    room: _Room,
) -> Stream:
    ratio = destination.kind.ratio
    owned = (
        source_layout.owned_of(source).in_entries(ratio),
        destination_layout.owned_of(destination).in_entries(ratio),
    )
    rings = source.kind.ring, destination.kind.ring
    aligned = owned[0] == owned[1] and tokens == EVERY_TOKEN and not any(rings)
    pages = source.entries_per_row, destination.entries_per_row
    unit = math.gcd(*pages)
    if not aligned:
        unit = math.gcd(unit, *(entry.unit for entry in (*owned, tokens) if entry.modulus > 1))
    sources, destinations = tensors_of(source), tensors_of(destination)
    pairs = [[_pair(part, layer, sources, destinations, cast) for layer in part.layers] for part in parts]
    if not destination.kind.has_tokens:
        whole = single = _boxes(parts, pairs, _Geometry(0, (1, 1)), room)
    else:
        whole = single = _boxes(parts, pairs, _Geometry(unit, (pages[0] // unit, pages[1] // unit)), room)
        if unit > 1:
            single = _boxes(parts, pairs, _Geometry(1, pages), room)
    rows = [min(getattr(pair, side).rows for listed in pairs for pair in listed) for side in ("source", "destination")]
    return Stream(
        End("source", source.name, pages[0], rows[0], owned[0], rings[0]),
        End("destination", destination.name, pages[1], rows[1], owned[1], rings[1]),
        ratio,
        tokens,
        unit,
        aligned,
        whole,
        single,
    )


def _pair(part: Part, layer: int, sources: Tensors, destinations: Tensors, cast: bool) -> _Pair:
    key = (part.role, layer)
    name = f"component {part.component}, role {part.role}, layer {layer}"
    if key not in sources or key not in destinations:
        side = "destination" if key in sources else "source"
        raise LayoutMismatch(f"{name}: the share names it, but the {side} has no such tensor")
    source, destination = sources[key], destinations[key]
    return _Pair(source, destination, change_of(source, destination, sources, destinations, name, cast=cast))


_Alike = tuple[tuple[Axis, ...], tuple[Axis, ...], "Kind | None"]


def _boxes(parts: list[Part], pairs: list[list[_Pair]], geometry: _Geometry, room: _Room) -> Boxes:
    moved: list[Boxes] = []
    cast: list[Boxes] = []
    for part, listed in zip(parts, pairs, strict=True):
        alike: dict[_Alike, list[_Pair]] = {}
        for pair in listed:
            kind = pair.change and pair.change.kind
            alike.setdefault((pair.source.axes, pair.destination.axes, kind), []).append(pair)
        for group in alike.values():
            made = _place(part, group, geometry, room.left)
            room.left -= len(made.shape)
            (moved if made.cast is None else cast).append(made)
    return join([fold(join(moved)), *cast] if moved else cast)


def _place(part: Part, group: list[_Pair], geometry: _Geometry, most: int) -> Boxes:
    """The boxes of tensors that are laid out alike, at most ``most``: one template, put at each of them."""
    source, destination, change = group[0]
    name = where(part.component, destination)
    scales = tracks_of(source, destination, change) if change is not None else []
    tracks = (Track.of(0, source), Track.of(1, destination), *scales)
    made = template(source.axes, destination.axes, tracks, dict(part.block), geometry.entries, name)
    if len(made.shape) * len(group) > most:
        raise LayoutMismatch(
            f"{name}: up to here the two layouts break rows into more than {MAX_TABLE} boxes; hold the same indices "
            "next to each other on both sides"
        )
    shape = np.tile(made.shape, (len(group), 1))
    columns = [[pair.source for pair in group], [pair.destination for pair in group]]
    columns += map(list, zip(*(pair.change.scales for pair in group if pair.change is not None), strict=True))
    sides = [
        _side(place, tensors, geometry.units[track.side], geometry.entries)
        for place, tensors, track in zip(made.places, columns, tracks, strict=True)
    ]
    if change is None:
        shape[:, 2] *= destination.itemsize
        return Boxes(shape, sides[0], sides[1])
    return cast_boxes(shape, sides, destination, change, name)


def _side(relative: Int64s, tensors: list[Tensor], units: int, tokens: int) -> Int64s:
    step = 0
    if units > 1:
        step = tokens * next(axis.stride for axis in tensors[0].axes if axis.name == TOKEN)
    fixed = [(tensor.region, tensor.offset, tensor.row_stride, units, step, 0, 0) for tensor in tensors]
    table = np.repeat(np.array(fixed, np.int64), len(relative), axis=0)
    table[:, 1] += np.tile(relative[:, 0], len(tensors))
    table[:, 5:] = np.tile(relative[:, 1:], (len(tensors), 1))
    return table
