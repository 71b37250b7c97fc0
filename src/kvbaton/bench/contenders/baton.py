"""kvbaton: a `Manager` on each side, one room for each run."""

from __future__ import annotations

import sys
import time
from typing import Any

from kvbaton import Component, Manager, RankLayout, Region, SharedMemory, Status
from kvbaton.layout import PAGED, TOKEN, Axis, Tensor
from kvbaton.registry.server import RegistryServer

from .side import Side, now, serve
from .work import LAYERS, Work


class BatonSide(Side):
    """A rank of the prefill (source) or the decode side (destination)."""

    def __init__(self, role: str, transport: str, digest: bool = False) -> None:
        self.role = role
        self.digest = digest
        self.transport = transport
        self.room = 0

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`. The source brings the registry."""
        self.work = Work.read(work)
        self.memory = SharedMemory(self.work.pool_bytes)
        self.rows = self.work.chosen(self.role)
        if self.role != "source":
            self.memory.array[:] = 0
            return {}
        self.work.fill(self.memory.array)
        self.server = RegistryServer("127.0.0.1", 0)
        self.server.__enter__()
        self._make_manager("prefill", self.server.url)
        return {"registry": self.server.url}

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`."""
        if self.role != "source":
            self._make_manager("decode", card["registry"])

    def _make_manager(self, role: Any, registry: str) -> None:
        layout = layout_of(self.work)
        self.manager = Manager(
            layout, [Region.of(self.memory)], role=role, registry=registry, transports=[self.transport]
        )

    def arm(self) -> None:
        """As `Side.arm`."""
        self.memory.array[:] = 0
        self.room += 1
        self.receiver = self.manager.receiver(self.room, digest=self.digest)
        self.receiver.offer({"kv": self.rows}, tokens=self.work.pages)

    def run(self) -> dict[str, float]:
        """As `Side.run`. ``returned`` is when the call gave the engine's thread back."""
        self.room += 1
        started = now()
        sender = self.manager.sender(self.room)
        sender.finish({"kv": self.rows}, tokens=(0, self.work.pages))
        returned = now()
        while not sender.poll().terminal:
            time.sleep(0.0002)
        ended = now()
        if sender.poll() is not Status.SUCCESS:
            raise RuntimeError(f"the room ended as {sender.poll().value}: {sender.reason}")
        sender.close()
        return {"started": started, "returned": returned, "ended": ended}

    def arrived(self) -> float | None:
        """As `Side.arrived`."""
        while not self.receiver.poll().terminal:
            time.sleep(0.0002)
        seen = now()
        if self.receiver.poll() is not Status.SUCCESS:
            raise RuntimeError(f"the room ended as {self.receiver.poll().value}: {self.receiver.reason}")
        self.receiver.close()
        return seen

    def checksum(self) -> int:
        """As `Side.checksum`."""
        return self.work.checksum(self.memory.array, self.role)


def layout_of(work: Work) -> RankLayout:
    """Pages of one token: each is a separate piece in every tensor."""
    axes = (Axis(TOKEN, 1, work.piece, ((0, 1),)), Axis("byte", work.piece, 1, ((0, work.piece),)))
    tensors = tuple(
        Tensor(role, layer, 0, (2 * layer + index) * work.rows * work.piece, work.rows, work.piece, "uint8", axes)
        for layer in range(LAYERS)
        for index, role in enumerate(("key", "value"))
    )
    return RankLayout((Component("kv", PAGED, tensors, 1),))


if __name__ == "__main__":
    serve(BatonSide(sys.argv[-1], sys.argv[1], "digest" in sys.argv))
