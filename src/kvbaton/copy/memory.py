"""Raw memory as one numpy array, for the fallback."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvbaton.plan.boxes import Int64s

Bytes = npt.NDArray[np.uint8]

INDEX_ELEMENTS = 1 << 20
"""How many byte indices are made at a time: it bounds the memory of one call to some 16 MiB a side."""


def view(*pieces: tuple[Int64s, Int64s | int]) -> tuple[Bytes, int]:
    """Return one array over everything between the lowest and the highest of ``(addresses, lengths)``, and its address.

    Only the bytes that are indexed are touched.
    """
    low = min(int(addresses.min()) for addresses, _ in pieces)
    high = max(int((addresses + lengths).max()) for addresses, lengths in pieces)
    memory: Bytes = np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), dtype=np.uint8)
    return memory, low
