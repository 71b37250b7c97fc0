"""Hypothesis strategies for pairs of grids of the same small model, laid out in unlike ways."""

import itertools
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kvbaton.layout import AUX, PAGED, SLOT, Axis, Component, Coords, Ownership, RankLayout, Tensor, window

ITEMSIZE = {"float32": 4, "bfloat16": 2, "uint8": 1, "int64": 8}
PAGE_SIZES = (1, 2, 3, 4, 6, 16)


@dataclass
class LogicalTensor:
    """A tensor of the whole model: sizes by axis, and the blocks of the axis that tensor parallelism cuts."""

    role: str
    dtype: str
    sizes: dict
    cut: str = ""
    blocks: tuple = ()
    """Sizes of the blocks of the cut axis; of each block a rank takes its share, or one index if there are too few."""


@dataclass
class LogicalComponent:
    name: str
    kind: str
    tensors: list
    layers: list
    window: int = 0
    elided: set = field(default_factory=set)


def spans_of(tensor, axis, rank, size):
    if axis != tensor.cut:
        return ((0, tensor.sizes[axis]),)
    spans, base = [], 0
    for block in tensor.blocks:
        if block >= size:
            spans.append((base + rank * (block // size), block // size))
        else:
            spans.append((base + rank // (size // block), 1))
        base += block
    return tuple(spans)


@st.composite
def logical_models(draw):
    layers = list(range(draw(st.integers(1, 4))))
    heads = draw(st.sampled_from((1, 2, 4)))
    dim = draw(st.sampled_from((1, 2, 3)))
    dtype = draw(st.sampled_from(("bfloat16", "float32", "uint8")))
    components = []
    sets = draw(st.sets(st.sampled_from(("kv", "window", "latent", "state", "aux")), min_size=1, max_size=3))
    for name in sorted(sets):
        window = 0
        if name in ("kv", "window"):
            tensors = [
                LogicalTensor(role, dtype, {"head": heads, "dim": dim + extra}, "head", (heads,))
                for role, extra in (("key", 0), ("value", draw(st.integers(0, 1))))
            ]
            window = draw(st.integers(1, 30)) if name == "window" else 0
            kind = "window" if window else "paged"
        elif name == "latent":
            tensors = [LogicalTensor("latent", dtype, {"dim": 5}), LogicalTensor("index_key", "uint8", {"dim": 3})]
            kind = "paged"
        elif name == "state":
            tensors = [
                LogicalTensor("conv", "bfloat16", {"channel": 16, "column": 3}, "channel", (4, 4, 8)),
                LogicalTensor("recurrent", "float32", {"head": 4, "row": 2, "column": 3}, "head", (4,)),
            ]
            kind = "slot"
        else:
            tensors = [LogicalTensor("token", "int64", {"item": 1}), LogicalTensor("logits", "float32", {"item": 3})]
            kind = "aux"
        own = [0] if name == "aux" else layers
        keys = [(tensor.role, layer) for tensor in tensors for layer in own]
        elided = draw(st.sets(st.sampled_from(keys), max_size=1)) if draw(st.booleans()) else set()
        components.append(LogicalComponent(name, kind, tensors, own, window, elided))
    return components


@st.composite
def laid_out(draw, entry, layers, page_size, rows, tp, region):
    """The tensors of one component on one rank, in one region: any order of axes, any placement, padding anywhere."""
    with_tokens = entry.kind in ("paged", "window")
    placement = draw(st.sampled_from(("layers_first", "fused", "blocks_first", "rows_inside")))
    padding = draw(st.sampled_from((0, 0, 0, 1, 4)))
    orders = {
        tensor.role: draw(st.permutations([*tensor.sizes, *(["token"] if with_tokens else [])]))
        for tensor in entry.tensors
    }
    common = draw(st.booleans())
    shapes = []
    for layer, tensor in itertools.product(layers, entry.tensors):
        order = orders[tensor.role]
        if common:
            # The usual order: tokens outermost, as in NHD.
            order = (["token"] if with_tokens else []) + list(tensor.sizes)
        shapes.append((layer, tensor, order))
    made, cursor, groups = [], draw(st.integers(0, 5)), []
    for layer, group in itertools.groupby(shapes, key=lambda shape: shape[0]):
        groups.append((layer, list(group)))
    if placement == "blocks_first":
        groups = [(None, shapes)] if shapes else []
    for _, group in groups:
        inside, places = 0, []
        for layer, tensor, order in group:
            stride, axes = ITEMSIZE[tensor.dtype], {}
            for position, name in enumerate(reversed(order)):
                spans = ((0, page_size),) if name == "token" else spans_of(tensor, name, *tp)
                size = page_size if name == "token" else tensor.sizes[name]
                if placement == "rows_inside" and position == len(order) - 1:
                    # The rows lie inside the outermost axis.
                    row_stride = stride + padding
                    stride = row_stride * rows
                axes[name] = Axis(name, size, stride, spans)
                stride = stride * axes[name].local_size + padding
            listed = tuple(axes[name] for name in draw(st.permutations(order)))
            places.append((layer, tensor, listed, inside, stride))
            if placement == "rows_inside":
                made.append(Tensor(tensor.role, layer, region, cursor, rows, row_stride, tensor.dtype, listed))
                cursor += stride
            elif placement == "layers_first":
                made.append(Tensor(tensor.role, layer, region, cursor, rows, stride, tensor.dtype, listed))
                cursor += stride * rows
            inside += stride
        if placement in ("fused", "blocks_first"):
            for layer, tensor, listed, at, _ in places:
                made.append(Tensor(tensor.role, layer, region, cursor + at, rows, inside, tensor.dtype, listed))
            cursor += inside * rows
    kept = [
        Tensor(t.role, t.layer, t.region, 0, 0, t.row_stride, t.dtype, t.axes)
        if (t.role, t.layer) in entry.elided
        else t
        for t in made
    ]
    kind = {"paged": PAGED, "slot": SLOT, "aux": AUX}.get(entry.kind) or window(entry.window)
    return Component(entry.name, kind, tuple(kept), page_size)


@st.composite
def grids(draw, model, rows):
    """All ranks of one side; ``rows`` are the row counts by kind of component."""
    tp = draw(st.sampled_from((1, 2, 4)))
    pp = draw(st.sampled_from((1, 1, 2)))
    cp = draw(st.sampled_from((1, 1, 1, 2, 3)))
    page_size = {entry.name: draw(st.sampled_from(PAGE_SIZES)) for entry in model}
    unit = draw(st.sampled_from((1, 2, 4, max(page_size.values()))))
    if draw(st.booleans()):
        cp = 1
    ranks = []
    for t, p, c in itertools.product(range(tp), range(pp), range(cp)):
        components = []
        for region, entry in enumerate(model):
            with_tokens = entry.kind in ("paged", "window")
            layers = entry.layers if len(entry.layers) < pp else entry.layers[p::pp]
            size = page_size[entry.name] if with_tokens else 1
            components.append(draw(laid_out(entry, layers, size, rows(entry, size), (t, tp), region)))
        ranks.append(RankLayout(tuple(components), Coords((t, tp), (p, pp), (c, cp)), Ownership(unit, cp, c)))
    return ranks
