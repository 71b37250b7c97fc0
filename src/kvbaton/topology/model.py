"""The logical tensors of a model and how tensor parallelism cuts them: what a deployment is laid out from."""

from __future__ import annotations

from typing import NamedTuple

from kvbaton.layout import TOKEN, Kind, Span, replicated_spans, shard


class Block(NamedTuple):
    """A run of indices of an axis that is cut by itself.

    ``groups`` 0: every rank gets an equal part, or the cut is refused. Otherwise the block consists of that many equal
    groups (heads), and where there are fewer groups than ranks, several ranks hold the same one.
    """

    name: str
    size: int
    groups: int = 0


class AxisModel(NamedTuple):
    """An axis of the whole model; no ``blocks``: every rank holds all of it."""

    name: str
    size: int
    blocks: tuple[Block, ...] = ()

    def spans(self, rank: int, size: int, component: str) -> tuple[Span, ...] | None:
        """The indices of ``rank`` of ``size``, None for the whole axis; raises `ShardError` naming the component."""
        if not self.blocks:
            return None
        found: list[Span] = []
        base = 0
        for block in self.blocks:
            what = f"component {component}, axis {self.name}" + (f", block {block.name}" if block.name else "")
            if block.groups:
                ((start, count),) = replicated_spans(block.groups, rank, size, what=what)
                width = block.size // block.groups
                start, count = start * width, count * width
            else:
                start, count = shard(block.size, rank, size, what=what)
            found.append((base + start, count))
            base += block.size
        return tuple(found)


def heads(count: int, name: str = "head") -> AxisModel:
    """An axis of attention heads: cut over the ranks, or held by several ranks where there are too few."""
    return AxisModel(name, count, (Block("", count, count),))


def evenly(count: int, name: str = "head") -> AxisModel:
    """An axis that must divide over the ranks."""
    return AxisModel(name, count, (Block("", count),))


class TensorModel(NamedTuple):
    """One tensor for each layer; ``dtype`` "" is the deployment's. The token axis is listed only to fix its place."""

    role: str
    axes: tuple[AxisModel, ...]
    dtype: str = ""

    def ordered(self, order: str, entries: int) -> tuple[AxisModel, ...]:
        """Its axes with that of tokens: outermost in ``NHD``, outside the last axis in ``HND``."""
        token = AxisModel(TOKEN, entries)
        if any(axis.name == TOKEN for axis in self.axes):
            return tuple(token if axis.name == TOKEN else axis for axis in self.axes)
        at = 0 if order == "NHD" else max(len(self.axes) - 1, 0)
        return (*self.axes[:at], token, *self.axes[at:])


class ComponentModel(NamedTuple):
    """One component of the whole model. ``page_size`` 0 is the deployment's."""

    name: str
    kind: Kind
    layers: tuple[int, ...]
    tensors: tuple[TensorModel, ...]
    page_size: int = 0


class Model(NamedTuple):
    """A model as far as its caches go."""

    title: str
    layers: int
    components: tuple[ComponentModel, ...]
    dtype: str = "bfloat16"
