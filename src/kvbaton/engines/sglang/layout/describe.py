"""The whole of one rank."""

from __future__ import annotations

from typing import Any, Literal

from kvbaton.engines.sglang.layout.arguments import MemoryKind, Regions, read
from kvbaton.engines.sglang.layout.attention import describe_kv
from kvbaton.engines.sglang.layout.aux import describe_aux
from kvbaton.engines.sglang.layout.ranks import Ranks
from kvbaton.engines.sglang.layout.rows import Described
from kvbaton.engines.sglang.layout.states import describe_state
from kvbaton.layout import Component, Ownership, RankLayout, check_layout


def describe(
    kv_args: Any, ranks: Ranks, *, memory: MemoryKind = "device", device: Literal["host", "cuda"] = "host"
) -> Described:
    """The layout of an SGLang rank: of anything with the attributes of SGLang's `KVArgs`.

    ``memory`` "host" describes the host buffers into which a decode rank may receive instead of its own. ``device`` is
    the kind of memory of the pools; aux buffers are always in host memory. Raises `LayoutError` for what cannot be
    described, with the component and the numbers.
    """
    args = read(kv_args, memory, device)
    regions = Regions()
    paged = describe_kv(args, ranks, regions)
    states = [describe_state(state, args, ranks, regions) for state in args.states]
    aux = [describe_aux(args.aux, ranks, regions)] if args.aux else []
    components = [*paged.components, *states, *aux]
    if ranks.unified:
        components = [_overlaid(component) for component in components]
    owned = Ownership(1, ranks.dcp[1], ranks.dcp[0])
    layout = RankLayout(tuple(components), ranks.coords, owned)
    check_layout(layout, [region.nbytes for region in regions.listed])
    tails = {
        state.name: max((buffer.row_bytes for buffer in state.buffers), default=0)
        for state in args.states
        if state.type == "dsa_tail"
    }
    return Described(
        layout,
        regions.listed,
        args.page_size,
        [component.name for component in paged.components],
        [component.name for component in states],
        tails,
        opaque=paged.opaque,
    )


def _overlaid(component: Component) -> Component:
    """One of several components in the same memory, of which no two rows in use overlap."""
    if component.kind.aux:
        return component
    return Component(component.name, component.kind, component.tensors, component.page_size, component.owned, "unified")
