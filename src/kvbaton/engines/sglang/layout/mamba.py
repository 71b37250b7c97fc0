"""States of linear attention and state-space models: one slot of each tensor for a request."""

from __future__ import annotations

from collections import Counter

from kvbaton.engines.sglang.layout.arguments import Arguments, Regions, State, refuse
from kvbaton.engines.sglang.layout.numbering import numbered
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.engines.sglang.layout.tensors import AxisSpec, elided, per_rank, same, tensor
from kvbaton.layout import SLOT, Component, Span, Tensor, sharded_spans


def describe_mamba(state: State, args: Arguments, ranks: Ranks, regions: Regions) -> Component:
    """Tensors of all layers, one kind after the other. Raises `LayoutError`.

    A tensor is ``[slot, outer, channel, ...]``; tensor parallelism cuts the channels, those of a convolution by block.
    """
    places = _places(state, ranks)
    last = max((kind for place, (kind, _) in enumerate(places) if _cut(state, place)), default=0)
    tensors: list[Tensor] = []
    for place, (buffer, (kind, layer)) in enumerate(zip(state.buffers, places, strict=True)):
        role = f"state{kind}"
        if buffer.elided:
            tensors.append(elided(role, layer))
            continue
        # What follows the convolutions is the recurrent state.
        axes = _axes(state, place, buffer.row_bytes, ranks, convolution=kind < last)
        tensors.append(tensor(state.name, role, layer, buffer, regions, axes))
    return Component(state.name, SLOT, tuple(tensors))


def _places(state: State, ranks: Ranks) -> list[tuple[int, int]]:
    """The number of its kind, and the layer, of each tensor."""
    layers = state.layers or ranks.layers.get(state.name)
    if layers is None and ranks.pp[1] == 1:
        return _runs(state)
    seen: Counter[int] = Counter()
    places: list[tuple[int, int]] = []
    for layer in numbered(state.name, ranks, len(state.buffers)) if layers is None else layers:
        places.append((seen[layer], layer))
        seen[layer] += 1
    return places


def _runs(state: State) -> list[tuple[int, int]]:
    """The same without layer numbers: tensors of one kind are neighbours and alike."""
    places: list[tuple[int, int]] = []
    kind, layer, before = -1, 0, None
    for place, buffer in enumerate(state.buffers):
        alike = (buffer.row_bytes, state.dims[place : place + 1], state.groups[place : place + 1])
        kind, layer = (kind, layer + 1) if alike == before else (kind + 1, 0)
        before = alike
        places.append((kind, layer))
    return places


def _cut(state: State, place: int) -> bool:
    return bool(state.dims and state.dims[place])


def _axes(state: State, place: int, nbytes: int, ranks: Ranks, *, convolution: bool) -> list[AxisSpec]:
    rank, size = ranks.of_states
    if not state.dims:
        # Nothing says how it is cut: a page envelope of unified memory, for one.
        return per_rank(nbytes, (rank, size))
    dim = state.dims[place]
    if dim == 0:
        return same(nbytes)
    outer = state.outers[place] if state.outers else 1
    if outer < 1 or dim < 0 or nbytes % (outer * dim):
        refuse(
            state.name,
            f"tensor {place}: a slot of {nbytes} bytes is not {outer} rows of {dim} channels "
            "(state_slice_outer_counts, state_dim_per_tensor)",
        )
    inner = nbytes // (outer * dim)
    groups = state.groups[place] if state.groups else None
    blocks = tuple(ranks.conv_blocks or ()) if groups is None and convolution else groups
    spans: tuple[Span, ...] = ((rank * dim, dim),)
    if blocks is not None:
        if sum(blocks) != dim * size or any(block % size for block in blocks):
            # Blocks that nobody tells, or that do not make up what the ranks hold.
            return per_rank(nbytes, (rank, size))
        spans = sharded_spans(blocks, rank, size, what=f"component {state.name}, axis channel")
    return [("row", outer, None), ("channel", dim * size, spans), ("byte", inner, None)]
