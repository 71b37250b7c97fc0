"""Whether tensors share memory that they must not share.

Two tensors of one component are written by the same transfer, and two components by different ones: an element of one
in the place of another would be lost in silence. Components of one `Component.pool` may overlay each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.errors import LayoutError
from kvbaton.layout.nouns import Component, Tensor

MAX_SAMPLES = 1 << 12
"""Bound of the addresses that are looked for in one tensor."""

Int64s = npt.NDArray[np.int64]


class _Placed(NamedTuple):
    component: Component
    tensor: Tensor
    begin: int
    end: int


def check_overlap(components: Iterable[Component]) -> None:
    """Raise `LayoutError`, with both tensors named, where elements of two of them share a byte.

    Looks for the first, middle and last element of some rows of each tensor in all the others, so that it finds every
    overlap that is not confined to a few elements. The components must hold together by themselves (`check_layout`).
    """
    by_region: dict[int, list[_Placed]] = {}
    for component in components:
        for tensor in component.tensors:
            if tensor.rows:
                extent = tensor.itemsize + sum((axis.local_size - 1) * axis.stride for axis in tensor.axes)
                end = tensor.offset + (tensor.rows - 1) * tensor.row_stride + extent
                by_region.setdefault(tensor.region, []).append(_Placed(component, tensor, tensor.offset, end))
    for placed in by_region.values():
        _check_region(placed)


def _check_region(placed: list[_Placed]) -> None:
    samples = [_samples(each.tensor) for each in placed]
    addresses = np.concatenate(samples)
    owners = np.repeat(np.arange(len(placed)), [len(each) for each in samples])
    order = np.argsort(addresses, kind="stable")
    addresses, owners = addresses[order], owners[order]
    for number, each in enumerate(placed):
        first, last = np.searchsorted(addresses, (each.begin, each.end))
        inside, owner = addresses[first:last], owners[first:last]
        foreign = owner != number
        inside, owner = inside[foreign], owner[foreign]
        step = -(-len(inside) // MAX_SAMPLES) or 1
        inside, owner = inside[::step], owner[::step]
        for other in np.unique(owner[_held(each.tensor, inside)]).tolist():
            if not _may_overlay(each.component, placed[other].component):
                _fail(each, placed[other])


def _samples(tensor: Tensor) -> Int64s:
    """The first and last byte of the first, middle and last element of the first, middle and last row."""
    rows = np.array(sorted({0, tensor.rows // 2, tensor.rows - 1}), np.int64) * tensor.row_stride
    elements = np.array(
        [sum(at(axis.local_size) * axis.stride for axis in tensor.axes) for at in (_first, _middle, _last)], np.int64
    )
    inside = np.unique(np.concatenate([elements, elements + tensor.itemsize - 1]))
    return np.asarray((tensor.offset + rows[:, None] + inside).reshape(-1))


def _first(size: int) -> int:
    return 0


def _middle(size: int) -> int:
    return size // 2


def _last(size: int) -> int:
    return size - 1


def _held(tensor: Tensor, addresses: Int64s) -> npt.NDArray[np.bool_]:
    """Which of the ``addresses`` are bytes of an element of ``tensor``: every stride steps over what lies inside it."""
    rest = addresses - tensor.offset
    steps = [(tensor.row_stride, tensor.rows), *((axis.stride, axis.local_size) for axis in tensor.axes)]
    for stride, count in sorted(steps, reverse=True):
        if count > 1:
            rest = rest - np.minimum(rest // stride, count - 1) * stride
    return np.asarray((rest >= 0) & (rest < tensor.itemsize))


def _may_overlay(one: Component, other: Component) -> bool:
    return one is not other and one.pool != "" and one.pool == other.pool


def _fail(one: _Placed, other: _Placed) -> None:
    names = [
        f"component {each.component.name}, role {each.tensor.role}, layer {each.tensor.layer}" for each in (one, other)
    ]
    raise LayoutError(
        f"{names[0]}: shares memory of region {one.tensor.region} with {names[1]} (offsets {one.tensor.offset} and "
        f"{other.tensor.offset}); give one of them another region or offset, or both components the same pool if their "
        "rows are never in use at the same time"
    )
