"""What the machine can do: a straight copy into the other process's memory, and one TCP stream between the two.

The bytes lie one after the other on both sides; only their number is that of the work.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
import zlib
from typing import Any

import numpy as np

from kvbaton.memory import AttachedMemory, SharedMemory, SharedMemoryKey

from .side import Side, now, serve
from .work import Work

RECEIVE = 1 << 20


class FloorSide(Side):
    """A contiguous buffer of the work's bytes in shared memory."""

    def __init__(self, role: str) -> None:
        self.role = role

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`."""
        self.memory = SharedMemory(Work.read(work).nbytes)
        if self.role == "source":
            self.memory.array[:] = np.random.default_rng(3).integers(1, 256, self.memory.nbytes, dtype=np.uint8)
        else:
            self.memory.array[:] = 0
        return {"key": list(self.memory.key)}

    def arm(self) -> None:
        """As `Side.arm`."""
        self.memory.array[:] = 0

    def checksum(self) -> int:
        """As `Side.checksum`."""
        return zlib.crc32(self.memory.array.data)


class CopySide(FloorSide):
    """libc's memcpy by ``threads`` threads, into the destination's memory."""

    def __init__(self, role: str, threads: int) -> None:
        super().__init__(role)
        self.threads = threads
        self.memcpy = ctypes.CDLL(None).memcpy
        self.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.memcpy.restype = ctypes.c_void_p

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`."""
        if self.role == "source":
            self.there = AttachedMemory(SharedMemoryKey(*card["key"]))

    def run(self) -> dict[str, float]:
        """As `Side.run`. The threads are there before the clock starts."""
        nbytes = self.memory.nbytes
        bounds = [nbytes * part // self.threads for part in range(self.threads + 1)]
        gate = threading.Barrier(self.threads)

        def copy(part: int) -> None:
            gate.wait()
            first, last = bounds[part : part + 2]
            self.memcpy(self.there.address + first, self.memory.address + first, last - first)

        others = [threading.Thread(target=copy, args=(part,)) for part in range(1, self.threads)]
        for thread in others:
            thread.start()
        while gate.n_waiting < self.threads - 1:
            pass
        started = now()
        copy(0)
        for thread in others:
            thread.join()
        return {"started": started, "ended": now()}


class SocketSide(FloorSide):
    """One TCP stream over loopback, ``sendall`` to ``recv_into``."""

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`."""
        card = super().prepare(work)
        if self.role == "destination":
            self.listener = socket.create_server(("127.0.0.1", 0))
            card["port"] = self.listener.getsockname()[1]
        return card

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`."""
        if self.role == "source":
            self.socket = socket.create_connection(("127.0.0.1", card["port"]))
        else:
            self.socket, _ = self.listener.accept()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def arm(self) -> None:
        """As `Side.arm`: a thread waits for the bytes."""
        super().arm()
        self.seen = 0.0
        self.thread = threading.Thread(target=self._receive)
        self.thread.start()

    def _receive(self) -> None:
        view, got = self.memory.array.data, 0
        while got < len(view):
            read = self.socket.recv_into(view[got : got + RECEIVE])
            if not read:
                return
            got += read
        self.seen = now()

    def run(self) -> dict[str, float]:
        """As `Side.run`."""
        started = now()
        self.socket.sendall(self.memory.array.data)
        return {"started": started, "ended": now()}

    def arrived(self) -> float | None:
        """As `Side.arrived`."""
        self.thread.join()
        if not self.seen:
            raise RuntimeError("the stream ended early")
        return self.seen


def side_of(kind: str, role: str) -> Side:
    """``kind`` is "memcpy1", "memcpy2" or "socket"."""
    return SocketSide(role) if kind == "socket" else CopySide(role, int(kind.removeprefix("memcpy")))


if __name__ == "__main__":
    serve(side_of(sys.argv[-2], sys.argv[-1]))
