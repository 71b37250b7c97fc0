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
from kvbaton.layout.kinds import Kind
from kvbaton.layout.limits import (
    MAX_AXES,
    MAX_BYTES,
    MAX_COMPONENTS,
    MAX_LAYER,
    MAX_NAME,
    MAX_PAGE_SIZE,
    MAX_PERIOD,
    MAX_RANKS,
    MAX_SPANS,
    MAX_SPANS_IN_ALL,
    MAX_TENSORS,
)
from kvbaton.layout.nouns import DTYPE_BYTES, TOKEN, Axis, Component, Coords, Ownership, RankLayout, Tensor
from kvbaton.layout.overlap import check_overlap
from kvbaton.layout.scales import check_scales


def check_layout(layout: RankLayout, region_bytes: Sequence[int] | None) -> None:
    """Check ``layout`` against the sizes of the registered regions.

    ``region_bytes[i]`` is the size of region ``i`` in bytes; None where it is not known (the layout of a peer): then
    everything else is checked. Raises `LayoutError`, which names the component, the role, the layer, the axis and both
    numbers. Whatever the values are, it ends with `LayoutError` or without an error.
    """
    _check_coords(layout.coords)
    _check_ownership(layout.owned, "owned")
    _check_tuple(layout.components, "layout", "components", "Component")
    if len(layout.components) > MAX_COMPONENTS:
        _fail("layout", f"{len(layout.components)} components, at most {MAX_COMPONENTS} are allowed")
    if sum(len(component.tensors) for component in layout.components) > MAX_TENSORS:
        _fail("layout", f"more than {MAX_TENSORS} tensors")
    names: set[str] = set()
    spans = 0
    for component in layout.components:
        _check_name(component.name, "layout", "component")
        if component.name in names:
            _fail(f"component {component.name}", "is listed twice; merge the tensors into one component")
        names.add(component.name)
        _check_types(component)
        spans += _check_component(component, layout.owned_of(component), region_bytes, MAX_SPANS_IN_ALL - spans)
    if region_bytes is not None:
        check_overlap(layout.components)


def _check_coords(coords: Coords) -> None:
    for name, pair in zip(("tp", "pp", "cp", "dp"), coords.all(), strict=True):
        if type(pair) is not tuple or len(pair) != 2:
            _fail(f"coords {name}", f"{str(pair)[:MAX_NAME]} is no pair (rank, size)")
        rank, size = pair
        _integer(size, 1, MAX_RANKS, f"coords {name}", "size")
        _integer(rank, 0, size - 1, f"coords {name}", "rank")


def _check_ownership(owned: Ownership, where: str) -> None:
    _integer(owned.unit, 1, MAX_PERIOD, where, "unit")
    _integer(owned.modulus, 1, MAX_PERIOD, where, "modulus")
    _integer(owned.remainder, 0, owned.modulus - 1, where, "remainder")
    _integer(owned.unit * owned.modulus, 1, MAX_PERIOD, where, "unit * modulus")


def _check_types(component: Component) -> None:
    where = f"component {component.name}"
    _check_tuple(component.tensors, where, "tensors", "Tensor")
    for value, wanted, what in ((component.kind, Kind, "kind"), (component.owned, Ownership, "owned")):
        if type(value) is not wanted and not (what == "owned" and value is None):
            _fail(where, f"{what} is {str(value)[:MAX_NAME]!r} of type {type(value).__name__}, not {wanted.__name__}")


def _check_kind(kind: Kind, where: str) -> None:
    if kind.per not in ("token", "request"):
        _fail(where, f"kind per {str(kind.per)[:MAX_NAME]!r} is neither 'token' nor 'request'")
    for value, what in ((kind.ring, "ring"), (kind.reused, "reused"), (kind.aux, "aux")):
        if type(value) is not bool:
            _fail(where, f"{what} of its kind is {str(value)[:MAX_NAME]}, not a bool")
    _integer(kind.ratio, 1, MAX_PAGE_SIZE, where, "ratio of its kind")
    _integer(kind.window, 0, MAX_BYTES, where, "window of its kind")
    _integer(kind.tail, 0, MAX_PAGE_SIZE, where, "tail of its kind")
    if kind.window and kind.tail:
        _fail(where, f"its kind has a window of {kind.window} and a tail of {kind.tail} tokens; choose one of them")
    if kind.aux and kind.has_tokens:
        _fail(where, "its kind is aux, but its rows hold tokens; aux data are per request")
    if not kind.has_tokens and kind != Kind(per="request", aux=kind.aux):
        _fail(where, "rows of a request have no ratio, window, tail or ring, and are never counted by prefix")


def _check_component(
    component: Component, owned: Ownership, region_bytes: Sequence[int] | None, spans_left: int
) -> int:
    """Check a component; returns the spans of its tensors, where equal axes count once."""
    where = f"component {component.name}"
    kind = component.kind
    _check_kind(kind, where)
    page_size = f"page_size ({kind})"
    _integer(component.page_size, 1, MAX_PAGE_SIZE if kind.has_tokens else 1, where, page_size)
    if component.page_size % kind.ratio:
        _fail(
            where,
            f"{page_size} is {component.page_size}, not a multiple of the {kind.ratio} tokens of an entry",
        )
    if component.pool:
        _check_name(component.pool, where, "pool")
    if component.owned is not None:
        if not kind.has_tokens:
            _fail(where, "owned is given, but its rows hold no tokens")
        _check_ownership(component.owned, f"{where}, owned")
    if owned.modulus > 1 and owned.unit % kind.ratio:
        _fail(
            where,
            f"the ranks share the tokens in units of {owned.unit}, not a multiple of the {kind.ratio} tokens of an "
            "entry: choose a unit that keeps entries whole, or give the component its own owned",
        )
    seen: set[tuple[str, int]] = set()
    # Layers mostly share their axes: what was found good once needs no second look.
    good: dict[tuple[tuple[Axis, ...], str], int] = {}
    spans = known = 0
    for tensor in component.tensors:
        _check_name(tensor.role, where, "role")
        _integer(tensor.layer, 0, MAX_LAYER, f"{where}, role {tensor.role}", "layer")
        place = f"{where}, role {tensor.role}, layer {tensor.layer}"
        if (tensor.role, tensor.layer) in seen:
            _fail(place, "is listed twice in this component; roles must differ within a layer")
        seen.add((tensor.role, tensor.layer))
        _check_tensor(component, tensor, region_bytes, place, good)
        if len(good) > known:
            known = len(good)
            spans += sum(len(axis.spans) for axis in tensor.axes)
            if spans > spans_left:
                _fail(
                    place,
                    f"up to here unlike tensors have more than {MAX_SPANS_IN_ALL} spans; give tensors that are alike "
                    "the same axes",
                )
    check_scales(component)
    return spans


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
    _integer(tensor.region, 0, MAX_TENSORS, place, "region")
    if region_bytes is not None and tensor.region >= len(region_bytes):
        _fail(place, f"it lies in region {tensor.region}, but {len(region_bytes)} regions are registered")
    _check_tuple(tensor.axes, place, "axes", "Axis")
    key = (tensor.axes, tensor.dtype)
    try:
        known = key in good
    except TypeError:
        # Something in it is no tuple: what that is, the look at the axes says.
        _check_axes(component, tensor, place)
        raise LayoutError(f"{place}: axes and spans must be tuples") from None
    if not known:
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
    _check_tuple(axis.spans, where, "spans", "pairs (start, count)")
    if not 1 <= len(axis.spans) <= MAX_SPANS:
        _fail(where, f"{len(axis.spans)} spans; from 1 to {MAX_SPANS} are allowed (a tensor without data has rows = 0)")
    for span in axis.spans:
        if type(span) is not tuple or len(span) != 2:
            _fail(where, f"a span is {str(span)[:MAX_NAME]}, not a pair (start, count)")
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
    if not component.kind.has_tokens:
        if token is not None:
            _fail(f"{place}, axis {TOKEN}", f"kind {component.kind} has rows of no token; name the axis otherwise")
        return
    entries = component.entries_per_row
    if token is None:
        _fail(place, f"kind {component.kind} needs the axis {TOKEN}, of size {entries}")
    if token.size != entries or token.spans != ((0, entries),):
        of = "" if component.kind.ratio == 1 else f", {component.kind.ratio} tokens to an entry"
        _fail(
            f"{place}, axis {TOKEN}",
            f"size {token.size} with spans {token.spans[:3]}, but page_size is {component.page_size}{of}: "
            f"the axis must hold 0..{entries} in one span",
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


def _check_tuple(value: object, where: str, what: str, of: str) -> None:
    if type(value) is not tuple:
        _fail(where, f"{what} is of type {type(value).__name__}; pass a tuple of {of}")


def _integer(value: object, low: int, high: int, where: str, what: str) -> None:
    if type(value) is not int:
        _fail(where, f"{what} is {str(value)[:MAX_NAME]} of type {type(value).__name__}, not an int")
    if not low <= value <= high:
        shown = str(value) if -(MAX_BYTES**2) < value < MAX_BYTES**2 else f"a number of {value.bit_length()} bits"
        _fail(where, f"{what} is {shown}, it must be {f'from {low} to {high}' if low < high else low}")


def _fail(where: str, reason: str) -> NoReturn:
    raise LayoutError(f"{where}: {reason}")
