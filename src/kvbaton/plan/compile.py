"""Makes the plan of a pair of ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Component, RankLayout, Tensor
from kvbaton.plan.assign import overlap
from kvbaton.plan.boxes import Boxes, Int64s
from kvbaton.plan.fit import where
from kvbaton.plan.fold import fold
from kvbaton.plan.pair import End, PairPlan, Stream
from kvbaton.plan.share import EVERY_TOKEN, Part, Share, TokenClasses
from kvbaton.plan.template import Template, template

MAX_TABLE = 1 << 18
"""Bound of the boxes of one component."""


class _Pair(NamedTuple):
    source: Tensor
    destination: Tensor


class _Geometry(NamedTuple):
    """The units of one stream: entries in a unit (0: rows without tokens), and units in a row of each side."""

    entries: int
    source_units: int
    destination_units: int


def compile_pair(source: RankLayout, destination: RankLayout, share: Share | None = None) -> PairPlan:
    """Compile what ``source`` sends to ``destination``: its ``share`` of `assign`, or all that both hold if None.

    Both layouts must have passed `check_layout`. Raises `LayoutMismatch` where the two do not fit each other, or where
    ``share`` was not made for them.
    """
    if share is None:
        share = overlap(source, destination)
    kinds = {component.name: component.kind for layout in (source, destination) for component in layout.components}
    streams: dict[str, tuple[Stream, ...]] = {}
    for component in destination.components:
        by_tokens: dict[TokenClasses, list[Part]] = {}
        for part in share.parts:
            if part.component == component.name:
                by_tokens.setdefault(part.tokens, []).append(part)
        if by_tokens:
            ends = _component(source, component.name, "source"), component
            made = (_stream(source, destination, *ends, parts, tokens) for tokens, parts in by_tokens.items())
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
    sources = {(tensor.role, tensor.layer): tensor for tensor in source.tensors}
    destinations = {(tensor.role, tensor.layer): tensor for tensor in destination.tensors}
    pairs = [[_pair(part, layer, sources, destinations) for layer in part.layers] for part in parts]
    if not destination.kind.has_tokens:
        whole = single = _boxes(parts, pairs, _Geometry(0, 1, 1))
    else:
        whole = single = _boxes(parts, pairs, _Geometry(unit, pages[0] // unit, pages[1] // unit))
        if unit > 1:
            single = _boxes(parts, pairs, _Geometry(1, *pages))
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


def _pair(
    part: Part, layer: int, sources: dict[tuple[str, int], Tensor], destinations: dict[tuple[str, int], Tensor]
) -> _Pair:
    key = (part.role, layer)
    if key not in sources or key not in destinations:
        side = "destination" if key in sources else "source"
        raise LayoutMismatch(
            f"component {part.component}, role {part.role}, layer {layer}: the share names it, but the {side} has "
            f"no such tensor"
        )
    return _Pair(sources[key], destinations[key])


def _boxes(parts: list[Part], pairs: list[list[_Pair]], geometry: _Geometry) -> Boxes:
    tables: list[Boxes] = []
    total = 0
    for part, listed in zip(parts, pairs, strict=True):
        alike: dict[tuple[tuple[Axis, ...], tuple[Axis, ...]], list[_Pair]] = {}
        for pair in listed:
            alike.setdefault((pair.source.axes, pair.destination.axes), []).append(pair)
        for (source_axes, destination_axes), group in alike.items():
            first = group[0].destination
            name = where(part.component, first)
            made = template(source_axes, destination_axes, first.itemsize, dict(part.block), geometry.entries, name)
            total += len(made.shape) * len(group)
            if total > MAX_TABLE:
                raise LayoutMismatch(f"{name}: the two layouts break each row into more than {MAX_TABLE} boxes")
            tables.append(_place(made, group, geometry))
    return fold(Boxes(*(np.concatenate(columns) for columns in zip(*tables, strict=True))))


def _place(made: Template, group: list[_Pair], geometry: _Geometry) -> Boxes:
    """Put the boxes of one template at each of the tensors in ``group``."""
    count = len(made.shape)
    return Boxes(
        np.tile(made.shape, (len(group), 1)),
        _side(made.source, [pair.source for pair in group], geometry.source_units, geometry.entries, count),
        _side(
            made.destination, [pair.destination for pair in group], geometry.destination_units, geometry.entries, count
        ),
    )


def _side(relative: Int64s, tensors: list[Tensor], units: int, tokens: int, count: int) -> Int64s:
    step = 0
    if units > 1:
        step = tokens * next(axis.stride for axis in tensors[0].axes if axis.name == TOKEN)
    fixed = [(tensor.region, tensor.offset, tensor.row_stride, units, step, 0, 0) for tensor in tensors]
    table = np.repeat(np.array(fixed, np.int64), count, axis=0)
    table[:, 1] += np.tile(relative[:, 0], len(tensors))
    table[:, 5:] = np.tile(relative[:, 1:], (len(tensors), 1))
    return table
