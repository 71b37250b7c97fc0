"""Which elements are cast on their way, from what to what, and how exact that is."""

from __future__ import annotations

import math

from kvbaton.explain.result import CastInfo
from kvbaton.layout import Component
from kvbaton.plan import Share
from kvbaton.plan.fit import Format, Tensors, format_of, tensors_of

_ROUNDING = {
    "float32": (0.0, ""),
    "bfloat16": (2.0**-8, "2^-134"),
    "float16": (2.0**-11, "2^-25"),
    "float8_e4m3fn": (2.0**-4, "2^-10"),
}
"""Bounds of the error of one rounding: a part of the value, or (where that is larger) in units of the factor."""
_PRODUCTS = 2.0**-22
"""What products and quotients add where a factor or scale is no power of two, as a part of the value."""


class Casts:
    """Collects the casts of one component over many pairs of ranks."""

    def __init__(self) -> None:
        self._found: dict[tuple[Format, Format], dict[str, set[int]]] = {}
        self._seen: set[tuple[str, int]] = set()

    def add(self, share: Share, source: Component, destination: Component) -> None:
        """Note what changes of what ``share`` names of the component."""
        tables: tuple[Tensors, Tensors] | None = None
        for part in share.parts:
            if part.component != destination.name:
                continue
            for layer in part.layers:
                key = part.role, layer
                if key in self._seen:
                    continue
                self._seen.add(key)
                tables = tables or (tensors_of(source), tensors_of(destination))
                at, to = (format_of(tensors[key], tensors) for tensors in tables)
                if at != to:
                    self._found.setdefault((at, to), {}).setdefault(part.role, set()).add(layer)

    def told(self) -> tuple[CastInfo, ...]:
        """The casts, those of roles and layers that change alike as one."""
        found = []
        for (at, to), roles in self._found.items():
            for layers in dict.fromkeys(tuple(sorted(layers)) for layers in roles.values()):
                alike = tuple(role for role, own in roles.items() if tuple(sorted(own)) == layers)
                found.append(CastInfo(alike, layers, str(at), str(to), *_bound(at, to)))
        return tuple(found)


def _bound(at: Format, to: Format) -> tuple[float, str]:
    """The relative bound, and the larger of both in words."""
    relative, absolute = _ROUNDING[to.dtype]
    exact = at.scale is None and to.scale is None and math.frexp(at.factor / to.factor)[0] == 0.5
    unit = " * ".join(["scale"] * (to.scale is not None) + [f"{to.factor:g}"] * (to.factor != 1.0))
    words = []
    if relative:
        least = f"{absolute} * {unit}" if unit else absolute
        words.append(f"the larger of 2^{round(math.log2(relative))} * abs(value) and {least}")
    if not exact:
        words.append("2^-22 * abs(value)")
    return relative + (0.0 if exact else _PRODUCTS), ", plus ".join(words) or "none: exact"
