"""Casts of a pair of tensors: which one, and its boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Tensor, block_sizes
from kvbaton.plan.boxes import (
    CAST_COLUMNS,
    CAST_DTYPES,
    CAST_ITEMSIZES,
    CONVERT,
    QUANTISE,
    SCALE,
    SCALE_BYTES,
    Boxes,
    Cast,
    Int64s,
)
from kvbaton.plan.fit import Tensors, check_cast, format_of
from kvbaton.plan.stretch import Track


class Kind(NamedTuple):
    """What tensors with a template in common must have in common."""

    dtypes: tuple[str, str]
    factor: float
    scale_axes: tuple[tuple[Axis, ...] | None, tuple[Axis, ...] | None]
    """Of the source and of the destination; None where a side has no scales."""


class Change(NamedTuple):
    """How the elements of a tensor change: its kind, and the tensors that hold scales, first that of the source."""

    kind: Kind
    scales: tuple[Tensor, ...]


def change_of(
    source: Tensor, destination: Tensor, sources: Tensors, destinations: Tensors, name: str, *, cast: bool
) -> Change | None:
    """How the elements change from ``source`` to ``destination``; None where they are moved as they are.

    ``sources`` and ``destinations`` are the tensors of the component. Raises `LayoutMismatch`, naming ``name``, where
    they would have to change and must not (``cast``) or cannot.
    """
    at, to = format_of(source, sources), format_of(destination, destinations)
    if at == to:
        return None
    check_cast(source, destination, at, to, name, cast=cast)
    scales = _scale(source, sources), _scale(destination, destinations)
    first, second = (None if scale is None else scale.axes for scale in scales)
    kind = Kind((at.dtype, to.dtype), at.factor / to.factor, (first, second))
    return Change(kind, tuple(scale for scale in scales if scale is not None))


def _scale(tensor: Tensor, tensors: Tensors) -> Tensor | None:
    return tensors[tensor.scale, tensor.layer] if tensor.scale else None


def cast_boxes(shape: Int64s, sides: Sequence[Int64s], destination: Tensor, change: Change, name: str) -> Boxes:
    """The boxes of a cast.

    ``shape`` has elements for runs; ``sides`` are the tables of the source, the destination, and the scales that there
    are. Where the destination has scales, they get boxes of their own that read the same elements.
    """
    read, written, *scales = sides
    count = len(shape)
    source_scale = _no_scale(count) if change.kind.scale_axes[0] is None else scales.pop(0)
    dtypes = tuple(CAST_DTYPES.index(dtype) for dtype in change.kind.dtypes)
    how = np.empty((count, len(CAST_COLUMNS)), np.int64)
    how[:, 0] = QUANTISE if scales else CONVERT
    how[:, 1:3] = dtypes
    how[:, 3] = shape[:, 2]
    cast = Cast(how, np.full(count, change.kind.factor, np.float32), source_scale)
    data = Boxes(_with_runs(shape, shape[:, 2] * CAST_ITEMSIZES[dtypes[1]]), read, written, cast)
    if not scales:
        return data
    _check_blocks(shape[:, 2], destination, change.scales[-1], name)
    makes_scales = how.copy()
    makes_scales[:, 0] = SCALE
    made = Boxes(_with_runs(shape, SCALE_BYTES), read, scales[0], cast._replace(how=makes_scales))
    return join([data, made])


def tracks_of(source: Tensor, destination: Tensor, change: Change) -> list[Track]:
    """The tracks of the scales that there are, first that of the source."""
    ends = zip(range(2), (source, destination), change.kind.scale_axes, strict=True)
    scaled = [(side, tensor) for side, tensor, axes in ends if axes is not None]
    return [Track.of_scales(side, tensor, scale) for (side, tensor), scale in zip(scaled, change.scales, strict=True)]


def join(tables: Sequence[Boxes]) -> Boxes:
    """One table of several. Where one of them casts, the others say that they move bytes as they are."""
    shape, source, destination = (
        np.concatenate(column) for column in zip(*(table[:3] for table in tables), strict=True)
    )
    if all(table.cast is None for table in tables):
        return Boxes(shape, source, destination)
    casts = [table.cast or _moves(table.shape) for table in tables]
    cast = Cast(*(np.concatenate(column) for column in zip(*casts, strict=True)))
    return Boxes(shape, source, destination, cast)


def _moves(shape: Int64s) -> Cast:
    how = np.zeros((len(shape), len(CAST_COLUMNS)), np.int64)
    how[:, 3] = shape[:, 2]
    return Cast(how, np.ones(len(shape), np.float32), _no_scale(len(shape)))


def _no_scale(count: int) -> Int64s:
    return np.tile(np.array([-1, 0, 0, 1, 0, 0, 0], np.int64), (count, 1))


def _with_runs(shape: Int64s, runs: Int64s | int) -> Int64s:
    shape = shape.copy()
    shape[:, 2] = runs
    return shape


def _check_blocks(elements: Int64s, destination: Tensor, scale: Tensor, name: str) -> None:
    """Raise `LayoutMismatch` unless every run is one whole block of the destination's scales."""
    blocks = block_sizes(destination, scale)
    block = math.prod(blocks.get(axis.name, axis.size) for axis in destination.axes if axis.name != TOKEN)
    different = elements[elements != block]
    if len(different):
        raise LayoutMismatch(
            f"{name}: a scale of the destination ({scale.role}) is that of {block} elements, but only {different[0]} "
            f"of them lie next to each other in the same order on both sides, in one source rank and under one scale "
            f"of the source; choose scales of smaller blocks, or keep such a block in one rank and contiguous"
        )
