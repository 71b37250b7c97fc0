"""Small models and the sides that serve them: plain values from which layouts are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbaton.layout import Kind

DRAFT_LAYERS = 1000
"""Global ids from here on are those of a draft model, which the last pipeline stage holds."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the whole model.

    ``axes`` are name and size of every axis but that of tokens. Tensor parallelism cuts the axis ``cut``, block by
    block; a block with fewer indices than ranks is replicated. ``stage`` is the pipeline stage that holds it (-1: the
    last one) where its layer does not say so. ``scale`` is the role of its scales, ``scale_of`` the role whose scales
    these are. Of its last axis all indices are in order in memory where ``last`` is "ordered", and next to each other
    where it is "run".
    """

    role: str
    dtype: str
    axes: tuple[tuple[str, int], ...]
    cut: str = ""
    blocks: tuple[int, ...] = ()
    stage: int | None = None
    factors: tuple[float, ...] = (1.0,)
    """By layer, in turn."""
    scale: str = ""
    scale_of: str = ""
    last: Literal["free", "ordered", "run"] = "free"


@dataclass(frozen=True)
class Format:
    """How one side stores the elements of a component that are numbers (those in `ModelComponent.numbers`).

    Each tensor has its scales in a role of its own with ``scales`` behind its name ("": none). Along its last axis
    there is one scale for "all", for each of two "halves" (all, where there are none), or for "each" index; along the
    others each index has its own, but for the axis that is cut where ``cut_shared``. ``last`` is as for `ModelTensor`.
    """

    dtype: str
    factors: tuple[float, ...] = (1.0,)
    scales: str = ""
    parts: Literal["all", "halves", "each"] = "all"
    cut_shared: bool = False
    last: Literal["free", "ordered", "run"] = "free"

    def __str__(self) -> str:
        words = [self.dtype]
        if self.factors != (1.0,):
            words.append(f"factor {' or '.join(f'{factor:g}' for factor in self.factors)} by layer")
        if self.scales:
            words.append(f"scales in _{self.scales}, for {self.parts} of the last axis")
            words += ["shared along the axis that is cut"] if self.cut_shared else []
        words += [f"last axis {self.last}"] if self.last != "free" else []
        return ", ".join(words)


@dataclass(frozen=True)
class ModelComponent:
    """A component of the whole model; ``kind`` without ring, which each side decides for itself.

    ``elided`` are roles and layers without rows: at the destination, and at the source too if ``elided_at_source``.
    """

    name: str
    family: str
    kind: Kind
    tensors: tuple[ModelTensor, ...]
    layers: tuple[int, ...]
    elided: frozenset[tuple[str, int]] = frozenset()
    elided_at_source: bool = False
    numbers: frozenset[str] = frozenset()
    """Roles that each side may store in a format of its own."""


@dataclass(frozen=True)
class Placed:
    """How one side holds one component.

    ``unit`` and ``modulus`` say which tokens a context-parallel rank owns: 0 for what the rank says, else an ownership
    of its own (modulus 1: every token). ``format`` is that of its numbers, where it is not the model's.
    """

    page_size: int = 1
    ring: bool = False
    unit: int = 0
    modulus: int = 0
    format: Format | None = None


@dataclass(frozen=True)
class Side:
    """One side: its parallel sizes, the unit in which context-parallel ranks share tokens, and its components.

    ``arrangement`` is a seed for all that should not matter: order of axes, padding, placement of tensors, order of
    spans. 0 is the plainest of all.
    """

    tp: int
    pp: int
    cp: int
    unit: int
    placed: tuple[Placed, ...]
    arrangement: int = 0


@dataclass(frozen=True)
class World:
    """One example: a model, its two sides, and a request. ``cuts`` end the chunks in which it is sent.

    ``seed`` chooses rows, canaries and the order in which chunks arrive; 0 is the plainest.
    """

    model: tuple[ModelComponent, ...]
    layers: int
    source: Side
    destination: Side
    tokens: int
    prefix: int = 0
    cuts: tuple[int, ...] = ()
    striped: bool = False
    seed: int = 0

    @property
    def casts(self) -> list[tuple[Format, Format]]:
        """The formats of components whose sides differ in it, first that of the source."""
        placed = zip(self.source.placed, self.destination.placed, strict=True)
        pairs = [(one.format, other.format) for one, other in placed]
        return [(one, other) for one, other in pairs if one is not None and other is not None and one != other]

    def text(self) -> str:
        """The example in words, one fact a line."""
        lines = [f"model of {self.layers} layers"]
        for component in self.model:
            layers = ", ".join(map(str, component.layers))
            lines.append(f"  component {component.name}: {component.kind}; layers {layers}")
            for tensor in component.tensors:
                axes = " x ".join(f"{name} {size}" for name, size in tensor.axes)
                cut = f", cut along {tensor.cut} in blocks of {tensor.blocks}" if tensor.cut else ", replicated"
                stage = {None: "", 0: ", first stage only", -1: ", last stage only"}[tensor.stage]
                lines.append(f"    {tensor.role}: {tensor.dtype}, {axes or 'one element'}{cut}{stage}")
            if component.elided:
                sides = "both sides" if component.elided_at_source else "destination"
                listed = ", ".join(f"{role} of layer {layer}" for role, layer in sorted(component.elided))
                lines.append(f"    without rows ({sides}): {listed}")
        for name, side in (("source", self.source), ("destination", self.destination)):
            unit = f" in units of {side.unit} tokens" if side.cp > 1 else ""
            lines.append(f"{name}: tp {side.tp}, pp {side.pp}, cp {side.cp}{unit}; arrangement {side.arrangement}")
            for component, placed in zip(self.model, side.placed, strict=True):
                if component.kind.has_tokens:
                    own = f", tokens shared by {placed.modulus} in units of {placed.unit}" if placed.modulus > 1 else ""
                    own = ", every token on each rank" if placed.modulus == 1 and side.cp > 1 else own
                    rows = "ring of pages" if placed.ring else "pages"
                    lines.append(f"  {component.name}: {rows} of {placed.page_size} tokens{own}")
                if placed.format is not None:
                    lines.append(f"  {component.name}: stored as {placed.format}")
        chunks = f"; chunks end at {', '.join(map(str, self.cuts))}" if self.cuts else ""
        lines.append(f"request: {self.tokens} tokens, {self.prefix} of them already there{chunks}")
        lines.append(f"stripes {'on' if self.striped else 'off'}, seed {self.seed}")
        return "\n".join(lines)
