"""Worlds from bytes: pairs of grids of one small model, laid out in unlike ways, and a request.

A world is told by `WORLD_BYTES` bytes, and every byte is one choice at a fixed place. The simplest choice is 0, so that
whoever makes the bytes smaller makes the world smaller: `kvbaton.check.examples` lets Hypothesis do so. The bytes in
hexadecimal, without zeros at the end, are the name of a world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from kvbaton.check.models import DRAFT_LAYERS, Format, ModelComponent, ModelTensor, Placed, Side, World
from kvbaton.errors import ConfigurationError
from kvbaton.layout import AUX, SLOT, Kind

REQUEST_BYTES, SIDE_BYTES, COMPONENT_BYTES = 11, 6, 43
MOST_COMPONENTS = 3
WORLD_BYTES = REQUEST_BYTES + 2 * SIDE_BYTES + MOST_COMPONENTS * COMPONENT_BYTES

MOST_RANKS = 24
"""Bound of the ranks of a side."""
MOST_TOKENS = 150

TENSOR_SIZES = (1, 2, 4, 8, 3)
PIPELINE_SIZES = (1, 1, 1, 2, 3)
CONTEXT_SIZES = (1, 1, 1, 2, 3, 4)
LAYERS = (1, 2, 3, 4, 5, 6)
HEADS = (1, 2, 4, 8, 3, 6, 12, 24)
PAGE_SIZES = (1, 2, 3, 4, 6, 16, 48, 64)
RATIOS = (2, 4, 8)
DTYPES = ("uint8", "bfloat16", "float32", "float64", "float8_e4m3fn", "float16", "int8")
CAST_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
FACTORS = ((1.0,), (1.0,), (0.25,), (1.0, 8.0), (1.7,), (0.3, 2.0, 1.1))
PATTERNS: tuple[Callable[[int, int], bool], ...] = (
    lambda layer, layers: True,
    lambda layer, layers: layer % 2 == 1,
    lambda layer, layers: layer == layers - 1,
    lambda layer, layers: layer % 2 == 0,
    lambda layer, layers: layer % 3 == 2,
    lambda layer, layers: layer == 0,
)

PARTS: tuple[Literal["all", "halves", "each"], ...] = ("all", "halves", "each")

Last = Literal["free", "ordered", "run"]
T = TypeVar("T")


class Choices:
    """Takes choices from a row of bytes, one after the other."""

    def __init__(self, row: bytes) -> None:
        self._row = row
        self._next = 0

    def of(self, options: Sequence[T]) -> T:
        """One of ``options``; the first is the simplest."""
        return options[self.upto(len(options) - 1)]

    def upto(self, most: int) -> int:
        """A number from 0 to ``most``, which is below 256."""
        self._next += 1
        return self._row[self._next - 1] % (most + 1)

    def flag(self) -> bool:
        """False is the simplest."""
        return self.upto(1) == 1

    def seed(self) -> int:
        """Two bytes; 0 is the plainest."""
        return self.upto(255) << 8 | self.upto(255)


def world_of(choices: bytes) -> World:
    """Make a world of `WORLD_BYTES` bytes: those of the request, the source, the destination and each component.

    Raises `ConfigurationError` where there are fewer or more.
    """
    if len(choices) != WORLD_BYTES:
        raise ConfigurationError(f"an example is made of {WORLD_BYTES} bytes, not {len(choices)}")
    rows = iter(_rows(choices))
    request = Choices(next(rows))
    layers = request.of(LAYERS)
    components = 1 + request.upto(MOST_COMPONENTS - 1)
    sides = [_Parallel(Choices(next(rows))) for _ in range(2)]
    sizes = sides[0].tp, sides[1].tp
    model: list[ModelComponent] = []
    placed: list[list[Placed]] = [[], []]
    for number in range(components):
        component = Choices(next(rows))
        model.append(_component(component, number, layers, sizes))
        places = [_placed(component, model[-1].kind, side) for side in sides]
        for listed, place, stored in zip(placed, places, _formats(component, model[-1]), strict=True):
            listed.append(replace(place, format=stored))
    tokens = request.upto(MOST_TOKENS)
    has_prefix, prefix = request.flag(), request.upto(tokens)
    cuts = sorted((request.upto(tokens), request.upto(tokens))[: request.upto(2)])
    return World(
        tuple(model),
        layers,
        sides[0].side(model, placed[0]),
        sides[1].side(model, placed[1]),
        tokens,
        prefix if has_prefix else 0,
        tuple(cuts),
        request.flag(),
        request.seed(),
    )


def to_name(choices: bytes) -> str:
    """The name of a world."""
    return choices.rstrip(b"\0").hex() or "00"


def to_choices(name: str) -> bytes:
    """The bytes of the world of that name. Raises `ConfigurationError` where it is no name of a world."""
    try:
        choices = bytes.fromhex(name)
    except ValueError:
        raise ConfigurationError(f"example {name!r} is not a row of hexadecimal digits") from None
    if len(choices) > WORLD_BYTES:
        raise ConfigurationError(f"example {name[:16]}... has {len(choices)} bytes, more than {WORLD_BYTES}")
    return choices.ljust(WORLD_BYTES, b"\0")


def with_component(choices: bytes, number: int) -> bytes:
    """The same world with its component ``number`` alone."""
    request, *sides_and_components = _rows(choices)
    one = bytes((request[0], 0)) + request[2:]
    return b"".join((one, *sides_and_components[:2], sides_and_components[2 + number])).ljust(WORLD_BYTES, b"\0")


def _rows(choices: bytes) -> Iterator[bytes]:
    start = 0
    for size in (REQUEST_BYTES, SIDE_BYTES, SIDE_BYTES, *[COMPONENT_BYTES] * MOST_COMPONENTS):
        yield choices[start : start + size]
        start += size


class _Parallel:
    """The parallel sizes of a side."""

    def __init__(self, choices: Choices) -> None:
        self.tp = choices.of(TENSOR_SIZES)
        self.pp = choices.of(PIPELINE_SIZES)
        self.cp = min(choices.of(CONTEXT_SIZES), MOST_RANKS // (self.tp * self.pp))
        self._unit = choices.of((1, 2, 3, 4, 5, 8, 16, 0))
        self._arrangement = choices.seed()

    def side(self, model: Sequence[ModelComponent], placed: Sequence[Placed]) -> Side:
        """The side; where its unit is a page it is the largest one."""
        unit = self._unit or max(each.page_size for each in placed)
        fitting = [
            each if not entry.kind.has_tokens or each.modulus or unit % entry.kind.ratio == 0 else _whole(each)
            for entry, each in zip(model, placed, strict=True)
        ]
        return Side(self.tp, self.pp, self.cp, unit if self.cp > 1 else 1, tuple(fitting), self._arrangement)


def _whole(placed: Placed) -> Placed:
    """The same with every token on each rank: a unit that cuts entries cannot share them."""
    return replace(placed, unit=1, modulus=1)


def _placed(choices: Choices, kind: Kind, side: _Parallel) -> Placed:
    possible = [size for size in PAGE_SIZES if size % kind.ratio == 0] or [kind.ratio, 3 * kind.ratio]
    page_size, ring = choices.of(possible), choices.flag()
    own, pages = choices.of(("rank", "rank", "whole", "unit")), 1 + choices.upto(3)
    if not kind.has_tokens:
        return Placed()
    if own == "rank" or side.cp == 1:
        return Placed(page_size, ring)
    if own == "whole":
        return _whole(Placed(page_size, ring))
    return Placed(page_size, ring, pages * kind.ratio, side.cp)


def _formats(choices: Choices, entry: ModelComponent) -> tuple[Format | None, Format | None]:
    """How the two sides store the numbers of a component: as the model, or as may be cast."""
    own, equal = choices.flag(), choices.upto(7) == 7
    source, destination = _format(choices), _format(choices)
    if not own or not entry.numbers:
        return None, None
    if equal:
        return _in_order(source), _in_order(source)
    if destination.dtype != "float8_e4m3fn":
        destination = replace(destination, scales="")
    destination = replace(destination, cut_shared=False)
    if destination.scales and source.scales:
        # A block of the destination lies in one block of the source.
        coarse = PARTS.index(destination.parts)
        source = replace(source, parts=PARTS[min(PARTS.index(source.parts), coarse)])
    last: Last = "run" if destination.scales and destination.parts != "each" else "free"
    return _in_order(replace(source, last=last)), _in_order(replace(destination, last=last))


def _format(choices: Choices) -> Format:
    dtype, factors = choices.of(CAST_DTYPES), choices.of(FACTORS)
    scales, parts, cut_shared = choices.of(("", "scale", "scales")), choices.of(PARTS), choices.upto(3) == 3
    return Format(dtype, factors, scales, parts, cut_shared)


def _in_order(stored: Format) -> Format:
    """The same with halves that are halves in memory too; without scales nothing is said about them."""
    if not stored.scales:
        return replace(stored, parts="all", cut_shared=False)
    return replace(stored, last="ordered") if stored.parts == "halves" and stored.last == "free" else stored


def _component(choices: Choices, number: int, layers: int, sizes: tuple[int, int]) -> ModelComponent:
    family = choices.of(tuple(_TENSORS))
    kind = _kind(choices)
    shape = _Shape(choices, sizes)
    pattern = choices.of(PATTERNS)
    draft, elides = choices.upto(7) == 7, choices.upto(7) == 7
    at_source, role, layer = choices.flag(), choices.upto(255), choices.upto(255)
    name = f"{family}{number}"
    tensors = _TENSORS[family](shape)
    if family == "aux":
        return ModelComponent(name, family, AUX, tensors, (0,))
    chosen = [each for each in range(layers) if pattern(each, layers)] or [0]
    if draft:
        chosen.append(DRAFT_LAYERS + 7)
    elided = frozenset({(tensors[role % len(tensors)].role, chosen[layer % len(chosen)])} if elides else ())
    kind = kind if family in ("heads", "scaled", "latent", "index") else SLOT
    plain = family != "scaled" and shape.dtype in CAST_DTYPES
    numbers = frozenset(tensor.role for tensor in tensors if plain and tensor.dtype == shape.dtype)
    return ModelComponent(name, family, kind, tensors, tuple(chosen), elided, at_source, numbers)


def _kind(choices: Choices) -> Kind:
    name = choices.of(("paged", "window", "tail", "compressed", "compressed window", "other"))
    ratio, any_ratio = choices.of(RATIOS), 1 + choices.upto(4)
    window, tail = 1 + choices.upto(40), 2 + choices.upto(20)
    kept, limit = choices.flag(), choices.upto(2)
    if name == "window":
        return Kind(window=window, reused=not kept)
    if name == "tail":
        return Kind(tail=tail, reused=False)
    if name == "compressed":
        return Kind(ratio=ratio)
    if name == "compressed window":
        return Kind(ratio=ratio, window=window, reused=not kept)
    if name == "other":
        window, tail = window if limit == 1 else 0, tail if limit == 2 else 0
        return Kind(ratio=any_ratio, window=window, tail=tail, reused=not kept)
    return Kind()


class _Shape:
    """The dimensions of a component, for tensor-parallel sizes that it can be cut or replicated over."""

    def __init__(self, choices: Choices, sizes: tuple[int, int]) -> None:
        possible = [heads for heads in HEADS if all(heads % size == 0 or size % heads == 0 for size in sizes)]
        few = [heads for heads in possible if heads <= 8] or [1]
        self.dtype = choices.of(DTYPES)
        self.heads = choices.of(possible)
        self.blocks = (choices.of(few), choices.of(few), choices.of(few))[: 1 + choices.upto(2)]
        self.dim = 1 + choices.upto(2)
        self.extra = choices.upto(1)
        self.stage = choices.of((None, 0, -1))


def _heads(shape: _Shape) -> tuple[ModelTensor, ...]:
    return tuple(
        ModelTensor(role, shape.dtype, (("head", shape.heads), ("dim", width)), "head", (shape.heads,))
        for role, width in (("key", shape.dim), ("value", shape.dim + shape.extra))
    )


def _scaled(shape: _Shape) -> tuple[ModelTensor, ...]:
    """Keys and values with block scales that run beside them."""
    listed = [(role, shape.dtype, ("dim", 2 * shape.dim)) for role in ("key", "value")]
    listed += [(f"{role}_scale", "float32", ("block", shape.dim)) for role in ("key", "value")]
    return tuple(
        ModelTensor(role, dtype, (("head", shape.heads), axis), "head", (shape.heads,)) for role, dtype, axis in listed
    )


def _latent(shape: _Shape) -> tuple[ModelTensor, ...]:
    index = (ModelTensor("index_key", "uint8", (("dim", 2),)),) if shape.extra else ()
    return (ModelTensor("latent", shape.dtype, (("dim", 3),)), *index)


def _index(shape: _Shape) -> tuple[ModelTensor, ...]:
    scale = (ModelTensor("index_scale", "float32", ()),) if shape.extra else ()
    return (ModelTensor("index_key", shape.dtype, (("dim", 2),)), *scale)


def _conv(shape: _Shape) -> tuple[ModelTensor, ...]:
    """A convolution state of one to three sub-blocks, each cut by itself."""
    axes = (("channel", sum(shape.blocks)), ("column", 1 + shape.dim))
    return (ModelTensor("conv", shape.dtype, axes, "channel", shape.blocks),)


def _recurrent(shape: _Shape) -> tuple[ModelTensor, ...]:
    axes = (("head", shape.heads), ("row", 2), ("column", shape.dim))
    recurrent = ModelTensor("recurrent", shape.dtype, axes, "head", (shape.heads,))
    return (*(_conv(shape) if shape.extra else ()), recurrent)


def _row(shape: _Shape) -> tuple[ModelTensor, ...]:
    """A state that every tensor-parallel rank holds whole."""
    return (ModelTensor("state", shape.dtype, (("item", 5),)),)


def _aux(shape: _Shape) -> tuple[ModelTensor, ...]:
    return (
        ModelTensor("token", "int64", (("item", 1),), stage=shape.stage),
        ModelTensor("logits", shape.dtype, (("item", 3),), stage=-1),
    )


_TENSORS: dict[str, Callable[[_Shape], tuple[ModelTensor, ...]]] = {
    "heads": _heads,
    "latent": _latent,
    "scaled": _scaled,
    "index": _index,
    "conv": _conv,
    "recurrent": _recurrent,
    "row": _row,
    "aux": _aux,
}
