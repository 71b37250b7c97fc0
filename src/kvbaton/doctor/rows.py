"""What the doctor writes: contiguous rows of host memory, from one place to the same place at the peer."""

from __future__ import annotations

import numpy as np

from kvbaton.devices import Choice, Devices
from kvbaton.plan.boxes import Boxes, Transfer

MEMORY_BYTES = 128 << 20
"""The memory that each side of a measurement gives to it: more than the caches of most processors hold."""
ROW_BYTES = 64 << 10


def near_host_memory() -> Choice:
    """The network devices for it."""
    return Devices.find(nvidia_smi="").choose()


def rows_transfer(nbytes: int, row_bytes: int = ROW_BYTES) -> Transfer:
    """The first ``nbytes`` bytes of region 0, in rows."""
    side = np.array([[0, 0, row_bytes, 1, 0, 0, 0]], np.int64)
    units = np.arange(nbytes // row_bytes, dtype=np.int64)
    return Transfer(Boxes(np.array([[1, 1, row_bytes]], np.int64), side, side.copy()), units, units)
