"""The logical content of a model: a number for each element, and the bits that a sender stores for it."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

from kvbaton.check.formats import FORMATS, sign_bit
from kvbaton.layout import DTYPE_BYTES, TOKEN, Axis

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_USUAL = {"float32": (119, 16), "bfloat16": (119, 16)}
"""The least of the usual exponents of formats that have many, and how many of them are usual: a power of two."""


@functools.lru_cache(1 << 10)
def constant(name: str) -> np.uint64:
    """The share that ``name`` has in the number of an element; for an axis it is multiplied by the index."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    made: np.uint64 = np.uint64(int.from_bytes(digest, "little") | 1)
    return made


def mixed(numbers: UInt64s) -> UInt64s:
    """The number of each element from the sum of its shares."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))


@functools.lru_cache(1 << 10)
def indices_of(axes: tuple[Axis, ...]) -> dict[str, Int64s]:
    """The global index along each axis but that of tokens, of each element that a rank holds of one entry."""
    held = {
        axis.name: np.concatenate([np.arange(start, start + count) for start, count in axis.spans])
        for axis in axes
        if axis.name != TOKEN
    }
    grids = np.meshgrid(*held.values(), indexing="ij")
    return {name: grid.reshape(-1) for name, grid in zip(held, grids, strict=True)}


def codes_of(numbers: UInt64s, dtype: str, *, scale: bool = False) -> UInt64s:
    """The bits that stand for elements, as integers: any at all, but often zero where casts know ``dtype``.

    Of formats with many exponents most elements have a usual one. Every ``scale`` is positive or zero; every other one
    of them is a power of two.
    """
    if dtype not in FORMATS:
        return numbers
    codes, chance = numbers & np.uint64((2 << sign_bit(dtype)) - 1), numbers >> np.uint64(60)
    if dtype in _USUAL:
        fraction = np.uint64(FORMATS[dtype][1])
        least, count = map(np.uint64, _USUAL[dtype])
        exponents = (np.uint64(0xFF) << fraction) & ~((count - np.uint64(1)) << fraction)
        usual = (codes & ~exponents) + (least << fraction)
        codes = np.where((chance >= 2) | scale, usual, codes)
    if scale:
        codes &= np.where(chance % 2 == 0, np.uint64(0x7F800000), np.uint64(0x7FFFFFFF))
    return np.asarray(np.where(chance == 0, codes & np.uint64(1 << sign_bit(dtype)), codes))


def bytes_of(codes: UInt64s, dtype: str) -> Bytes:
    """The bytes ``[..., byte]`` of elements as they lie in memory."""
    little = np.ascontiguousarray(codes, dtype="<u8")
    return little.view(np.uint8).reshape(*codes.shape, 8)[..., : DTYPE_BYTES[dtype]]
