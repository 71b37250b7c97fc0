"""Helpers for engine authors: spans of a shard, dense strides, and the components of common caches.

Nothing here is needed by the planner: an engine whose memory looks otherwise writes `Tensor` and `Axis` by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvbaton.errors import LayoutError, ShardError
from kvbaton.layout import kinds
from kvbaton.layout.kinds import AUX, PAGED, SLOT, Kind
from kvbaton.layout.nouns import DTYPE_BYTES, TOKEN, Axis, Component, Span, Tensor

Spans = tuple[Span, ...]

Placement = Literal["layers_first", "fused", "blocks_first"]
"""How the tensors of a component share memory.

* ``layers_first``: every tensor has its rows by itself.
* ``fused``: the fields of one layer share a row (key, then value).
* ``blocks_first``: all layers and fields share a row.
"""


def whole(size: int) -> Spans:
    """Return the spans of a rank that holds a whole axis."""
    return ((0, size),)


def shard(total: int, rank: int, size: int, *, what: str = "axis") -> Span:
    """Return the span of ``rank`` when ``total`` indices are cut into ``size`` equal parts.

    ``what`` names the component and axis in the `ShardError` that a ``total`` raises which ``size`` does not divide.
    """
    if total % size:
        raise ShardError(
            f"{what}: {total} does not divide over {size} ranks; choose a number of ranks that divides {total}"
        )
    return rank * (total // size), total // size


def sharded_spans(block_sizes: Mapping[str, int] | Sequence[int], rank: int, size: int, *, what: str = "axis") -> Spans:
    """Return the spans of ``rank`` on an axis of several blocks that are cut each by itself.

    A convolution state is ``{"q": 8, "k": 8, "v": 16}``: rank 0 of 2 holds (0, 4), (8, 4) and (16, 8). Raises
    `ShardError`, naming ``what``, the block and both numbers, where a block does not divide.
    """
    blocks = block_sizes.items() if isinstance(block_sizes, Mapping) else enumerate(block_sizes)
    spans: list[Span] = []
    base = 0
    for name, total in blocks:
        start, count = shard(total, rank, size, what=f"{what}, block {name}")
        spans.append((base + start, count))
        base += total
    return tuple(spans)


def replicated_spans(heads: int, rank: int, size: int, *, what: str = "axis") -> Spans:
    """Return the heads of ``rank`` in grouped-query attention: a shard, or one head held by ``size / heads`` ranks.

    Raises `ShardError` where neither number divides the other.
    """
    if heads >= size:
        return (shard(heads, rank, size, what=what),)
    if size % heads:
        raise ShardError(
            f"{what}: {heads} heads cannot be spread evenly over {size} ranks; choose a number of ranks that divides "
            f"{heads} or is a multiple of it"
        )
    return ((rank * heads // size, 1),)


def dense_axes(axes: Iterable[tuple[str, int, Spans | None]], dtype: str) -> tuple[tuple[Axis, ...], int]:
    """Return axes that lie densely, the last one innermost, and the bytes that they take.

    Each entry is ``(name, size, spans)``; spans None is the whole axis.
    """
    listed = list(axes)
    stride = DTYPE_BYTES.get(dtype, 0)
    if not stride:
        raise LayoutError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}; pass its name as a text")
    made: list[Axis] = []
    for name, size, spans in reversed(listed):
        if spans is not None and not all(isinstance(span, tuple) and len(span) == 2 for span in spans):
            raise LayoutError(f"axis {name}: spans {spans!r} must be pairs (start, count), as in ((0, {size}),)")
        axis = Axis(name, size, stride, spans or whole(size))
        made.append(axis)
        stride *= axis.local_size
    return tuple(reversed(made)), stride


class Field(NamedTuple):
    """One tensor per layer: its role, its dtype and its axes, densely stored with the last axis innermost.

    ``scale`` and ``factor`` are those of `Tensor`.
    """

    role: str
    dtype: str
    axes: tuple[tuple[str, int, Spans | None], ...]
    scale: str = ""
    factor: float = 1.0


def component(
    name: str,
    kind: Kind,
    fields: Sequence[Field],
    *,
    layers: Sequence[int],
    rows: int,
    page_size: int = 1,
    placement: Placement = "layers_first",
    region: int = 0,
    offset: int = 0,
    region_each: bool = False,
) -> Component:
    """Make a component whose tensors lie densely in one region, from byte ``offset``.

    Components that share a region need an ``offset`` each (see `required_bytes`), or a ``region`` each.
    With ``region_each`` every tensor (``layers_first``) or layer (``fused``) has a region of its own, numbered from
    ``region``. ``layers`` are global layer ids.
    """
    built = [dense_axes(field.axes, field.dtype) for field in fields]
    layer_bytes = sum(size for _, size in built)
    tensors: list[Tensor] = []
    base = offset
    for position, layer in enumerate(layers):
        inside = 0
        for field, (axes, size) in zip(fields, built, strict=True):
            if placement == "layers_first":
                at, stride = base + inside * rows, size
                owner = region + len(tensors) if region_each else region
                start = offset if region_each else at
            elif placement == "fused":
                stride = layer_bytes
                owner = region + position if region_each else region
                start = (offset if region_each else base) + inside
            elif placement == "blocks_first":
                stride, owner = layer_bytes * len(layers), region
                start = offset + position * layer_bytes + inside
            else:
                raise LayoutError(
                    f"component {name}: placement {placement!r} is not one of layers_first, fused, blocks_first"
                )
            tensors.append(
                Tensor(field.role, layer, owner, start, rows, stride, field.dtype, axes, field.scale, field.factor)
            )
            inside += size
        base += layer_bytes * rows
    return Component(name, kind, tuple(tensors), page_size)


def paged_kv(
    name: str = "kv",
    *,
    layers: Sequence[int],
    rows: int,
    page_size: int,
    heads: int,
    head_dim: int,
    dtype: str,
    head_spans: Spans | None = None,
    order: Literal["NHD", "HND"] = "NHD",
    value_dim: int | None = None,
    window: int = 0,
    placement: Placement = "layers_first",
    region: int = 0,
    offset: int = 0,
    region_each: bool = False,
) -> Component:
    """Make the keys and values of attention: pages of ``page_size`` tokens.

    With ``window`` only those of the last ``window`` tokens are needed. ``heads`` counts the KV heads of the whole
    model; ``head_spans`` says which of them this rank holds (all by default; see `replicated_spans`). ``value_dim`` is
    for models whose values have another width than their keys.
    """
    token = (TOKEN, page_size, None)
    head = ("head", heads, head_spans)
    if order not in ("NHD", "HND"):
        raise LayoutError(f"component {name}: order {order!r} is neither 'NHD' nor 'HND'")
    outer = (token, head) if order == "NHD" else (head, token)
    fields = [
        Field("key", dtype, (*outer, ("dim", head_dim, None))),
        Field("value", dtype, (*outer, ("dim", head_dim if value_dim is None else value_dim, None))),
    ]
    return component(
        name,
        kinds.window(window) if window else PAGED,
        fields,
        layers=layers,
        rows=rows,
        page_size=page_size,
        placement=placement,
        region=region,
        offset=offset,
        region_each=region_each,
    )


def mla_latent(
    name: str = "latent",
    *,
    layers: Sequence[int],
    rows: int,
    page_size: int,
    latent_dim: int,
    dtype: str,
    role: str = "latent",
    placement: Placement = "layers_first",
    region: int = 0,
    offset: int = 0,
    region_each: bool = False,
) -> Component:
    """Make the latent of multi-head latent attention: one vector a token (with its rotary part), whole on each rank."""
    fields = [Field(role, dtype, ((TOKEN, page_size, None), ("dim", latent_dim, None)))]
    return component(
        name,
        PAGED,
        fields,
        layers=layers,
        rows=rows,
        page_size=page_size,
        placement=placement,
        region=region,
        offset=offset,
        region_each=region_each,
    )


def index_keys(
    name: str = "index",
    *,
    layers: Sequence[int],
    rows: int,
    page_size: int,
    index_dim: int,
    dtype: str,
    placement: Placement = "layers_first",
    region: int = 0,
    offset: int = 0,
    region_each: bool = False,
) -> Component:
    """Make the index keys of sparse attention: one vector a token, whole on every rank."""
    return mla_latent(
        name,
        layers=layers,
        rows=rows,
        page_size=page_size,
        latent_dim=index_dim,
        dtype=dtype,
        role="index_key",
        placement=placement,
        region=region,
        offset=offset,
        region_each=region_each,
    )


def conv_state(
    name: str = "conv",
    *,
    layers: Sequence[int],
    rows: int,
    blocks: Mapping[str, int] | Sequence[int],
    columns: int,
    dtype: str,
    rank: int = 0,
    size: int = 1,
    placement: Placement = "layers_first",
    region: int = 0,
    offset: int = 0,
    region_each: bool = False,
) -> Component:
    """Make the state of a short convolution: ``columns`` past inputs of each channel.

    ``blocks`` are the channels of the whole model by block (``{"q": 8, "k": 8, "v": 16}``), each of them cut over
    ``size`` ranks by itself. One block is one contiguous cut. Raises `ShardError` where a block does not divide.
    """
    total = sum(blocks.values() if isinstance(blocks, Mapping) else blocks)
    spans = sharded_spans(blocks, rank, size, what=f"component {name}, axis channel")
    fields = [Field("conv", dtype, (("channel", total, spans), ("column", columns, None)))]
    return component(
        name,
        SLOT,
        fields,
        layers=layers,
        rows=rows,
        placement=placement,
        region=region,
        offset=offset,
        region_each=region_each,
    )


def recurrent_state(
    name: str = "recurrent",
    *,
    layers: Sequence[int],
    rows: int,
    heads: int,
    shape: tuple[int, int],
    dtype: str,
    rank: int = 0,
    size: int = 1,
    placement: Placement = "layers_first",
    region: int = 0,
    offset: int = 0,
    region_each: bool = False,
) -> Component:
    """Make the recurrent state of linear attention or a state-space model: a matrix of ``shape`` for each value head.

    ``heads`` counts those of the whole model. Raises `ShardError` where ``size`` does not divide it.
    """
    spans = (shard(heads, rank, size, what=f"component {name}, axis head"),)
    fields = [Field("recurrent", dtype, (("head", heads, spans), ("row", shape[0], None), ("column", shape[1], None)))]
    return component(
        name,
        SLOT,
        fields,
        layers=layers,
        rows=rows,
        placement=placement,
        region=region,
        offset=offset,
        region_each=region_each,
    )


def aux_fields(
    fields: Mapping[str, tuple[str, int]],
    name: str = "aux",
    *,
    rows: int,
    region: int = 0,
    offset: int = 0,
) -> Component:
    """Make a table of small values that are sent last: ``{field: (dtype, count)}``, one row for each request."""
    listed = [Field(role, dtype, (("item", count, None),)) for role, (dtype, count) in fields.items()]
    return component(name, AUX, listed, layers=(0,), rows=rows, placement="blocks_first", region=region, offset=offset)


def required_bytes(components: Iterable[Component]) -> list[int]:
    """Return the least size in bytes of each region (by number) that holds all rows of ``components``."""
    ends: dict[int, int] = {}
    for entry in components:
        for tensor in entry.tensors:
            end = 0
            if tensor.rows:
                row = sum((axis.local_size - 1) * axis.stride for axis in tensor.axes) + tensor.itemsize
                end = tensor.offset + (tensor.rows - 1) * tensor.row_stride + row
            ends[tensor.region] = max(ends.get(tensor.region, 0), end)
    return [ends.get(number, 0) for number in range(max(ends, default=-1) + 1)]
