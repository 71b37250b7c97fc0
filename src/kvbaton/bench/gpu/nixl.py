"""NIXL between the two processes: every piece by itself, and packed into a slab by our kernels."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import torch

from kvbaton.bench.gpu.contenders import Pools, pieces_of
from kvbaton.bench.gpu.peer import Peer
from kvbaton.copy.gpu import Copier
from kvbaton.errors import TransferFailed, TransportUnavailable

MOST_PIECES = 16384
"""Its cost is that of the pieces: more of them say the same."""
SLAB_BYTES = 4 << 30


def make_agent(name: str, memory: list[torch.Tensor], device: int) -> Any:
    """An agent with this memory registered. Raises `TransportUnavailable` where NIXL is not installed."""
    try:
        api = importlib.import_module("nixl_cu13._api")
    except ImportError as error:
        raise TransportUnavailable(f"NIXL cannot be imported: {error}; make setup-fabrics installs it") from error
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    regions = [(each.data_ptr(), each.nbytes, device, "") for each in memory]
    agent.register_memory(agent.get_reg_descs(regions, "VRAM"))
    return agent


class Nixl:
    """Both agents, connected."""

    def __init__(self, pools: Pools, peer: Peer) -> None:
        self._pools, self._peer = pools, peer
        nbytes = min(SLAB_BYTES, pools.case.nbytes)
        (transfers,) = pools.case.transfers
        self._card = peer.call("agent", nbytes, transfers[0])
        self._slab = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{pools.device}")
        self._agent = make_agent("source", [*pools.sources, self._slab], pools.device)
        self._remote = self._agent.add_remote_agent(self._card["metadata"])

    def direct(self) -> tuple[float, int]:
        """Write the pieces one by one, as many of them as that takes a bearable time; seconds and bytes."""
        sources, places, sizes = (each[:MOST_PIECES] for each in pieces_of(self._pools))
        here = self._list(sources, sizes, self._pools.device, "NIXL_INIT_AGENT")
        there = self._list(places + self._card["pool"], sizes, self._card["device"], self._remote)
        order = np.arange(len(sizes), dtype=np.int32)
        started = time.perf_counter()
        self._write(here, order, there, order)
        return time.perf_counter() - started, int(sizes.sum())

    def packed(self, copier: Copier) -> float:
        """Gather into a slab, write it, and scatter it there; seconds.

        One after the other: two processes on one GPU take turns at it, they do not share it.
        """
        ((transfer,),) = self._pools.case.transfers
        boxes, bases = transfer.boxes, self._pools.bases[0]
        here = self._list([self._slab.data_ptr()], self._slab.nbytes, self._pools.device, "NIXL_INIT_AGENT")
        there = self._list([self._card["slab"]], self._slab.nbytes, self._card["device"], self._remote)
        one = np.zeros(1, np.int32)
        size = self._slab.nbytes // boxes.bytes_per_unit * boxes.bytes_per_unit
        started = time.perf_counter()
        for begin in range(0, transfer.nbytes, size):
            take = min(size, transfer.nbytes - begin)
            at = self._slab.data_ptr()
            copier.gather(boxes.shape, boxes.source, transfer.source_units, bases, at, take, begin=begin)
            torch.cuda.current_stream().synchronize()
            self._write(here, one, there, one)
            self._peer.call("scatter", begin, take)
        return time.perf_counter() - started

    def close(self) -> None:
        """Forget both agents."""
        self._agent.remove_remote_agent(self._remote)
        self._peer.call("end_agent")

    def _list(self, addresses: Any, sizes: Any, device: int, agent: Any) -> Any:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
        return self._agent.prep_xfer_dlist(agent, rows, "VRAM")

    def _write(self, here: Any, at: Any, there: Any, to: Any) -> None:
        handle = self._agent.make_prepped_xfer("WRITE", here, at, there, to)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise TransferFailed(f"NIXL: the transfer ended as {state}")
