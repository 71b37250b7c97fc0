"""The formats that casts know, from their definitions: what a code stands for, and the code nearest to a value.

A code is the bits of an element as an integer. Without its sign bit, a larger code is a larger magnitude.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]

FORMATS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10), "float8_e4m3fn": (4, 3)}
"""Bits of exponent and of fraction. A sign bit stands before them."""

_NO_INFINITY = "float8_e4m3fn"
"""It has no infinities: of the largest exponent only the code of all ones is no number."""


def sign_bit(dtype: str) -> int:
    """The place of the sign bit of ``dtype``."""
    return sum(FORMATS[dtype])


def not_a_number(dtype: str) -> int:
    """The code of the positive quiet NaN."""
    exponent, fraction = FORMATS[dtype]
    everything = (1 << (exponent + fraction)) - 1
    return everything if dtype == _NO_INFINITY else everything ^ ((1 << (fraction - 1)) - 1)


def value_of(dtype: str, codes: UInt64s) -> Float64s:
    """What ``codes`` stand for. Exact."""
    if dtype == "float32":
        with np.errstate(invalid="ignore"):
            return np.asarray(codes.astype(np.uint32).view(np.float32).astype(np.float64))
    sign = np.uint64(1 << sign_bit(dtype))
    magnitudes = _magnitudes(dtype)[codes & (sign - np.uint64(1))]
    return np.asarray(np.where(codes & sign, -magnitudes, magnitudes))


def nearest(dtype: str, magnitudes: Float64s) -> UInt64s:
    """The code nearest to each of ``magnitudes``, which are not negative; ties to the even code.

    Finite magnitudes beyond the largest number become it, except in float32, where `in_float32` has decided; an
    infinity becomes the NaN where there is no infinity.
    """
    if dtype == "float32":
        codes = magnitudes.astype(np.float32).view(np.uint32).astype(np.uint64)
    else:
        middles = _middles(dtype)
        place = np.searchsorted(middles, magnitudes, "left")
        tie = middles[np.minimum(place, len(middles) - 1)] == magnitudes
        codes = (place + (tie & (place % 2 == 1) & (place < len(middles)))).astype(np.uint64)
        infinity = not_a_number(dtype) if dtype == _NO_INFINITY else len(middles) + 1
        codes[np.isinf(magnitudes)] = infinity
    codes[np.isnan(magnitudes)] = not_a_number(dtype)
    return np.asarray(codes)


def in_float32(values: Float64s) -> Float64s:
    """``values`` rounded to what float32 has; beyond its largest number lies infinity."""
    with np.errstate(all="ignore"):
        return np.asarray(values.astype(np.float32).astype(np.float64))


def powers_of_two(magnitudes: Float64s) -> npt.NDArray[np.bool_]:
    """Which of ``magnitudes`` leave a fraction as it is that is multiplied by them: also 0, infinity and NaN."""
    return np.asarray((np.frexp(magnitudes)[0] == 0.5) | (magnitudes == 0) | ~np.isfinite(magnitudes))


@functools.cache
def _magnitudes(dtype: str) -> Float64s:
    """What each code without its sign bit stands for."""
    exponent_bits, fraction_bits = FORMATS[dtype]
    exponent, fraction = np.divmod(np.arange(1 << (exponent_bits + fraction_bits)), 1 << fraction_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    steps = np.where(exponent > 0, fraction + (1 << fraction_bits), fraction)
    values: Float64s = np.ldexp(steps.astype(np.float64), np.maximum(exponent, 1) - bias - fraction_bits)
    if dtype == _NO_INFINITY:
        values[-1] = np.nan
    else:
        top = exponent == exponent.max()
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return values


@functools.cache
def _middles(dtype: str) -> Float64s:
    """The middle between each finite magnitude and the next. Exact."""
    finite = _magnitudes(dtype)[np.isfinite(_magnitudes(dtype))]
    return np.asarray((finite[1:] + finite[:-1]) / 2)
