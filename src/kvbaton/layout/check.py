"""Whether the layout of one rank holds together.

A layout is written by an engine author or comes from a peer: nothing in it is trusted. What passes here has bounded,
positive sizes, rows inside their regions and elements that do not share bytes, so that `kvbaton.plan` can compute with
64-bit integers and without further checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

from kvbaton.errors import LayoutError
from kvbaton.layout.nouns import DTYPE_BYTES, TOKEN, Axis, Component, Coords, Ownership, RankLayout, Tensor

MAX_COMPONENTS = 256
MAX_TENSORS = 1 << 13
MAX_AXES = 8
MAX_SPANS = 1024
MAX_NAME = 128
MAX_PAGE_SIZE = 1 << 20
MAX_LAYER = 1 << 20
MAX_RANKS = 1 << 20
MAX_PERIOD = 1 << 20
"""Tokens after which the ownership of a rank repeats (``unit * modulus``)."""
MAX_BYTES = 1 << 50
"""Bound of every size, stride, offset and row count."""

KINDS = ("paged", "window", "slot", "aux")


def check_layout(layout: RankLayout, region_bytes: Sequence[int] | None) -> None:
    """Check ``layout`` against the sizes of the registered regions.

    ``region_bytes[i]`` is the size of region ``i`` in bytes; None where it is not known (the layout of a peer): then
    everything else is checked. Raises `LayoutError`, which names the component, the role, the layer, the axis and both
    numbers. Whatever the values are, it ends with `LayoutError` or without an error.
    """
    _check_coords(layout.coords)
    _check_ownership(layout.owned)
    if len(layout.components) > MAX_COMPONENTS:
        _fail("layout", f"{len(layout.components)} components, at most {MAX_COMPONENTS} are allowed")
    if sum(len(component.tensors) for component in layout.components) > MAX_TENSORS:
        _fail("layout", f"more than {MAX_TENSORS} tensors")
    names: set[str] = set()
    for component in layout.components:
        _check_name(component.name, "layout", "component")
        if component.name in names:
            _fail(f"component {component.name}", "is listed twice; merge the tensors into one component")
        names.add(component.name)
        _check_component(component, region_bytes)


def _check_coords(coords: Coords) -> None:
    for name, (rank, size) in zip(("tp", "pp", "cp", "dp"), coords.all(), strict=True):
        _integer(size, 1, MAX_RANKS, f"coords {name}", "size")
        _integer(rank, 0, size - 1, f"coords {name}", "rank")


def _check_ownership(owned: Ownership) -> None:
    _integer(owned.unit, 1, MAX_PERIOD, "owned", "unit")
    _integer(owned.modulus, 1, MAX_PERIOD, "owned", "modulus")
    _integer(owned.remainder, 0, owned.modulus - 1, "owned", "remainder")
    _integer(owned.unit * owned.modulus, 1, MAX_PERIOD, "owned", "unit * modulus")


def _check_component(component: Component, region_bytes: Sequence[int] | None) -> None:
    where = f"component {component.name}"
    if component.kind not in KINDS:
        _fail(where, f"kind {str(component.kind)[:MAX_NAME]!r} is not one of {', '.join(KINDS)}")
    tokens = component.kind in ("paged", "window")
    _integer(component.page_size, 1, MAX_PAGE_SIZE if tokens else 1, where, f"page_size of kind {component.kind}")
    if component.kind == "window":
        _integer(component.window, 1, MAX_BYTES, where, "window")
    else:
        _integer(component.window, 0, 0, where, f"window of kind {component.kind}")
    seen: set[tuple[str, int]] = set()
    # Layers mostly share their axes: what was found good once needs no second look.
    good: dict[tuple[tuple[Axis, ...], str], int] = {}
    for tensor in component.tensors:
        _check_name(tensor.role, where, "role")
        _integer(tensor.layer, 0, MAX_LAYER, f"{where}, role {tensor.role}", "layer")
        place = f"{where}, role {tensor.role}, layer {tensor.layer}"
        if (tensor.role, tensor.layer) in seen:
            _fail(place, "is listed twice in this component; roles must differ within a layer")
        seen.add((tensor.role, tensor.layer))
        _check_tensor(component, tensor, region_bytes, place, good)


def _check_tensor(
    component: Component,
    tensor: Tensor,
    region_bytes: Sequence[int] | None,
    place: str,
    good: dict[tuple[tuple[Axis, ...], str], int],
) -> None:
    if tensor.dtype not in DTYPE_BYTES:
        _fail(place, f"dtype {str(tensor.dtype)[:MAX_NAME]!r} is not one of {', '.join(DTYPE_BYTES)}")
    for value, what in ((tensor.offset, "offset"), (tensor.rows, "rows"), (tensor.row_stride, "row_stride")):
        _integer(value, 0, MAX_BYTES, place, what)
    last_region = MAX_TENSORS if region_bytes is None else len(region_bytes) - 1
    _integer(tensor.region, 0, last_region, place, "region")
    key = (tensor.axes, tensor.dtype)
    if key not in good:
        good[key] = _check_axes(component, tensor, place)
    if tensor.rows == 0:
        return
    extent = good[key]
    _check_nesting(tensor, place)
    end = tensor.offset + (tensor.rows - 1) * tensor.row_stride + extent
    if end > MAX_BYTES:
        _fail(place, f"the last row ends at byte {end}, at most {MAX_BYTES} is allowed")
    if region_bytes is not None and end > region_bytes[tensor.region]:
        _fail(
            place,
            f"the last of {tensor.rows} rows ends at byte {end}, but region {tensor.region} has "
            f"{region_bytes[tensor.region]} bytes; register a larger region or fewer rows",
        )


def _check_axes(component: Component, tensor: Tensor, place: str) -> int:
    """Check the axes by themselves; the extent of one row in bytes."""
    if len(tensor.axes) > MAX_AXES:
        _fail(place, f"{len(tensor.axes)} axes, at most {MAX_AXES} are allowed")
    names: set[str] = set()
    extent = tensor.itemsize
    for axis in tensor.axes:
        _check_name(axis.name, place, "axis")
        if axis.name in names:
            _fail(f"{place}, axis {axis.name}", "is listed twice")
        names.add(axis.name)
        _check_axis(axis, f"{place}, axis {axis.name}")
        extent += (axis.local_size - 1) * axis.stride
    _check_token_axis(component, tensor, place)
    return extent


def _check_axis(axis: Axis, where: str) -> None:
    _integer(axis.size, 1, MAX_BYTES, where, "size")
    _integer(axis.stride, 0, MAX_BYTES, where, "stride")
    if not 1 <= len(axis.spans) <= MAX_SPANS:
        _fail(where, f"{len(axis.spans)} spans; from 1 to {MAX_SPANS} are allowed (a tensor without data has rows = 0)")
    for span in axis.spans:
        if len(span) != 2:
            _fail(where, f"a span has {len(span)} numbers, not (start, count)")
        start, count = span
        _integer(start, 0, MAX_BYTES, where, "start of a span")
        _integer(count, 1, MAX_BYTES, where, "count of a span")
        if start + count > axis.size:
            _fail(where, f"span {start}..{start + count} ends outside the axis, whose size is {axis.size}")
    ordered = sorted(axis.spans)
    for (start, count), (following, _) in itertools.pairwise(ordered):
        if start + count > following:
            _fail(where, f"span {start}..{start + count} overlaps the one that starts at {following}")


def _check_token_axis(component: Component, tensor: Tensor, place: str) -> None:
    token = next((axis for axis in tensor.axes if axis.name == TOKEN), None)
    if component.kind in ("slot", "aux"):
        if token is not None:
            _fail(f"{place}, axis {TOKEN}", f"kind {component.kind} has rows of no token; name the axis otherwise")
        return
    if token is None:
        _fail(place, f"kind {component.kind} needs the axis {TOKEN}, of size {component.page_size}")
    if token.size != component.page_size or token.spans != ((0, component.page_size),):
        _fail(
            f"{place}, axis {TOKEN}",
            f"size {token.size} with spans {token.spans[:3]}, but page_size is {component.page_size}: "
            f"the axis must hold 0..{component.page_size} in one span",
        )


def _check_nesting(tensor: Tensor, place: str) -> None:
    """Every stride steps over all that lies inside it, so that no two elements share a byte."""
    steps = [(axis.stride, axis.local_size, f"axis {axis.name}") for axis in tensor.axes if axis.local_size > 1]
    if tensor.rows > 1:
        steps.append((tensor.row_stride, tensor.rows, "rows"))
    extent, inner = tensor.itemsize, f"an element of {tensor.dtype}"
    for stride, count, what in sorted(steps):
        if stride < extent:
            _fail(
                f"{place}, {what}",
                f"the stride is {stride} bytes, but {inner} takes {extent} bytes: neighbours would share memory",
            )
        extent += (count - 1) * stride
        inner = f"what lies inside (up to {what})"


def _check_name(name: object, where: str, what: str) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        _fail(where, f"{what} name {str(name)[:MAX_NAME]!r} must be 1 to {MAX_NAME} printable characters")


def _integer(value: object, low: int, high: int, where: str, what: str) -> None:
    if type(value) is not int:
        _fail(where, f"{what} is {str(value)[:MAX_NAME]} of type {type(value).__name__}, not an int")
    if not low <= value <= high:
        shown = str(value) if -(MAX_BYTES**2) < value < MAX_BYTES**2 else f"a number of {value.bit_length()} bits"
        _fail(where, f"{what} is {shown}, it must be {f'from {low} to {high}' if low < high else low}")


def _fail(where: str, reason: str) -> NoReturn:
    raise LayoutError(f"{where}: {reason}")
