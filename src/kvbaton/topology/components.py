"""From a written component to its logical tensors."""

from __future__ import annotations

from typing import Any

from kvbaton.errors import ConfigurationError
from kvbaton.layout import AUX, DTYPE_BYTES, PAGED, SLOT, TOKEN, Kind, compressed, ring, tail, window
from kvbaton.topology.convert import convert
from kvbaton.topology.layers import parse_layers
from kvbaton.topology.model import AxisModel, Block, ComponentModel, Model, TensorModel, evenly, heads
from kvbaton.topology.parse import shown
from kvbaton.topology.spec import AxisSpec, BlockSpec, ComponentSpec, KindSpec, ModelSpec, TensorSpec

KINDS = ("paged", "slot", "aux", "window", "ring", "tail", "compressed")
WAYS = "heads and head_dim, heads and shape, blocks and columns, dim, fields, or tensors"


def read_model(value: object, where: str) -> Model:
    """The model that ``value``, the parsed mapping of a file, writes out; raises `ConfigurationError`."""
    spec = convert(value, ModelSpec, where)
    check_dtype(spec.dtype, f"{where}.dtype")
    components = tuple(
        read_component(name, entry, spec.layers, f"{where}.components.{name}")
        for name, entry in spec.components.items()
    )
    return Model(spec.title, spec.layers, components, spec.dtype)


def read_component(name: str, value: object, layers: int, where: str) -> ComponentModel:
    """One component of a model of ``layers`` layers; raises `ConfigurationError`, beginning with ``where``."""
    spec = convert(value, ComponentSpec, where)
    tensors, usual = _tensors(spec, where)
    kind = usual if spec.kind is None and not (spec.window or spec.tail or spec.ratio) else _kind(spec, where)
    # Values that are not of a layer are said once, on layer 0.
    own = (0,) if kind.aux else parse_layers(spec.layers, layers, f"{where}.layers")
    if not kind.has_tokens and any(axis.name == TOKEN for tensor in tensors for axis in tensor.axes):
        raise ConfigurationError(f"{where}: rows of kind {kind} hold no tokens; name the axis {TOKEN} otherwise")
    return ComponentModel(name, kind, own, tensors, spec.page_size or 0)


def check_dtype(dtype: str, where: str) -> None:
    """Raise `ConfigurationError` for a name that is no dtype."""
    if dtype not in DTYPE_BYTES:
        raise ConfigurationError(f"{where}: {shown(dtype)} is no dtype (known: {', '.join(DTYPE_BYTES)})")


def _kind(spec: ComponentSpec, where: str) -> Kind:
    if isinstance(spec.kind, dict):
        read = convert(spec.kind, KindSpec, f"{where}.kind")
        return Kind(read.per, read.ratio, read.window, read.tail, read.ring, read.reused, read.aux)
    numbers = {name: getattr(spec, name) for name in ("window", "tail", "ratio")}
    given = [name for name, number in numbers.items() if number]
    name = spec.kind or {"ratio": "compressed"}.get(given[0], given[0])
    makers: dict[str, tuple[str, Any]] = {
        "window": ("window", window),
        "ring": ("window", ring),
        "tail": ("tail", tail),
        "compressed": ("ratio", compressed),
    }
    plain = {"paged": PAGED, "slot": SLOT, "aux": AUX}
    if name not in KINDS:
        raise ConfigurationError(f"{where}.kind: {shown(name)} is no kind (known: {', '.join(KINDS)})")
    needed = makers[name][0] if name in makers else ""
    if given != [needed] * bool(needed):
        raise ConfigurationError(
            f"{where}: kind {name} needs {f'{needed}: a number of tokens' if needed else 'none of window, tail, ratio'}"
            f", but {', '.join(given) or 'none'} is given; a kind of several is written as a mapping (per, ratio, ...)"
        )
    if name in plain:
        return plain[name]
    made: Kind = makers[name][1](numbers[needed])
    return made


def _tensors(spec: ComponentSpec, where: str) -> tuple[tuple[TensorModel, ...], Kind]:
    """The tensors that a component names, and the kind that such tensors usually are."""
    ways = {
        "tensors": spec.tensors is not None,
        "fields": spec.fields is not None,
        "dim": spec.dim is not None,
        "blocks": spec.blocks is not None or spec.columns is not None,
        "heads": any((spec.heads, spec.head_dim, spec.shape, spec.value_dim)),
    }
    named = [way for way, given in ways.items() if given]
    if len(named) != 1:
        raise ConfigurationError(f"{where}: {', '.join(named) or 'nothing'} says what it holds; give one of {WAYS}")
    if spec.dtype:
        check_dtype(spec.dtype, f"{where}.dtype")
    if spec.tensors is not None:
        return tuple(
            _tensor(role, value, spec.dtype, f"{where}.tensors.{role}") for role, value in spec.tensors.items()
        ), PAGED
    if spec.fields is not None:
        for role, (dtype, _) in spec.fields.items():
            check_dtype(dtype, f"{where}.fields.{role}")
        fields = (TensorModel(role, (AxisModel("item", n),), dtype) for role, (dtype, n) in spec.fields.items())
        return tuple(fields), AUX
    if spec.dim is not None:
        return (TensorModel(spec.role, (AxisModel("dim", spec.dim),), spec.dtype),), PAGED
    if named == ["blocks"]:
        if spec.blocks is None or spec.columns is None:
            raise ConfigurationError(f"{where}: a convolution state needs blocks and columns")
        channel = _blocks("channel", spec.blocks, f"{where}.blocks")
        return (TensorModel("conv", (channel, AxisModel("column", spec.columns)), spec.dtype),), SLOT
    if spec.heads is None or (spec.head_dim is None) == (spec.shape is None):
        raise ConfigurationError(f"{where}: heads needs head_dim (keys and values) or shape (a recurrent state)")
    if spec.shape is not None:
        if len(spec.shape) != 2:
            raise ConfigurationError(f"{where}.shape: {shown(spec.shape)} is not two numbers, rows and columns")
        matrix = (AxisModel("row", spec.shape[0]), AxisModel("column", spec.shape[1]))
        return (TensorModel("recurrent", (evenly(spec.heads), *matrix), spec.dtype),), SLOT
    dims = {"key": spec.head_dim or 0, "value": spec.value_dim or spec.head_dim or 0}
    return key_value(spec.heads, dims["key"], dims["value"], spec.dtype), PAGED


def key_value(count: int, key_dim: int, value_dim: int, dtype: str = "") -> tuple[TensorModel, ...]:
    """Keys and values of attention with ``count`` KV heads."""
    sizes = (("key", key_dim), ("value", value_dim))
    return tuple(TensorModel(role, (heads(count), AxisModel("dim", dim)), dtype) for role, dim in sizes)


def _tensor(role: str, value: object, dtype: str, where: str) -> TensorModel:
    spec = convert(value, TensorSpec, where)
    if spec.dtype:
        check_dtype(spec.dtype, f"{where}.dtype")
    axes = tuple(_axis(name, entry, f"{where}.axes.{name}") for name, entry in spec.axes.items())
    return TensorModel(role, axes, spec.dtype or dtype)


def _axis(name: str, value: object, where: str) -> AxisModel:
    if name == TOKEN:
        if value is not None:
            raise ConfigurationError(
                f"{where}: its size follows from the page size; write {TOKEN}: null, for its place"
            )
        return AxisModel(name, 0)
    if type(value) is int:
        value = {"size": value}
    spec = convert(value, AxisSpec, where)
    if (spec.size is None) == (spec.blocks is None):
        raise ConfigurationError(f"{where}: give size, or blocks that are cut each by itself")
    if spec.blocks is not None:
        return _blocks(name, spec.blocks, f"{where}.blocks")
    size = spec.size or 0
    return {"whole": AxisModel(name, size), "even": evenly(size, name), "heads": heads(size, name)}[spec.cut]


def _blocks(name: str, blocks: dict[str, Any], where: str) -> AxisModel:
    read: list[Block] = []
    for block, value in blocks.items():
        if type(value) is int and value > 0:
            read.append(Block(block, value))
            continue
        spec = convert(value, BlockSpec, f"{where}.{block}")
        if spec.size % spec.groups:
            raise ConfigurationError(f"{where}.{block}: {spec.groups} groups do not divide its {spec.size} indices")
        read.append(Block(block, spec.size, spec.groups))
    if not read:
        raise ConfigurationError(f"{where}: no block is listed")
    return AxisModel(name, sum(block.size for block in read), tuple(read))
