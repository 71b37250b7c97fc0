"""Whether a tensor of one side can be copied into the same tensor of the other side."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Component, RankLayout, Span, Tensor
from kvbaton.plan.boxes import CAST_DTYPES

Tensors = dict[tuple[str, int], Tensor]
"""The tensors of a component by role and layer."""

QUANTISED = "float8_e4m3fn"
"""The dtype that a destination's own scales are made for."""


class Format(NamedTuple):
    """How the elements of a tensor stand for values. What is of one format is moved as it is."""

    dtype: str
    factor: float
    scale: tuple[str, tuple[tuple[str, int], ...]] | None
    """The role that holds its scales, and ``(axis, size)`` of them without the token axis, sorted by name."""

    def __str__(self) -> str:
        words = [self.dtype]
        words += [f"with factor {self.factor:g}"] if self.factor != 1.0 else []
        if self.scale is not None:
            sizes = ", ".join(f"{axis} {size}" for axis, size in self.scale[1])
            words += [f"with scales in {self.scale[0]} ({sizes or 'one for each token or row'})"]
        return " ".join(words)


class Held(NamedTuple):
    """A tensor as its rank holds it: the global indices, without their place in memory."""

    format: Format
    axes: tuple[tuple[str, int, tuple[Span, ...]], ...]
    """``(name, size, spans)`` of each axis but the token axis, sorted by name."""


Known = dict[tuple[tuple[Axis, ...], str, float, str, tuple[Axis, ...]], Held]
"""What is held, by axes, dtype, factor, role of the scales and their axes: most layers of all ranks share it."""


def tensors_of(component: Component) -> Tensors:
    """The tensors of ``component`` by role and layer."""
    return {(tensor.role, tensor.layer): tensor for tensor in component.tensors}


def format_of(tensor: Tensor, tensors: Tensors) -> Format:
    """How the elements of ``tensor``, one of the component's ``tensors``, stand for values."""
    if not tensor.scale:
        return Format(tensor.dtype, tensor.factor, None)
    scale = tensors[tensor.scale, tensor.layer]
    sizes = tuple(sorted((axis.name, axis.size) for axis in scale.axes if axis.name != TOKEN))
    return Format(tensor.dtype, tensor.factor, (tensor.scale, sizes))


def held(tensor: Tensor, tensors: Tensors, known: Known) -> Held:
    """Return what ``tensor`` holds; equal tensors get the same value from ``known``."""
    scale_axes = tensors[tensor.scale, tensor.layer].axes if tensor.scale else ()
    key = (tensor.axes, tensor.dtype, tensor.factor, tensor.scale, scale_axes)
    found = known.get(key)
    if found is None:
        axes = tuple(sorted((axis.name, axis.size, axis.spans) for axis in tensor.axes if axis.name != TOKEN))
        found = known[key] = Held(format_of(tensor, tensors), axes)
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
    source: Tensor, destination: Tensor, held_source: Held, held_destination: Held, component: str, *, cast: bool
) -> None:
    """Raise `LayoutMismatch` where axes or sizes differ, or formats that may not (``cast``) or cannot be cast."""
    name = where(component, destination)
    if held_source.format != held_destination.format:
        check_cast(source, destination, held_source.format, held_destination.format, name, cast=cast)
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


def check_cast(source: Tensor, destination: Tensor, at: Format, to: Format, name: str, *, cast: bool) -> None:
    """Raise `LayoutMismatch`, naming ``name``, unless formats that differ may (``cast``) and can be cast."""
    both = f"{name}: dtype is {at} at the source and {to} at the destination"
    known = CAST_DTYPES[1:]
    if at.dtype not in known or to.dtype not in known:
        _fail(
            f"{both} (rows of {_row_bytes(source)} and {_row_bytes(destination)} bytes), and casts are only between "
            f"{', '.join(known)}; give both engines the same KV cache dtype"
        )
    if not cast:
        _fail(
            f"{both} (rows of {_row_bytes(source)} and {_row_bytes(destination)} bytes); give both engines the same KV "
            f"cache dtype, or allow a cast with Settings(cast=True) on the decode side"
        )
    if to.scale is not None and to.dtype != QUANTISED:
        _fail(f"{both}; scales are made for {QUANTISED} only: register the destination's tensor without a scale")


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
