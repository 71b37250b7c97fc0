"""Whether a registration can be believed: what a stranger sends is checked before it is kept or handed on."""

from __future__ import annotations

from kvbaton.layout.nouns import DTYPE_BYTES, Axis, Component, Coords, RankLayout, Tensor
from kvbaton.registry.base import Registration, RegistryRefused

MAX_TEXT = 1024
MAX_AXIS_SIZE = 1 << 16
_INT64 = 1 << 63


def coords_order(coords: Coords) -> tuple[int, int, int, int]:
    """Return the key by which ranks are ordered: dp, pp, cp, tp."""
    return (coords.dp[0], coords.pp[0], coords.cp[0], coords.tp[0])


def check_registration(registration: Registration) -> None:
    """Raise `RegistryRefused`, naming the field and its value, if a number or a text is out of its bounds.

    This is not the layout's own check (that needs the sizes of the regions, which only the rank knows): it keeps
    what no rank can mean out of the table.
    """
    where = f"rank {registration.coords} ({registration.instance})"
    if not registration.endpoint or len(registration.endpoint) > MAX_TEXT or "://" not in registration.endpoint:
        raise RegistryRefused(f"{where}: endpoint {registration.endpoint[:80]!r} is not like tcp://host:port")
    if len(registration.model) > MAX_TEXT:
        raise RegistryRefused(f"{where}: the model's name has {len(registration.model)} characters, over {MAX_TEXT}")
    _check_coords(registration.coords, where)
    _check_layout(registration.layout, where)


def _check_coords(coords: Coords, where: str) -> None:
    for axis, (rank, size) in zip(("tp", "pp", "cp", "dp"), coords.all(), strict=True):
        if not 1 <= size <= MAX_AXIS_SIZE:
            raise RegistryRefused(f"{where}: {axis} size is {size}, not from 1 to {MAX_AXIS_SIZE}")
        if not 0 <= rank < size:
            raise RegistryRefused(f"{where}: {axis} rank {rank} does not fit {axis} size {size}")


def _check_layout(layout: RankLayout, where: str) -> None:
    owned = layout.owned
    _check_numbers(f"{where}: owned tokens", least=1, unit=owned.unit, modulus=owned.modulus)
    _check_numbers(f"{where}: owned tokens", remainder=owned.remainder)
    if owned.remainder >= owned.modulus:
        raise RegistryRefused(f"{where}: owned remainder {owned.remainder} does not fit modulus {owned.modulus}")
    names = [component.name for component in layout.components]
    for name in names:
        if names.count(name) > 1:
            raise RegistryRefused(f"{where}: component {name[:80]!r} is listed {names.count(name)} times")
    for component in layout.components:
        _check_component(component, f"{where}: component {component.name[:80]!r}")


def _check_component(component: Component, where: str) -> None:
    _check_text(where, name=component.name)
    _check_numbers(where, least=1, page_size=component.page_size)
    _check_numbers(where, window=component.window)
    for tensor in component.tensors:
        _check_tensor(tensor, f"{where}, {tensor.role[:80]} of layer {tensor.layer}")


def _check_tensor(tensor: Tensor, where: str) -> None:
    _check_text(where, role=tensor.role)
    if tensor.dtype not in DTYPE_BYTES:
        raise RegistryRefused(f"{where}: dtype {tensor.dtype[:80]!r} is none of {', '.join(DTYPE_BYTES)}")
    _check_numbers(
        where,
        layer=tensor.layer,
        region=tensor.region,
        offset=tensor.offset,
        rows=tensor.rows,
        row_stride=tensor.row_stride,
    )
    for axis in tensor.axes:
        _check_axis(axis, f"{where}, axis {axis.name[:80]!r}")


def _check_axis(axis: Axis, where: str) -> None:
    _check_text(where, name=axis.name)
    _check_numbers(where, size=axis.size, stride=axis.stride)
    for start, count in axis.spans:
        _check_numbers(where, start=start, count=count)
        if start + count > axis.size:
            raise RegistryRefused(f"{where}: span ({start}, {count}) ends past the axis size {axis.size}")


def _check_text(where: str, **texts: str) -> None:
    for name, text in texts.items():
        if not text or len(text) > MAX_TEXT:
            raise RegistryRefused(f"{where}: {name} has {len(text)} characters, not from 1 to {MAX_TEXT}")


def _check_numbers(where: str, *, least: int = 0, **numbers: int) -> None:
    for name, number in numbers.items():
        if not least <= number < _INT64:
            raise RegistryRefused(f"{where}: {name} is {number}, not from {least} to 2**63 - 1")
