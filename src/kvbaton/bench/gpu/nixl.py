"""NIXL between the two processes: every piece by itself, and packed into slabs by our kernels."""

from __future__ import annotations

import importlib
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from kvbaton.bench.gpu.contenders import Pools, pieces_of
from kvbaton.bench.gpu.peer import Peer
from kvbaton.copy.gpu import Copier
from kvbaton.errors import TransferFailed, TransportUnavailable

MOST_PIECES = 16384
"""Its cost is that of the pieces: more of them say the same."""
SLABS, SLAB_BYTES = 4, 32 << 20


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
        self._card = peer.call("agent", SLABS, SLAB_BYTES)
        self._slabs = torch.empty(SLABS * SLAB_BYTES, dtype=torch.uint8, device=f"cuda:{pools.device}")
        self._agent = make_agent("source", [*pools.sources, self._slabs], pools.device)
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
        """Gather, write and scatter, slab by slab, each while the others go on; seconds."""
        here = self._list(self._slab_addresses(self._slabs.data_ptr()), None, self._pools.device, "NIXL_INIT_AGENT")
        there = self._list(self._slab_addresses(self._card["slabs"]), None, self._card["device"], self._remote)
        ((transfer,),) = self._pools.case.transfers
        boxes = transfer.boxes
        self._peer.call("expect", boxes.shape, boxes.destination, transfer.destination_units)
        nbytes, unit = transfer.nbytes, boxes.bytes_per_unit
        size = SLAB_BYTES // unit * unit
        ready: deque[tuple[int, int, int, Any]] = deque()
        free, scattering, begin = list(range(SLABS)), 0, 0
        torch.cuda.synchronize()
        started = time.perf_counter()
        while begin < nbytes or ready or scattering:
            while begin < nbytes and free:
                slab, take = free.pop(0), min(size, nbytes - begin)
                at = self._slabs.data_ptr() + slab * SLAB_BYTES
                copier.gather(
                    boxes.shape, boxes.source, transfer.source_units, self._pools.bases[0], at, take, begin=begin
                )
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                ready.append((slab, begin, take, event))
                begin += take
            if ready:
                slab, first, take, event = ready.popleft()
                event.synchronize()
                one = np.array([slab], np.int32)
                self._write(here, one, there, one)
                self._peer.ask("scatter", slab, first, take)
                scattering += 1
            while scattering and (self._peer.answered() or not (ready or (begin < nbytes and free))):
                free.append(self._peer.answer())
                scattering -= 1
        return time.perf_counter() - started

    def close(self) -> None:
        """Forget both agents."""
        self._agent.remove_remote_agent(self._remote)
        self._peer.call("end_agent")

    def _slab_addresses(self, base: int) -> Any:
        return base + np.arange(SLABS, dtype=np.int64) * SLAB_BYTES

    def _list(self, addresses: Any, sizes: Any, device: int, agent: Any) -> Any:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, SLAB_BYTES if sizes is None else sizes, device
        return self._agent.prep_xfer_dlist(agent, rows, "VRAM")

    def _write(self, here: Any, at: Any, there: Any, to: Any) -> None:
        handle = self._agent.make_prepped_xfer("WRITE", here, at, there, to)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise TransferFailed(f"NIXL: the transfer ended as {state}")
