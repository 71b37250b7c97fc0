"""Casts in numpy: the same results as those of the native kernel, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.copy.memory import INDEX_ELEMENTS, Bytes, view
from kvbaton.plan.boxes import (
    CAST_COLUMNS,
    CAST_ITEMSIZES,
    CONVERT,
    MOVE,
    SCALE,
    SCALE_BYTES,
    SIDE_COLUMNS,
    Cast,
    Float32s,
    Int64s,
)

Int32s = npt.NDArray[np.int32]

FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3FN = range(1, 5)
LARGEST = np.array([0, np.finfo(np.float32).max, float.fromhex("0x1.fep127"), 65504, 448], np.float32)
SMALLEST_SCALE = np.float32(2.0**-126)

_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000


def check_cast(shape: Int64s, cast: Cast | None, bases: Int64s) -> None:
    """Raise ``ValueError`` or ``TypeError`` for a cast whose tables are not as `kvbaton.plan.boxes` says."""
    if cast is None:
        return
    if not isinstance(cast, tuple) or len(cast) != len(Cast._fields):
        raise TypeError("cast must be None or a tuple of three tables")
    how, factor, scale = cast
    if how.dtype != np.int64 or factor.dtype != np.float32 or scale.dtype != np.int64:
        raise TypeError("how and scale of the cast must be int64, factor float32")
    count = len(shape)
    if how.shape != (count, len(CAST_COLUMNS)) or factor.shape != (count,) or scale.shape != (count, len(SIDE_COLUMNS)):
        raise ValueError("shape, side and cast tables differ in length, or have other columns")
    operation, source, destination, elements = how.T
    if ((how < 0) | (how > [SCALE, FLOAT8_E4M3FN, FLOAT8_E4M3FN, 1 << 60])).any() or (elements < 1).any():
        raise ValueError("the cast of a box does not hold together: there is no such operation or dtype")
    moves = operation == MOVE
    run = np.where(operation == SCALE, SCALE_BYTES, elements * np.array(CAST_ITEMSIZES)[destination])
    if (run != shape[:, 2]).any() or ((source == 0) != moves).any() or ((destination == 0) != moves).any():
        raise ValueError("the cast of a box does not hold together: elements and run differ, or a dtype is missing")
    if not np.isfinite(factor[~moves]).all():
        raise ValueError("the cast of a box does not hold together: a factor is not finite")
    scale = scale[scale[:, 0] != -1]
    if (scale < 0).any() or (scale[:, 3] < 1).any() or (scale[:, 0] >= len(bases)).any():
        raise ValueError("a region, offset or stride of a scale is out of range")


def cast_pieces(
    how: Sequence[int],
    factors: Float32s,
    scales: Int64s | None,
    froms: Int64s,
    tos: Int64s,
    skip: Int64s,
    lengths: Int64s,
) -> None:
    """Cast pieces that share the columns ``how`` of a cast; of what each gives, write ``lengths`` bytes after ``skip``.

    All other arrays have an item for each piece: its factor, the address of its scale, and where it is read and
    written.
    """
    operation, source, destination, elements = how
    step = max(1, INDEX_ELEMENTS // (elements * CAST_ITEMSIZES[source]))
    for start in range(0, len(froms), step):
        block = slice(start, start + step)
        values = decode(source, _read(froms[block], elements * CAST_ITEMSIZES[source]))
        times = factors[block]
        with np.errstate(all="ignore"):
            if scales is not None:
                times = _read(scales[block], SCALE_BYTES).view(np.float32)[:, 0] * times
            values = values * times[:, None]
            if operation != CONVERT:
                divisors = scales_of(values, destination)
                values = divisors if operation == SCALE else values / divisors
        made = encode(FLOAT32 if operation == SCALE else destination, values)
        _write(tos[block], made, skip[block], lengths[block])


def decode(dtype: int, stored: Bytes) -> Float32s:
    """Values of ``stored``, bytes ``[n, elements * itemsize]``, as float32 ``[n, elements]``. Exact."""
    if dtype == FLOAT32:
        return stored.view(np.float32)
    if dtype == BFLOAT16:
        wide: Float32s = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide
    if dtype == FLOAT16:
        exact: Float32s = stored.view(np.float16).astype(np.float32)
        return exact
    values: Float32s = _FLOAT8[stored]
    return values


def encode(dtype: int, values: Float32s) -> Bytes:
    """Round ``values``, ``[n, elements]``, to the nearest that ``dtype`` has, ties to even: ``[n, bytes]``.

    Finite values beyond the largest one become it; infinities stay where the dtype has them and are NaN in
    float8_e4m3fn; every NaN becomes the positive quiet one.
    """
    values = np.ascontiguousarray(values)
    bits = values.view(np.int32)
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITE
    capped = np.where(finite, np.minimum(magnitude, LARGEST[dtype].view(np.int32)), magnitude)
    nan = magnitude > _INFINITE
    if dtype == FLOAT32:
        return np.where(nan, np.int32(0x7FC00000), bits).view(np.uint8)
    if dtype == BFLOAT16:
        body = _rounded(capped, 16) | (bits >> 16 & 0x8000)
        return np.where(nan, 0x7FC0, body).astype(np.uint16).view(np.uint8)
    small = capped.view(np.float32)
    if dtype == FLOAT16:
        half = small.astype(np.float16).view(np.uint16) | (bits >> 16 & 0x8000)
        return np.where(nan, 0x7E00, half).astype(np.uint16).view(np.uint8)
    normal = _rounded(capped, 20) - (120 << 3)
    steps = np.rint(np.where(finite, small, 0) * np.float32(512)).astype(np.int32)
    body = np.where(magnitude < 0x3C800000, steps, normal) | (bits >> 24 & 0x80)
    return np.where(finite, body, 0x7F).astype(np.uint8)


def scales_of(values: Float32s, dtype: int) -> Float32s:
    """The scale of each row of ``values``, ``[n, elements]``, for ``dtype``: float32 ``[n, 1]``."""
    most = np.where(np.isfinite(values), np.abs(values), np.float32(0)).max(axis=1, keepdims=True)
    scales: Float32s = np.maximum(most / LARGEST[dtype], SMALLEST_SCALE)
    scales[most == 0] = 1
    return scales


def _rounded(bits: Int32s, places: int) -> Int32s:
    return (bits + ((1 << (places - 1)) - 1) + (bits >> places & 1)) >> places


def _float8_values() -> Float32s:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    magnitude[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_FLOAT8 = _float8_values()


def _read(addresses: Int64s, nbytes: int) -> Bytes:
    memory, low = view((addresses, nbytes))
    read: Bytes = memory[(addresses - low)[:, None] + np.arange(nbytes)]
    return read


def _write(addresses: Int64s, made: Bytes, skip: Int64s, lengths: Int64s) -> None:
    memory, low = view((addresses + skip, lengths))
    columns = np.arange(made.shape[1])
    wanted = (columns >= skip[:, None]) & (columns < (skip + lengths)[:, None])
    memory[((addresses - low)[:, None] + columns)[wanted]] = made[wanted]
