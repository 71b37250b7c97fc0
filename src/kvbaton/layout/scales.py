"""Scales of tensors: which elements share one, and whether they hold together."""

from __future__ import annotations

from typing import NoReturn

from kvbaton.errors import LayoutError
from kvbaton.layout.nouns import Axis, Component, Tensor

MAX_FACTOR = 2.0**60
"""Bound of a factor and of its inverse."""

SCALE_DTYPE = "float32"


def block_sizes(tensor: Tensor, scale: Tensor) -> dict[str, int]:
    """How many neighbours share one scale along each axis of ``scale``; along the other axes of ``tensor`` all do."""
    sizes = {axis.name: axis.size for axis in tensor.axes}
    return {axis.name: sizes[axis.name] // axis.size for axis in scale.axes}


def check_scales(component: Component) -> None:
    """Check the factors and scales of the tensors of ``component``, whose axes hold together by themselves.

    Raises `LayoutError`, which names the component, the role, the layer, the axis and both numbers.
    """
    tensors = {(tensor.role, tensor.layer): tensor for tensor in component.tensors}
    users: dict[tuple[str, int], str] = {}
    # Layers mostly share their axes: what was found good once needs no second look.
    good: set[tuple[tuple[Axis, ...], tuple[Axis, ...]]] = set()
    for tensor in component.tensors:
        place = f"component {component.name}, role {tensor.role}, layer {tensor.layer}"
        _check_factor(tensor.factor, place)
        if tensor.scale == "":
            continue
        if not isinstance(tensor.scale, str):
            _fail(place, f"scale is {str(tensor.scale)[:128]}, not the role of a tensor")
        key = (tensor.scale, tensor.layer)
        scale = tensors.get(key)
        if scale is None:
            _fail(place, f"its scale {tensor.scale[:128]!r} is no role of this component and layer")
        if key in users:
            _fail(place, f"its scale {tensor.scale} is already that of {users[key]}; give each tensor its own")
        users[key] = tensor.role
        _check_scale(tensor, scale, place)
        if (tensor.axes, scale.axes) not in good:
            _check_blocks(tensor, scale, place)
            good.add((tensor.axes, scale.axes))


def _check_factor(factor: object, place: str) -> None:
    if not isinstance(factor, float):
        _fail(place, f"factor is of type {type(factor).__name__}, not a float")
    if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
        _fail(place, f"factor is {factor}, it must be from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")


def _check_scale(tensor: Tensor, scale: Tensor, place: str) -> None:
    if scale.dtype != SCALE_DTYPE:
        _fail(place, f"dtype of its scale {scale.role} is {scale.dtype}, it must be {SCALE_DTYPE}")
    if scale.scale or scale.factor != 1.0:
        _fail(place, f"its scale {scale.role} has a scale or factor itself; it must be stored as it is")
    if scale.rows != tensor.rows:
        _fail(place, f"it has {tensor.rows} rows, but its scale {scale.role} has {scale.rows}; give both as many")


def _check_blocks(tensor: Tensor, scale: Tensor, place: str) -> None:
    axes = {axis.name: axis for axis in tensor.axes}
    for axis in scale.axes:
        here = f"{place}, scale {scale.role}, axis {axis.name}"
        if axis.name not in axes:
            _fail(here, f"the tensor has no such axis, it has {', '.join(axes) or 'none'}")
        size = axes[axis.name].size
        if size % axis.size:
            _fail(here, f"its size is {axis.size}, which does not divide the {size} of the tensor")
        block = size // axis.size
        spans = tuple((start * block, count * block) for start, count in axis.spans)
        if spans != axes[axis.name].spans:
            _fail(
                here,
                f"its spans {axis.spans[:3]} hold the scales of {spans[:3]} of the tensor, in blocks of {block}, but "
                f"the tensor has {axes[axis.name].spans[:3]}",
            )


def _fail(where: str, reason: str) -> NoReturn:
    raise LayoutError(f"{where}: {reason}")
