"""NIXL over UCX: prepared descriptor lists of both pools, one transfer for all pieces of a request.

Run by a Python that has the wheel ``nixl-cu13``. ``UCX_TLS`` comes from the environment. The clock stops when the
source knows that everything is written; that the destination learns of it too is not counted.
"""

from __future__ import annotations

import base64
import os
import sys
from typing import Any

import numpy as np

from .pool import PoolSide
from .side import now, serve

THREADS = int(os.environ.get("NIXL_THREADS", "0"))


def _api() -> Any:
    from nixl_cu13 import _api

    return _api


class NixlSide(PoolSide):
    """An agent with its pool registered."""

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`."""
        api = _api()
        self.make_pool(work)
        self.agent = api.nixl_agent(self.role, api.nixl_agent_config(backends=["UCX"], num_threads=THREADS))
        pool = (self.pool.ctypes.data, self.pool.nbytes, 0, "")
        self.agent.register_memory(self.agent.get_reg_descs([pool], "DRAM"))
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.pool.ctypes.data}

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`: the source prepares the descriptors of every row of both pools."""
        if self.role != "source":
            return
        peer = self.agent.add_remote_agent(base64.b64decode(card["metadata"]))
        self.here = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(self.pool.ctypes.data), "DRAM")
        self.there = self.agent.prep_xfer_dlist(peer, self._rows(card["address"]), "DRAM")
        self.source = self.work.indices("source").astype(np.int32)
        self.destination = self.work.indices("destination").astype(np.int32)

    def _rows(self, base: int) -> Any:
        descriptors = np.empty((self.work.pool_bytes // self.work.piece, 3), np.uint64)
        descriptors[:, 0] = np.uint64(base) + np.arange(len(descriptors), dtype=np.uint64) * np.uint64(self.work.piece)
        descriptors[:, 1] = self.work.piece
        descriptors[:, 2] = 0
        return descriptors

    def run(self) -> dict[str, float]:
        """As `Side.run`."""
        started = now()
        handle = self.agent.make_prepped_xfer("WRITE", self.here, self.source, self.there, self.destination)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        ended = now()
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        return {"started": started, "ended": ended}


if __name__ == "__main__":
    serve(NixlSide(sys.argv[-1]))
