"""Whether a tensor of one side can be copied into the same tensor of the other side."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Component, RankLayout, Span, Tensor


class Held(NamedTuple):
    """A tensor as its rank holds it: the global indices, without their place in memory."""

    dtype: str
    axes: tuple[tuple[str, int, tuple[Span, ...]], ...]
    """``(name, size, spans)`` of each axis but the token axis, sorted by name."""


Known = dict[tuple[tuple[Axis, ...], str], Held]
"""What is held, by axes and dtype: most layers of all ranks share it."""


def held(tensor: Tensor, known: Known) -> Held:
    """Return what ``tensor`` holds; equal tensors get the same value from ``known``."""
    found = known.get((tensor.axes, tensor.dtype))
    if found is None:
        axes = tuple(sorted((axis.name, axis.size, axis.spans) for axis in tensor.axes if axis.name != TOKEN))
        found = known[tensor.axes, tensor.dtype] = Held(tensor.dtype, axes)
    return found


def where(component: str, tensor: Tensor) -> str:
    """Return the words that name a tensor in an error."""
    return f"component {component}, role {tensor.role}, layer {tensor.layer}"


def check_component(source: Component, destination: Component, source_coords: object) -> None:
    """Raise `LayoutMismatch` where the kinds do not hold the same content."""
    if source.kind.content != destination.kind.content:
        _fail(
            f"component {source.name}: its kind is '{source.kind}' at the source ({source_coords}) and "
            f"'{destination.kind}' at the destination; both sides must serve the same model and register the same kind"
        )


def check_tensor(
    source: Tensor, destination: Tensor, held_source: Held, held_destination: Held, component: str
) -> None:
    """Raise `LayoutMismatch` where dtype, axes or sizes differ."""
    name = where(component, destination)
    if source.dtype != destination.dtype:
        _fail(
            f"{name}: dtype is {source.dtype} at the source and {destination.dtype} at the destination (rows of "
            f"{_row_bytes(source)} and {_row_bytes(destination)} bytes); give both engines the same KV cache dtype"
        )
    source_sizes = {axis: size for axis, size, _ in held_source.axes}
    destination_sizes = {axis: size for axis, size, _ in held_destination.axes}
    if source_sizes.keys() != destination_sizes.keys():
        _fail(
            f"{name}: axes are {', '.join(source_sizes) or 'none'} at the source and "
            f"{', '.join(destination_sizes) or 'none'} at the destination; both must name the same axes"
        )
    for axis, size in destination_sizes.items():
        if source_sizes[axis] != size:
            _fail(
                f"{name}, axis {axis}: size is {source_sizes[axis]} at the source and {size} at the destination; both "
                f"sides must serve the same model"
            )


def fail_missing(sources: tuple[RankLayout, ...], component: Component, tensor: Tensor) -> NoReturn:
    """Raise `LayoutMismatch` for a tensor that the destination needs and no source holds."""
    name = where(component.name, tensor)
    found = [other for source in sources for other in source.components if other.name == component.name]
    if not found:
        names = dict.fromkeys(other.name for source in sources for other in source.components)
        _fail(
            f"{name}: the destination needs {tensor.rows} rows of it, but no source rank has the component "
            f"{component.name}; the sources have {', '.join(names) or 'none'}"
        )
    same = [
        other for entry in found for other in entry.tensors if (other.role, other.layer) == (tensor.role, tensor.layer)
    ]
    if same:
        _fail(
            f"{name}: elided at the source (0 rows), but the destination has {tensor.rows} rows of it; register its "
            f"rows at the source or elide it on both sides"
        )
    layers = sorted({other.layer for entry in found for other in entry.tensors if other.role == tensor.role})
    held_layers = f"layers {layers[0]} to {layers[-1]} ({len(layers)} of them)" if layers else "no layer"
    _fail(f"{name}: the destination needs it, but the sources have {held_layers} of that role")


def _row_bytes(tensor: Tensor) -> int:
    count = tensor.itemsize
    for axis in tensor.axes:
        count *= axis.local_size
    return count


def _fail(reason: str) -> NoReturn:
    raise LayoutMismatch(reason)
