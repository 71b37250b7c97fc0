"""What elements hold that change on their way, from the words of the documents about casts.

Where every factor and scale is a power of two this is one code for each element. Elsewhere the products may be rounded
in more than one way, and it is a range of codes: those of all values within `PRODUCTS` of the exact one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.check.content import Int64s, UInt64s, codes_of, constant, indices_of, mixed
from kvbaton.check.formats import Float64s, in_float32, nearest, not_a_number, powers_of_two, sign_bit, value_of
from kvbaton.layout import TOKEN, Axis, Component, Tensor

PRODUCTS = 2.0**-22
"""Bound of the relative error of the products of a value in float32."""
TINY = 2.0**-148
"""Bound of their error where it is not relative: among numbers that are not normal."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn, for which scales are made."""
SMALLEST_SCALE = 2.0**-126

Sizes = tuple[tuple[str, int], ...]
"""``(axis, size)`` in the whole model, without the token axis, sorted by name."""


class Stored(NamedTuple):
    """How a side stores the elements of a role. What both sides store alike is sent as it is."""

    dtype: str
    factor: float
    scale: str
    scale_sizes: Sizes


class Codes(NamedTuple):
    """The least and the largest code that each element may have; both have the same sign."""

    low: UInt64s
    high: UInt64s


class Cast(NamedTuple):
    """Elements of a ``role`` of a component, whose axes have ``sizes``, that are ``sent`` otherwise than ``kept``."""

    component: str
    role: str
    sizes: Sizes
    sent: Stored
    kept: Stored

    def codes(self, tensor: Tensor, places: UInt64s) -> Codes:
        """The codes ``[layer, entry, inner]`` of a receiver's ``tensor``: that of the role, or that of its scales.

        ``places`` ``[layer, entry, 1]`` are their shares in the logical content.
        """
        if tensor.role != self.role:
            scales = self._scales(places, _members(tensor.axes, self.sizes, self.kept.scale_sizes))
            return Codes(*(nearest("float32", bound) for bound in scales))
        stands_for, exact = self._values(places, _members(tensor.axes, self.sizes, self.sizes))
        low, high = _bounds(stands_for[..., 0], exact[..., 0])
        if self.kept.scale:
            scales = self._scales(places, _members(tensor.axes, self.sizes, self.kept.scale_sizes))
            with np.errstate(all="ignore"):
                low, high = in_float32(low / scales[1]), in_float32(high / scales[0])
        sign = np.signbit(stands_for[..., 0]).astype(np.uint64) << np.uint64(sign_bit(self.kept.dtype))
        found = [nearest(self.kept.dtype, bound) for bound in (low, high)]
        # Any NaN is the positive one.
        return Codes(*(np.where(codes == not_a_number(self.kept.dtype), codes, codes | sign) for codes in found))

    def _scales(self, places: UInt64s, members: Members) -> tuple[Float64s, Float64s]:
        """Bounds of the scale of each block: the largest finite magnitude over the largest number, 1 if that is 0."""
        bounds = []
        for magnitudes in _bounds(*self._values(places, members)):
            most = np.where(np.isfinite(magnitudes), magnitudes, 0.0).max(axis=-1)
            bounds.append((most, np.maximum(in_float32(most / LARGEST), SMALLEST_SCALE)))
        (least, low), (most, high) = bounds
        return np.where(most == 0, 1.0, low), np.where(least == 0, 1.0, high)

    def _values(self, places: UInt64s, members: Members) -> tuple[Float64s, npt.NDArray[np.bool_]]:
        """Values in units of the receiver's factor, ``[layer, entry, inner, member]``, and which are exact."""
        sent = self.sent
        stored = value_of(sent.dtype, self._content(self.role, places, members))
        factor = np.float64(sent.factor / self.kept.factor)
        exact = np.broadcast_to(powers_of_two(factor), stored.shape)
        with np.errstate(all="ignore"):
            if not sent.scale:
                return stored * factor, exact
            sizes = dict(self.sizes)
            sharing = {axis: members.indices[axis] // (sizes[axis] // size) for axis, size in sent.scale_sizes}
            scales = value_of("float32", self._content(sent.scale, places, Members(members.shape, sharing)))
            return stored * (scales * factor), exact & powers_of_two(scales)

    def _content(self, role: str, places: UInt64s, members: Members) -> UInt64s:
        """The sender's codes of elements of ``role``."""
        shares = np.full(members.shape, constant(f"{self.component}/{role}"))
        for axis, indices in members.indices.items():
            shares = shares + indices.astype(np.uint64) * constant(axis)
        is_scale = role == self.sent.scale
        return codes_of(mixed(places[..., None] + shares), "float32" if is_scale else self.sent.dtype, scale=is_scale)


class Members(NamedTuple):
    """Several elements for each of some: their global indices by axis, arrays of one ``shape`` ``[inner, member]``."""

    shape: tuple[int, ...]
    indices: dict[str, Int64s]


@functools.lru_cache(1 << 10)
def _members(axes: tuple[Axis, ...], sizes: Sizes, scale_sizes: Sizes) -> Members:
    """The elements that share a scale with each element of ``axes``.

    ``axes`` are those of a tensor of ``sizes`` itself, or of its scales, which have ``scale_sizes``.
    """
    own, own_sizes, scales = indices_of(axes), dict(sizes_of(axes)), dict(scale_sizes)
    inner = int(np.prod([axis.local_size for axis in axes if axis.name != TOKEN], dtype=np.int64))
    found = []
    for name, size in sizes:
        block = size // scales.get(name, 1)
        first = own[name] * (size // own_sizes[name]) // block * block if name in scales else np.zeros(inner, np.int64)
        found.append((name, first, block))
    count = int(np.prod([block for _, _, block in found], dtype=np.int64))
    offsets = np.unravel_index(np.arange(count), [block for _, _, block in found]) if found else ()
    indices = {name: first[:, None] + offset for (name, first, _), offset in zip(found, offsets, strict=True)}
    return Members((inner, count), indices)


def _bounds(values: Float64s, exact: npt.NDArray[np.bool_]) -> tuple[Float64s, Float64s]:
    """The least and the largest magnitude that float32 may have for each value."""
    magnitudes = np.abs(values)
    with np.errstate(invalid="ignore"):
        exact = exact | (magnitudes == 0) | ~np.isfinite(magnitudes)
        apart = np.where(exact, 0.0, magnitudes * PRODUCTS + TINY)
        return in_float32(np.maximum(magnitudes - apart, 0.0)), in_float32(magnitudes + apart)


@functools.lru_cache(1 << 10)
def sizes_of(axes: tuple[Axis, ...]) -> Sizes:
    """The sizes of ``axes``."""
    return tuple(sorted((axis.name, axis.size) for axis in axes if axis.name != TOKEN))


def stored_in(component: Component) -> dict[tuple[str, int], Stored]:
    """How each tensor of ``component`` is stored, by role and layer."""
    scales = {(tensor.role, tensor.layer): tensor.axes for tensor in component.tensors}
    return {
        (tensor.role, tensor.layer): Stored(
            tensor.dtype,
            tensor.factor,
            tensor.scale,
            sizes_of(scales[tensor.scale, tensor.layer]) if tensor.scale else (),
        )
        for tensor in component.tensors
    }
