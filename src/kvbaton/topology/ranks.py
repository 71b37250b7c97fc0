"""From a deployment of a model to the layouts of its ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbaton.errors import ConfigurationError, LayoutError
from kvbaton.layout import (
    Component,
    Coords,
    Field,
    Kind,
    Ownership,
    RankLayout,
    Span,
    check_layout,
    component,
    required_bytes,
    whole,
)
from kvbaton.layout.build import Placement
from kvbaton.layout.limits import MAX_COMPONENTS, MAX_TENSORS
from kvbaton.topology.model import ComponentModel, Model

SLOTS = 8
"""Rows of a component whose rows are those of a request."""
MAX_SIDE_TENSORS = 1 << 17
"""Tensors that all ranks of a side may have together."""


class Layouting(NamedTuple):
    """How one component is laid out."""

    page_size: int
    order: str
    placement: Placement
    dtype: str = ""
    """Replaces the dtype of all its tensors, where it is given."""
    whole: bool = False
    stage: int | None = None
    factor: float = 1.0
    scale: Mapping[str, int] | None = None
    """How many neighbours along each named axis share a scale; along the others all do. None: there are no scales."""


class Topology(NamedTuple):
    """A model and how one side serves it. ``stages`` are the layers of each pipeline stage.

    ``cp_unit`` is in tokens. ``cp_inside_tp``: the tensor-parallel ranks share the tokens. ``dtype`` is that of token
    rows whose tensors name none. ``cast``: as a destination, it allows elements to be cast.
    """

    title: str
    model: Model
    layouting: Mapping[str, Layouting]
    tp: int
    stages: tuple[tuple[int, ...], ...]
    cp: int
    cp_unit: int
    cp_inside_tp: bool
    dp: int
    dtype: str
    striped: bool
    transports: tuple[str, ...]
    cast: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks a data-parallel replica has."""
        return self.tp * len(self.stages) * (1 if self.cp_inside_tp else self.cp)


def lay_out(topology: Topology, tokens: int) -> list[RankLayout]:
    """The layouts of the ranks of one data-parallel replica, tensor parallelism fastest, then context, then pipeline.

    Their pools hold more than a request of ``tokens`` tokens. Every layout has passed `check_layout`. Raises
    `ShardError` where something does not divide over the ranks, `LayoutError` where a layout does not hold together,
    and `ConfigurationError` for more than `MAX_SIDE_TENSORS` tensors.
    """
    contexts = 1 if topology.cp_inside_tp else topology.cp
    _check_size(topology)
    held = {model.name: _by_stage(model, topology.stages) for model in topology.model.components}
    layouts: list[RankLayout] = []
    for stage, context, rank in itertools.product(range(len(topology.stages)), range(contexts), range(topology.tp)):
        place = rank % topology.cp if topology.cp_inside_tp else context
        coords = Coords((rank, topology.tp), (stage, len(topology.stages)), (place, topology.cp), (0, topology.dp))
        owned = Ownership(topology.cp_unit, topology.cp, place) if topology.cp > 1 else Ownership()
        layout = RankLayout(_components(topology, held, coords, tokens), coords, owned)
        check_layout(layout, required_bytes(layout.components))
        layouts.append(layout)
    return layouts


def _check_size(topology: Topology) -> None:
    """Raise `ConfigurationError` for so many tensors that it would take long to make them."""
    models = topology.model.components
    if len(models) > MAX_COMPONENTS:
        raise ConfigurationError(f"{topology.title}: {len(models)} components, at most {MAX_COMPONENTS} are allowed")
    stages = len(topology.stages)
    tensors = sum(len(model.tensors) * (stages if model.kind.aux else len(model.layers)) for model in models)
    tensors *= topology.ranks // stages
    if tensors > min(MAX_SIDE_TENSORS, topology.ranks * MAX_TENSORS):
        raise ConfigurationError(
            f"{topology.title}: {tensors} tensors on {topology.ranks} ranks, at most {MAX_SIDE_TENSORS} can be "
            f"explained, {MAX_TENSORS} on a rank; choose fewer ranks or layers"
        )


def _by_stage(model: ComponentModel, stages: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The layers of a component on each stage."""
    if model.kind.aux:
        return [model.layers] * len(stages)
    stage_of = {layer: number for number, stage in enumerate(stages) for layer in stage}
    held: list[list[int]] = [[] for _ in stages]
    for layer in model.layers:
        held[stage_of[layer]].append(layer)
    return [tuple(layers) for layers in held]


def _components(
    topology: Topology, held: Mapping[str, Sequence[tuple[int, ...]]], coords: Coords, tokens: int
) -> tuple[Component, ...]:
    made: list[Component] = []
    for model in topology.model.components:
        layouting = topology.layouting[model.name]
        if layouting.stage not in (None, coords.pp[0]):
            continue
        layers = held[model.name][coords.pp[0]]
        if layers:
            made.append(_component(topology, model, layouting, layers, coords, len(made), tokens))
    return tuple(made)


def _component(
    topology: Topology,
    model: ComponentModel,
    layouting: Layouting,
    layers: tuple[int, ...],
    coords: Coords,
    region: int,
    tokens: int,
) -> Component:
    kind = model.kind
    page_size = layouting.page_size if kind.has_tokens else 1
    if page_size % kind.ratio:
        raise LayoutError(
            f"component {model.name}: page_size {page_size} is no multiple of the {kind.ratio} tokens of an entry"
        )
    fields = []
    for tensor in model.tensors:
        default = topology.dtype if kind.has_tokens else ""
        dtype = layouting.dtype or tensor.dtype or default or topology.model.dtype
        axes = tensor.ordered(layouting.order, page_size // kind.ratio) if kind.has_tokens else tensor.axes
        spans = [axis.spans(*coords.tp, model.name) for axis in axes]
        named = [(axis.name, axis.size, held or whole(axis.size)) for axis, held in zip(axes, spans, strict=True)]
        scale = f"{tensor.role}_scale" if layouting.scale is not None else ""
        fields.append(Field(tensor.role, dtype, tuple(named), scale, layouting.factor))
        if layouting.scale is not None:
            scaled = _scale_axes(named, layouting.scale, f"component {model.name}, role {tensor.role}")
            fields.append(Field(scale, "float32", scaled))
    made = component(
        model.name,
        kind,
        fields,
        layers=layers,
        rows=_rows(kind, page_size, tokens),
        page_size=page_size,
        placement=layouting.placement,
        region=region,
    )
    if not layouting.whole or not kind.has_tokens:
        return made
    return Component(made.name, made.kind, made.tensors, made.page_size, Ownership())


def _scale_axes(
    axes: Sequence[tuple[str, int, tuple[Span, ...]]], blocks: Mapping[str, int], where: str
) -> tuple[tuple[str, int, tuple[Span, ...]], ...]:
    """The axes of the scales of a tensor with ``axes``; raises `LayoutError`, beginning with ``where``."""
    unknown = sorted(blocks.keys() - {name for name, _, _ in axes})
    if unknown:
        raise LayoutError(
            f"{where}: scales along {unknown[0]}, but its axes are {', '.join(name for name, *_ in axes)}"
        )
    made = []
    for name, size, spans in axes:
        block = blocks.get(name)
        if block is None:
            continue
        uneven = [number for number in (size, *itertools.chain(*spans)) if number % block]
        if uneven:
            raise LayoutError(f"{where}, axis {name}: blocks of {block} with one scale do not divide {uneven[0]}")
        made.append((name, size // block, tuple((start // block, count // block) for start, count in spans)))
    return tuple(made)


def _rows(kind: Kind, page_size: int, tokens: int) -> int:
    """Twice what a request of ``tokens`` tokens needs: pages that do not lie side by side have a place."""
    if not kind.has_tokens:
        return SLOTS
    ring = min(kind.window + kind.tail, tokens)
    return 2 * (math.ceil(tokens / page_size) + math.ceil(ring / page_size) + 1)
