"""A pool in ordinary memory, for contenders that ask for no kind of their own (huge pages where numpy gets them)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .side import Side
from .work import Bytes, Work


class PoolSide(Side):
    """A side with a pool in ordinary memory. The destination's is emptied before each run, out of its time."""

    work: Work
    pool: Bytes

    def __init__(self, role: str) -> None:
        self.role = role

    def make_pool(self, work: dict[str, Any]) -> None:
        """Allocate the pool, and touch every page of it."""
        self.work = Work.read(work)
        self.pool = np.empty(self.work.pool_bytes, np.uint8)
        if self.role == "source":
            self.work.fill(self.pool)
        else:
            self.pool[:] = 0

    def arm(self) -> None:
        """As `Side.arm`."""
        self.pool[:] = 0

    def checksum(self) -> int:
        """As `Side.checksum`."""
        return self.work.checksum(self.pool, self.role)
