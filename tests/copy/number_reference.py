"""What a cast must give, worked out the slow way: look for the nearest number among all that a dtype has.

Shares nothing with the kernels. torch only says what the bits of each dtype stand for.
"""

import numpy as np
import torch

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
NUMBER = {dtype: number for number, dtype in enumerate(DTYPES, 1)}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
LARGEST = {dtype: torch.finfo(getattr(torch, dtype)).max for dtype in DTYPES}
NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00, "float8_e4m3fn": 0x7F}
WORD = {4: np.uint32, 2: np.uint16, 1: np.uint8}


def values(dtype, stored):
    """What the bytes of ``stored`` stand for, as float64."""
    tensor = torch.from_numpy(np.ascontiguousarray(stored)).view(getattr(torch, dtype))
    return tensor.to(torch.float64).numpy().reshape(*stored.shape[:-1], -1)


def _table(dtype):
    """All finite numbers of a dtype from 0 up, and their codes, in order."""
    size = ITEMSIZE[dtype]
    codes = np.arange(1 << (8 * size - 1)).astype(WORD[size])
    numbers = values(dtype, codes.view(np.uint8)[None])[0]
    finite = np.isfinite(numbers)
    return numbers[finite], codes[finite]


TABLES = {dtype: _table(dtype) for dtype in DTYPES[1:]}


def stored(dtype, wanted):
    """The bytes of float32 ``wanted`` in ``dtype``: nearest, ties to even, saturating, with one NaN."""
    if dtype == "float32":
        words = np.where(np.isnan(wanted), NAN[dtype], wanted.astype(np.float32).view(np.uint32)).astype(np.uint32)
        return words.view(np.uint8)
    numbers, codes = TABLES[dtype]
    magnitude = np.abs(wanted.astype(np.float64))
    above = np.clip(np.searchsorted(numbers, np.nan_to_num(magnitude, nan=0, posinf=0)), 1, len(numbers) - 1)
    low, high = magnitude - numbers[above - 1], numbers[above] - magnitude
    up = (high < low) | ((high == low) & (codes[above] % 2 == 0))
    code = codes[np.where(up, above, above - 1)].astype(np.uint32)
    if dtype == "float8_e4m3fn":
        code = np.where(np.isinf(magnitude), NAN[dtype], code)
    else:
        code = np.where(np.isinf(magnitude), codes[-1] + np.uint32(1), code)
    size = ITEMSIZE[dtype]
    negative = np.signbit(wanted) & ~(np.isinf(magnitude) & (dtype == "float8_e4m3fn"))
    code = code | (negative.astype(np.uint32) << (8 * size - 1))
    return np.where(np.isnan(wanted), NAN[dtype], code).astype(WORD[size]).view(np.uint8)


def scale(dtype, wanted):
    """The scale of one block of float32 values, for ``dtype``."""
    finite = np.abs(wanted[np.isfinite(wanted)])
    most = finite.max() if finite.size else np.float32(0)
    if most == 0:
        return np.float32(1)
    return max(np.float32(most / np.float32(LARGEST[dtype])), np.float32(2.0**-126))
