"""What one rank of an engine holds of the model's cache: its layout, and the copies between a shard and a whole tensor.

A `Shard` knows no memory of its own. `kvbaton.engines.hf.rank_pools` adds it; a process that receives the shards of
others does without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.engines.hf.caches import CacheDescription, Place
from kvbaton.engines.hf.channels import block_spans
from kvbaton.engines.hf.grid import Grid
from kvbaton.layout import (
    TOKEN,
    Component,
    Coords,
    Kind,
    Ownership,
    RankLayout,
    Tensor,
    aux_fields,
    dense_axes,
    replicated_spans,
)
from kvbaton.layout.build import Spans

Int64s = npt.NDArray[np.int64]

AUX = "aux"
AUX_FIELDS = {"first_token": ("int64", 1), "prompt_tokens": ("int64", 1), "finished_at": ("float64", 1)}
_ALIGNMENT = 64
CACHE_REGION, AUX_REGION = 0, 1
"""The regions of a rank: its share of the cache, wherever the model is, and the aux table, which the CPU reads."""

Slices = tuple[slice, ...]
Positions = slice | torch.Tensor
"""Places on the first axis of a tensor."""


@dataclass(frozen=True)
class Group:
    """A component of the whole model: the places that share rows, and how their rows relate to tokens."""

    name: str
    kind: Kind
    page_size: int
    places: tuple[Place, ...]

    @property
    def streamed(self) -> bool:
        """As `Place.streamed`."""
        return self.places[0].streamed


def groups_of(description: CacheDescription, grid: Grid) -> tuple[Group, ...]:
    """The components of a model, the aux table left out."""
    by_name: dict[str, list[Place]] = {}
    for place in description.places:
        by_name.setdefault(place.component, []).append(place)
    return tuple(_group(name, tuple(places), grid) for name, places in by_name.items())


def _group(name: str, places: tuple[Place, ...], grid: Grid) -> Group:
    kind = places[0].kind
    if not kind.has_tokens:
        return Group(name, kind, 1, places)
    if kind.tail:
        # One row for each request: a ring that holds as many tokens as can be without an entry.
        return Group(name, kind, kind.tail, places)
    if kind.window and grid.window_ring:
        kind = Kind(window=kind.window, ring=True)
    return Group(name, kind, grid.component_page_size([kind.ratio]), places)


class Held:
    """The part of one place that a rank holds.

    ``tensor`` is where it lies. ``entries`` are those of the request that the rank holds, as `Place.held` counts them.
    """

    def __init__(self, place: Place, tensor: Tensor, entries: Ownership) -> None:
        self.place = place
        self.tensor = tensor
        self.entries = entries
        by_name = {axis.name: axis for axis in tensor.axes}
        self.axes = tuple(by_name[name] for name in place.axes)
        self.shape = tuple(axis.local_size for axis in self.axes)
        self._blocks = tuple(_blocks([axis.spans for axis in self.axes]))

    def numbers(self, first: int, last: int) -> Int64s:
        """Those of the entries ``[first, last)`` that this rank holds."""
        owned = self.entries
        numbers = np.arange(first, last, dtype=np.int64)
        return numbers if owned.modulus == 1 else numbers[numbers // owned.unit % owned.modulus == owned.remainder]

    def positions(self, numbers: Int64s, begin: int) -> Positions:
        """Where entries ``numbers``, neighbours among those that it holds, are in a tensor that starts with ``begin``.

        A slice where the rank holds all of them: that saves a copy.
        """
        if self.entries.modulus == 1 and numbers.size:
            return slice(int(numbers[0]) - begin, int(numbers[-1]) - begin + 1)
        return torch.from_numpy(numbers - begin)

    def cut(self, whole: torch.Tensor, shard: torch.Tensor, index: tuple[torch.Tensor, ...], at: Positions) -> None:
        """Copy entries ``at`` of ``whole`` [entries, axes...] to ``shard[index]`` [..., axes...]."""
        for ours, theirs in self._blocks:
            here: tuple[Any, ...] = (*index, *ours)
            there: tuple[Any, ...] = (at, *theirs)
            shard[here] = whole[there]

    def cut_state(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy this rank's part of ``whole`` [axes...] to ``shard`` [axes...]."""
        for ours, theirs in self._blocks:
            shard[ours] = whole[theirs]

    def join(self, shard: torch.Tensor, whole: torch.Tensor, at: Positions | None) -> None:
        """Copy ``shard`` to its place in ``whole``: to the entries ``at``, or all of it where it is a state."""
        for ours, theirs in self._blocks:
            if at is None:
                whole[theirs] = shard[ours]
            else:
                there: tuple[Any, ...] = (at, *theirs)
                here: tuple[Any, ...] = (slice(None), *ours)
                whole[there] = shard[here]


class Shard:
    """What rank ``number`` of ``grid`` holds of ``groups``; ``rows`` counts the rows of each component, by its name.

    Raises `ShardError`, with the component and both numbers, where heads or channels cannot be shared by ``grid.tp``.
    """

    def __init__(
        self, description: CacheDescription, grid: Grid, number: int, groups: Sequence[Group], rows: dict[str, int]
    ) -> None:
        self.number = number
        self.coords = grid.coords(number)
        self.held: dict[str, tuple[Held, ...]] = {}
        """By component, those of which this rank has a layer."""
        components: list[Component] = []
        offset = 0
        for group in groups:
            owned = grid.owned(self.coords, group.kind.ratio) if group.kind.has_tokens else Ownership()
            held = []
            for place in group.places:
                if grid.stage_of(place.layer, description.layers) != self.coords.pp[0]:
                    continue
                tensor, size = _tensor(description, grid, self.coords, group, place, offset, rows[group.name])
                offset += -(-size * rows[group.name] // _ALIGNMENT) * _ALIGNMENT
                held.append(Held(place, tensor, owned.in_entries(group.kind.ratio)))
            if held:
                self.held[group.name] = tuple(held)
                tensors = tuple(each.tensor for each in held)
                own = owned if group.kind.has_tokens and owned != grid.owned(self.coords) else None
                components.append(Component(group.name, group.kind, tensors, group.page_size, own))
        self.has_aux = self.coords.pp[0] == grid.pp - 1
        if self.has_aux:
            components.append(aux_fields(AUX_FIELDS, AUX, rows=rows[AUX], region=AUX_REGION))
        self.layout = RankLayout(tuple(components), self.coords, grid.owned(self.coords))


def _tensor(
    description: CacheDescription, grid: Grid, coords: Coords, group: Group, place: Place, offset: int, rows: int
) -> tuple[Tensor, int]:
    """The tensor of a place on one rank, and the bytes of a row."""
    axes: list[tuple[str, int, Spans | None]] = []
    for name, size in zip(place.axes, place.shape, strict=True):
        axes.append((name, size, _spans(description, coords, group.name, name, size)))
    if group.kind.has_tokens:
        outside = grid.order == "NHD" or axes[0][0] != "head"
        axes.insert(0 if outside else 1, (TOKEN, group.page_size // group.kind.ratio, None))
    dtype = str(place.dtype).removeprefix("torch.")
    made, size = dense_axes(axes, dtype)
    return Tensor(place.role, place.layer, CACHE_REGION, offset, rows, size, dtype, made), size


def _spans(description: CacheDescription, coords: Coords, component: str, axis: str, size: int) -> Spans | None:
    rank, ranks = coords.tp
    if ranks == 1:
        return None
    what = f"component {component}, axis {axis}"
    if axis == "head":
        return replicated_spans(size, rank, ranks, what=what)
    if axis == "channel" and description.blocks:
        return block_spans(description.blocks, rank, ranks, what=what)
    return None


def _blocks(spans: Sequence[Spans]) -> list[tuple[Slices, Slices]]:
    """Slices in the shard and in the whole, so that together they copy all that the spans name."""
    by_axis = []
    for each in spans:
        at, pairs = 0, []
        for start, count in each:
            pairs.append((slice(at, at + count), slice(start, start + count)))
            at += count
        by_axis.append(pairs)
    return [
        (tuple(ours for ours, _ in chosen), tuple(theirs for _, theirs in chosen))
        for chosen in itertools.product(*by_axis)
    ]
