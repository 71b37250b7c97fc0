"""Mooncake's transfer engine over TCP: batched writes, as large as its queue takes them.

Run by a Python that has the wheel ``mooncake-transfer-engine-non-cuda``. Without ``MC_TCP_*`` its TCP transport refuses
more than about 2,048 blocks at once; the parent raises those limits, and a batch holds ``MOONCAKE_BATCH`` blocks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .pool import PoolSide
from .side import now, serve

BATCH = int(os.environ.get("MOONCAKE_BATCH", "32768"))


class MooncakeSide(PoolSide):
    """An engine with its pool registered."""

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`."""
        from mooncake.engine import TransferEngine

        self.make_pool(work)
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine cannot be initialised over tcp")
        if self.engine.register_memory(self.pool.ctypes.data, self.pool.nbytes):
            raise RuntimeError("the pool cannot be registered")
        return {"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.pool.ctypes.data}

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`. The addresses are computed here: an engine that is used well has them at hand."""
        self.peer = str(card["name"])
        if self.role == "source":
            piece = self.work.piece
            self.here = (self.pool.ctypes.data + self.work.indices("source") * piece).tolist()
            self.there = (int(card["address"]) + self.work.indices("destination") * piece).tolist()
            self.sizes = [piece] * self.work.pieces

    def run(self) -> dict[str, float]:
        """As `Side.run`."""
        started = now()
        for first in range(0, self.work.pieces, BATCH):
            part = slice(first, first + BATCH)
            code = self.engine.batch_transfer_sync_write(self.peer, self.here[part], self.there[part], self.sizes[part])
            if code:
                raise RuntimeError(f"batch_transfer_sync_write returned {code}")
        return {"started": started, "ended": now()}


if __name__ == "__main__":
    serve(MooncakeSide(sys.argv[-1]))
