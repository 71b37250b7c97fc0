"""Which source rank sends which part of what a destination rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import Component, Ownership, RankLayout, Span, Tensor
from kvbaton.plan.cells import Block, Bools, Cell, every_cell, merge, partition
from kvbaton.plan.fit import Held, Known, Tensors, check_component, check_tensor, fail_missing, held, tensors_of, where
from kvbaton.plan.share import EVERY_TOKEN, Part, Share, TokenClasses
from kvbaton.plan.tokens import choose_holders

MAX_CELLS_IN_ALL = 1 << 17
"""Bound of the cells of all tensors of one destination that are not held alike."""
MAX_HOLDINGS_IN_ALL = 1 << 20
"""Bound of these cells times the source ranks that hold something of them."""
MAX_CHOICES_IN_ALL = 1 << 23
"""Bound of token classes times source ranks, over all components that are shared out unlike."""


class _Source(NamedTuple):
    number: int
    component: Component
    tensors: dict[tuple[str, int], tuple[Tensor, Held]]


_Chosen = tuple[list[TokenClasses | None], int | None]


@dataclass
class _Rules:
    turn: int
    striped: bool
    cast: bool
    complete: bool
    chosen: dict[tuple[tuple[Ownership, ...], Ownership, tuple[int, ...]], _Chosen] = field(default_factory=dict)
    """What `choose_holders` said: most groups of tensors ask it the same."""
    cells: int = 0
    """How many there are so far."""
    holdings: int = 0
    choices: int = 0

    def count(self, cells: int, holders: int, name: str) -> None:
        self.cells += cells
        self.holdings += cells * holders
        if self.cells > MAX_CELLS_IN_ALL or self.holdings > MAX_HOLDINGS_IN_ALL:
            raise LayoutMismatch(
                f"{name}: up to here the spans of all ranks cut unlike tensors into {self.cells} cells; at "
                f"most {MAX_CELLS_IN_ALL} are allowed, and {MAX_HOLDINGS_IN_ALL} over all source ranks: give tensors "
                "that are alike the same axes and spans"
            )

    def choose(self, key: tuple[tuple[Ownership, ...], Ownership, tuple[int, ...]], name: str) -> _Chosen:
        """As `choose_holders`, once for each key."""
        if key not in self.chosen:
            chosen = self.chosen[key] = choose_holders(*key, self.turn, self.striped)
            self.choices += sum(len(tokens.remainders) for tokens in chosen[0] if tokens is not None)
            if self.choices > MAX_CHOICES_IN_ALL:
                raise LayoutMismatch(
                    f"{name}, axis token: up to here the source ranks share the tokens of unlike components in "
                    f"{self.choices} classes; at most {MAX_CHOICES_IN_ALL} are allowed: give components the same owned "
                    "tokens and page size, or units that divide each other"
                )
        return self.chosen[key]


def assign(
    sources: Sequence[RankLayout],
    destination: RankLayout,
    *,
    destination_index: int = 0,
    striped: bool = False,
    cast: bool = False,
) -> tuple[Share, ...]:
    """Cut what ``destination`` needs into one `Share` for each source, in order.

    Every logical element (component, role, layer, token, axis indices) of the destination's tensors with rows is in
    exactly one share. Where several sources hold the same elements, one of them sends: which one turns with
    ``destination_index`` so that destinations spread over the holders; with ``striped`` all of them send, in stripes of
    tokens, or layer by layer where rows hold no tokens. Both sides compute the same answer. All layouts must have
    passed `check_layout`.

    With ``cast``, dtypes, factors and scales may differ. The scales that the destination has for such a tensor are in
    no share: who sends the tensor makes them.

    Raises `LayoutMismatch`, which names the component, the role, the layer, the axis and both numbers, where dtype,
    kind, window, axes or sizes differ, or where no source holds what is needed.
    """
    return _assign(tuple(sources), destination, _Rules(destination_index, striped, cast, complete=True))


def overlap(source: RankLayout, destination: RankLayout, *, cast: bool = False) -> Share:
    """All that both ranks hold, whether or not it is all that the destination needs; ``cast`` as for `assign`.

    Raises `LayoutMismatch` as `assign` does, also for a tensor that has no rows at the source and some at the
    destination, but not for what the source lacks.
    """
    return _assign((source,), destination, _Rules(0, striped=False, cast=cast, complete=False))[0]


def _assign(sources: tuple[RankLayout, ...], destination: RankLayout, rules: _Rules) -> tuple[Share, ...]:
    parts: list[list[Part]] = [[] for _ in sources]
    known: Known = {}
    for component in destination.components:
        named = _sources_of(component, sources, known)
        groups = _groups(component, sources, named, known, rules)
        for (role, needed, holders, stripe), tensors in groups.items():
            layers = tuple(tensor.layer for tensor in tensors)
            axes = tuple(name for name, _, _ in needed.axes)
            for number, blocks, tokens in _blocks(
                component, tensors[0], needed, holders, sources, destination, named, rules, stripe
            ):
                for block in blocks:
                    part = Part(component.name, role, layers, tuple(zip(axes, block, strict=True)), tokens)
                    parts[number].append(part)
    return tuple(Share(tuple(listed)) for listed in parts)


def _sources_of(component: Component, sources: tuple[RankLayout, ...], known: Known) -> list[_Source]:
    found: list[_Source] = []
    for number, layout in enumerate(sources):
        for other in layout.components:
            if other.name == component.name:
                check_component(other, component, layout.coords)
                own = tensors_of(other)
                tensors = {key: (tensor, held(tensor, own, known)) for key, tensor in own.items()}
                found.append(_Source(number, other, tensors))
    return found


_GroupKey = tuple[str, Held, tuple[tuple[int, Held], ...], int]


def _groups(
    component: Component,
    sources: tuple[RankLayout, ...],
    named: list[_Source],
    known: Known,
    rules: _Rules,
) -> dict[_GroupKey, list[Tensor]]:
    """Tensors of equal role that are needed and held alike: most layers of a model are one group.

    The last item of a key is the stripe: rows without tokens cannot be striped by tokens, so layers take turns.
    """
    own = tensors_of(component)
    made = _made_scales(component, own, named, known)
    layers = sorted({tensor.layer for tensor in component.tensors if tensor.rows})
    turns = {layer: place for place, layer in enumerate(layers)} if rules.striped else {}
    groups: dict[_GroupKey, list[Tensor]] = {}
    fits: set[tuple[Held, Held]] = set()
    for tensor in component.tensors:
        if not tensor.rows or (tensor.role, tensor.layer) in made:
            continue
        needed = held(tensor, own, known)
        holders: list[tuple[int, Held]] = []
        elided = False
        for position, source in enumerate(named):
            entry = source.tensors.get((tensor.role, tensor.layer))
            if entry is None:
                continue
            other, other_held = entry
            if not other.rows:
                elided = True
                continue
            if (other_held, needed) not in fits:
                check_tensor(other, tensor, other_held, needed, component.name, cast=rules.cast)
                fits.add((other_held, needed))
            holders.append((position, other_held))
        if not holders:
            if rules.complete or elided:
                fail_missing(sources, component, tensor)
            continue
        stripe = 0 if component.kind.has_tokens else turns.get(tensor.layer, 0) % len(holders)
        groups.setdefault((tensor.role, needed, tuple(holders), stripe), []).append(tensor)
    return groups


def _made_scales(
    component: Component,
    own: Tensors,
    named: list[_Source],
    known: Known,
) -> set[tuple[str, int]]:
    """Role and layer of the scales that are made of values on their way, since no source has the tensor as it is."""
    made: set[tuple[str, int]] = set()
    for tensor in component.tensors:
        if not tensor.scale or not tensor.rows:
            continue
        needed = held(tensor, own, known).format
        entries = [source.tensors.get((tensor.role, tensor.layer)) for source in named]
        formats = {entry[1].format for entry in entries if entry is not None and entry[0].rows}
        if formats - {needed}:
            if len(formats) > 1:
                several = " on some source ranks and ".join(sorted(map(str, formats)))
                raise LayoutMismatch(
                    f"{where(component.name, tensor)}: dtype is {several} on others, and {needed} at the destination; "
                    f"give all source ranks the same KV cache dtype"
                )
            made.add((tensor.scale, tensor.layer))
    return made


def _blocks(
    component: Component,
    tensor: Tensor,
    needed: Held,
    holders: tuple[tuple[int, Held], ...],
    sources: tuple[RankLayout, ...],
    destination: RankLayout,
    named: list[_Source],
    rules: _Rules,
    stripe: int,
) -> list[tuple[int, list[Block], TokenClasses]]:
    """``(source number, blocks, tokens)`` for one group of tensors, in the order of the sources."""
    name = where(component.name, tensor)
    spans = [spans for _, _, spans in needed.axes]
    held_spans = [[spans for _, _, spans in holder.axes] for _, holder in holders]
    cuts, holds = partition(spans, held_spans, name)
    rules.count(holds[0].size if len(holds) else 0, len(holds), name)
    if rules.complete and not holds.any(axis=0).all():
        _fail_uncovered(name, needed, holders, cuts, holds)
    flat = holds.reshape(len(holders), -1)
    cells = every_cell(cuts)
    found: dict[tuple[int, TokenClasses], list[Cell]] = {}
    for alike in _held_alike(flat):
        positions = [holders[index][0] for index in np.flatnonzero(flat[:, alike[0]])]
        if not positions:
            continue
        inside = [cells[index] for index in alike]
        candidates = [named[position] for position in positions]
        for source, tokens in _senders(name, component, candidates, sources, destination, rules, stripe):
            found.setdefault((source, tokens), []).extend(inside)
    return [(source, merge(inside), tokens) for (source, tokens), inside in sorted(found.items())]


def _held_alike(holds: Bools) -> list[list[int]]:
    """The columns of ``holds``, those that are equal together; groups in the order of what they hold."""
    packed = np.ascontiguousarray(np.packbits(holds, axis=0).T)
    width, columns = packed.shape[1], packed.tobytes()
    groups: dict[bytes, list[int]] = {}
    for index in range(packed.shape[0]):
        groups.setdefault(columns[index * width : (index + 1) * width], []).append(index)
    return [groups[pattern] for pattern in sorted(groups)]


def _senders(
    name: str,
    component: Component,
    candidates: list[_Source],
    sources: tuple[RankLayout, ...],
    destination: RankLayout,
    rules: _Rules,
    stripe: int,
) -> list[tuple[int, TokenClasses]]:
    if not component.kind.has_tokens:
        return [(candidates[(rules.turn + stripe) % len(candidates)].number, EVERY_TOKEN)]
    ratio = component.kind.ratio
    owned = tuple(sources[source.number].owned_of(source.component).in_entries(ratio) for source in candidates)
    needed = destination.owned_of(component)
    rows = *(source.component.entries_per_row for source in candidates), component.entries_per_row
    chosen, missing = rules.choose((owned, needed.in_entries(ratio), rows), name)
    if missing is not None and rules.complete:
        raise LayoutMismatch(
            f"{name}, axis token: the destination owns token {missing * ratio} (unit {needed.unit}, remainder "
            f"{needed.remainder} of {needed.modulus}), but none of the {len(owned)} source ranks "
            f"that hold these indices owns it; register all context-parallel ranks of the source"
        )
    return [(source.number, tokens) for source, tokens in zip(candidates, chosen, strict=True) if tokens is not None]


def _fail_uncovered(
    name: str, needed: Held, holders: tuple[tuple[int, Held], ...], cuts: list[list[Span]], holds: Bools
) -> None:
    for position, (axis, size, _) in enumerate(needed.axes):
        others = tuple(number for number in range(1, holds.ndim) if number != position + 1)
        covered = holds.any(axis=(0, *others))
        if not covered.all():
            start, count = cuts[position][int(np.flatnonzero(~covered)[0])]
            first = min(start for _, holder in holders for start, _ in holder.axes[position][2])
            last = max(start + count for _, holder in holders for start, count in holder.axes[position][2])
            raise LayoutMismatch(
                f"{name}, axis {axis}: the destination needs {start}..{start + count} of {size}, but no source holds "
                f"it ({len(holders)} source ranks hold indices between {first} and {last}); register all source ranks"
            )
    index = np.argwhere(~holds.any(axis=0))[0]
    block = ", ".join(
        f"{axis} {cut[at][0]}..{sum(cut[at])}" for (axis, _, _), cut, at in zip(needed.axes, cuts, index, strict=True)
    )
    raise LayoutMismatch(
        f"{name}: the destination needs the block {block}, but none of {len(holders)} source ranks holds it whole"
    )
