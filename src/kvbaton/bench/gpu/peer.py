"""The process that has the destination: its pool is mapped by the source over CUDA IPC, and it serves commands."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvbaton.errors import TransferFailed
from kvbaton.plan import Transfer


class Peer:
    """The destination's process, as the source sees it. Close it, or use it in a ``with``.

    Each command is a method of `_Served`.
    """

    def __init__(self, device: int) -> None:
        from torch import multiprocessing

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()

    def call(self, command: str, *arguments: Any) -> Any:
        """What a command returns. Raises `TransferFailed` where it raised."""
        self._pipe.send((command, arguments))
        if not self._pipe.poll(120):
            raise TransferFailed("the destination's process gave no answer in 120 s")
        worked, value = self._pipe.recv()
        if not worked:
            raise TransferFailed(f"the destination's process: {value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Served:
    def __init__(self, device: int) -> None:
        import torch

        from kvbaton.copy.gpu import Copier

        torch.cuda.set_device(device)
        self._torch, self._device, self._copier = torch, device, Copier(device)
        self._agent: Any = None

    def pool(self, nbytes: int) -> Any:
        """Make the pool; the answer is mapped by the source."""
        self._pool = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=f"cuda:{self._device}")
        self._torch.cuda.synchronize()
        return self._pool

    def empty(self) -> None:
        """Overwrite the pool."""
        self._pool.zero_()
        self._torch.cuda.synchronize()

    def digests(self, transfers: Sequence[Transfer]) -> tuple[list[int], bool]:
        """What came, and whether all else in the pool is still zero; then everything is."""
        from kvbaton.bench.gpu.checks import digests

        found = digests(transfers, "destination", self._pool, empty=True)
        clean = not bool(self._pool.any())
        self.empty()
        return found, clean

    def agent(self, nbytes: int, transfer: Transfer) -> dict[str, Any]:
        """Make a NIXL agent with the pool and a slab registered, for what ``transfer`` brings; how to reach it."""
        from kvbaton.bench.gpu.nixl import make_agent

        self._slab = self._torch.empty(nbytes, dtype=self._torch.uint8, device=f"cuda:{self._device}")
        self._agent = make_agent("destination", [self._pool, self._slab], self._device)
        boxes, bases = transfer.boxes, np.array([self._pool.data_ptr()], np.int64)
        self._tables = boxes.shape, boxes.destination, transfer.destination_units, bases
        return {
            "metadata": self._agent.get_agent_metadata(),
            "pool": self._pool.data_ptr(),
            "slab": self._slab.data_ptr(),
            "device": self._device,
        }

    def end_agent(self) -> None:
        """Forget the agent."""
        self._agent = None
        del self._slab

    def scatter(self, begin: int, nbytes: int) -> None:
        """Spread the slab, which holds the stream from ``begin``, over the rows; returns when that is done."""
        self._copier.scatter(*self._tables, self._slab.data_ptr(), nbytes, begin=begin)
        self._torch.cuda.current_stream().synchronize()


def _serve(pipe: Connection, device: int) -> None:
    served = _Served(device)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(served, command)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = False, f"{type(error).__name__}: {error}"
        pipe.send(answer)
