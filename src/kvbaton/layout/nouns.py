"""The nouns of the layout algebra: axes, tensors, components and the layout of one rank.

Everything that moves is a *row* of a tensor: a page of a paged cache, a slot of a per-request state, a slot of the aux
table. A layout says where the rows of a rank are and which global indices of the model each row holds. The values here
are plain data: they travel in the handshake as they are. `kvbaton.layout.check` says whether they hold together.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.layout.kinds import Kind
from kvbaton.layout.limits import (
    MAX_AXES,
    MAX_COMPONENTS,
    MAX_SPANS,
    MAX_TENSORS,
    Layer,
    Name,
    Number,
    PageSize,
    Period,
    Rank,
    Size,
)

Span = tuple[Size, Size]
"""``(start, count)``: a run of global indices along an axis."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the name that numpy and torch use."""

TOKEN = "token"
"""The name of the axis that runs over the tokens of a page."""


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One axis inside a row.

    ``size`` is the extent of the axis in the whole model; ``stride`` is the distance in bytes between neighbours on
    this rank; ``spans`` lists which global indices this rank holds, in local order. Three sharded sub-blocks of a
    convolution state are three spans; a replicated axis is the span ``(0, size)`` on every rank.
    """

    name: Name
    size: Size
    stride: Size
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)]

    @property
    def local_size(self) -> int:
        """How many indices this rank holds."""
        return sum(count for _, count in self.spans)


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one layer: ``rows`` rows, ``row_stride`` bytes apart, from ``offset`` in a registered region.

    ``role`` names what it holds ("key", "value", "latent", "index_key", "conv", "recurrent", ...): with the component
    and the global ``layer`` it identifies the tensor in the whole model. ``rows`` may be 0 (an elided tensor: it keeps
    its place and moves nothing).

    What the elements stand for is ``stored * factor * scale``. ``factor`` is one number for the whole tensor; ``scale``
    is the role of the tensor, in the same component and layer, that holds a float32 for each block of elements (""
    where there is none). Its axes are axes of this tensor: along an axis of equal size every index has its own scale,
    along one of a smaller size as many neighbours share one as divide the sizes, and along an axis that it lacks all
    share one.
    """

    role: Name
    layer: Layer
    region: Number
    offset: Size
    rows: Size
    row_stride: Size
    dtype: Name
    axes: Annotated[tuple[Axis, ...], Meta(max_length=MAX_AXES)]
    scale: Name = ""
    factor: float = 1.0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]


class Ownership(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a rank holds: those with ``(token // unit) % modulus == remainder``.

    The default holds every token. Decode context parallelism interleaves with ``unit`` 1 or a page. A rank stores its
    tokens densely: token ``t`` is the rank's local token ``(t // (unit * modulus)) * unit + t % unit``.
    """

    unit: Period = 1
    modulus: Period = 1
    remainder: Period = 0

    def local_count(self, tokens: int) -> int:
        """How many of the first ``tokens`` tokens of a request this rank holds."""
        full, rest = divmod(tokens, self.unit * self.modulus)
        return full * self.unit + min(max(rest - self.remainder * self.unit, 0), self.unit)

    def global_token(self, local: int) -> int:
        """The token of the request that is this rank's local token ``local``."""
        block, rest = divmod(local, self.unit)
        return (block * self.modulus + self.remainder) * self.unit + rest

    def in_entries(self, ratio: int) -> Ownership:
        """The same, counted in entries of ``ratio`` tokens, which must divide ``unit`` unless every token is owned."""
        return Ownership() if self.modulus == 1 else Ownership(self.unit // ratio, self.modulus, self.remainder)


class Component(msgspec.Struct, frozen=True, array_like=True):
    """Tensors whose rows are indexed together: one row index addresses the same row in each of them.

    ``kind`` says how rows relate to tokens. ``page_size`` is in tokens (1 where rows hold no tokens): a row has
    ``page_size / kind.ratio`` entries. ``owned`` are the tokens that this rank holds of it, where they are other ones
    than `RankLayout.owned` (index keys that every rank holds whole beside keys that are interleaved). Components with
    the same ``pool`` may lie in the same memory: their rows are never in use at the same time.
    """

    name: Name
    kind: Kind
    tensors: Annotated[tuple[Tensor, ...], Meta(max_length=MAX_TENSORS)]
    page_size: PageSize = 1
    owned: Ownership | None = None
    pool: Name = ""

    @property
    def entries_per_row(self) -> int:
        """How many entries a row holds."""
        return self.page_size // self.kind.ratio


class Coords(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank stands: ``(rank, size)`` for tensor, pipeline, context and data parallelism."""

    tp: tuple[Rank, Rank] = (0, 1)
    pp: tuple[Rank, Rank] = (0, 1)
    cp: tuple[Rank, Rank] = (0, 1)
    dp: tuple[Rank, Rank] = (0, 1)

    def __str__(self) -> str:
        parts = [
            f"{name}{rank}/{size}" for name, (rank, size) in zip(("tp", "pp", "cp", "dp"), self.all(), strict=True)
        ]
        return " ".join(parts)

    def all(self) -> tuple[tuple[int, int], ...]:
        """Return the four pairs, in the order tp, pp, cp, dp."""
        return (self.tp, self.pp, self.cp, self.dp)

    @property
    def number(self) -> int:
        """The rank's number within its data-parallel replica: pp outermost, then cp, then tp."""
        return (self.pp[0] * self.cp[1] + self.cp[0]) * self.tp[1] + self.tp[0]

    @property
    def ranks(self) -> int:
        """How many ranks its data-parallel replica has."""
        return self.tp[1] * self.pp[1] * self.cp[1]


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """All that a peer must know about the memory of one rank."""

    components: Annotated[tuple[Component, ...], Meta(max_length=MAX_COMPONENTS)]
    coords: Coords = Coords()
    owned: Ownership = Ownership()

    def component(self, name: str) -> Component:
        """Return the component of that name; raises ``KeyError`` where there is none."""
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def owned_of(self, component: Component) -> Ownership:
        """The tokens that this rank holds of ``component``: all of them where its rows hold no tokens."""
        if not component.kind.has_tokens:
            return Ownership()
        return self.owned if component.owned is None else component.owned
