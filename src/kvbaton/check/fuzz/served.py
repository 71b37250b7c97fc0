"""``python -m kvbaton.check.fuzz.served``: a process with every port that kvbaton opens, for fuzzers to talk to.

Two pairs of ranks hand requests over, by tcp and by the memory fabric, when they are told to: whatever strangers say
at the ports, that must work, and leave nothing behind. Says where it listens as one line of JSON, and then answers each
line on its standard input with another one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvbaton.doctor import DoctorServer
from kvbaton.layout import RankLayout, paged_kv, required_bytes
from kvbaton.memory import Region, SharedMemory
from kvbaton.registry.metrics_port import metrics_port
from kvbaton.registry.server import RegistryServer
from kvbaton.runtime.manager import Manager
from kvbaton.runtime.settings import Settings
from kvbaton.transport import create
from kvbaton.transport.fabric import side
from kvbaton.transport.tcp_wire import decode_descriptor

PAGES, PAGE = 16, 4
CANARY, GUARD, REGION = 0xA5, 1 << 14, 1 << 14
SECONDS = 10.0
"""How long a hand-over may take."""
FABRIC = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "64KiB", "executor": "packed"}


class Where(msgspec.Struct):
    """A data port: where it is, the token that it wants, and who listens there."""

    port: int
    token: bytes
    instance: str


class Served(msgspec.Struct):
    """Where everything listens, on 127.0.0.1."""

    control: int
    registry: int
    metrics: int
    doctor: int
    tcp: Where
    memory: Where
    strangers: tuple[int, int]
    """The data ports of the decode ranks, by tcp and by the memory fabric: who has no token talks to those."""


class State(msgspec.Struct):
    """What the process has, and what went wrong in it."""

    memory: int
    descriptors: int
    threads: int
    faults: int
    harmed: bool
    """Whether a byte was written that is in no registered region."""


class Pair:
    """A prefill and a decode rank, and the rows of a request."""

    def __init__(self, transport: str, registry: str) -> None:
        self.layout = RankLayout(
            (paged_kv(layers=range(2), rows=PAGES, page_size=PAGE, heads=2, head_dim=8, dtype="float32"),)
        )
        nbytes = required_bytes(self.layout.components)[0]
        self._memories = [SharedMemory(nbytes) for _ in range(2)]
        options = FABRIC if transport == "memory" else None
        self.transports = [create(transport, instance=uuid.uuid4().hex, options=options) for _ in range(2)]
        settings = Settings(heartbeat_seconds=0.5, peer_timeout_seconds=2.0, registry_heartbeat_seconds=0.5)
        self.prefill, self.decode = (
            Manager(
                self.layout,
                [Region.of(memory)],
                role=role,  # type: ignore[arg-type]
                registry=registry,
                deployment=transport,
                transports=[each],
                settings=settings,
            )
            for role, memory, each in zip(("prefill", "decode"), self._memories, self.transports, strict=True)
        )
        self._rooms = itertools.count(1)

    def hand_over(self) -> str:
        """Hand one request over; empty if every byte arrived, and no other one changed."""
        room = next(self._rooms)
        source, target = (memory.array for memory in self._memories)
        source[:] = np.random.default_rng(room).integers(0, 200, len(source), np.uint8)
        target[:] = 0xEE
        count = PAGES // 2
        sender, receiver = self.prefill.sender(room), self.decode.receiver(room)
        receiver.offer({"kv": np.arange(count)}, count * PAGE)
        sender.finish({"kv": np.arange(count, 2 * count)}, (0, count * PAGE))
        limit = time.monotonic() + SECONDS
        while not (sender.rows_released and receiver.rows_released) and time.monotonic() < limit:
            time.sleep(0.0005)
        states = [f"{each.poll().name} {each.reason}".strip() for each in (sender, receiver)]
        sender.close()
        receiver.close()
        if states != ["SUCCESS", "SUCCESS"]:
            return "; ".join(states)
        for tensor in self.layout.components[0].tensors:
            pages = [
                array[tensor.offset : tensor.offset + PAGES * tensor.row_stride].reshape(PAGES, -1)
                for array in (source, target)
            ]
            if not np.array_equal(pages[0][count:], pages[1][:count]) or (pages[1][count:] != 0xEE).any():
                return "bytes differ"
        return ""

    @property
    def faults(self) -> int:
        """Errors of our own that the control threads survived."""
        return sum(manager.faults for manager in (self.prefill, self.decode))

    def close(self) -> None:
        """End both ranks."""
        self.decode.close()
        self.prefill.close()


class Target:
    """A transport whose token is told to fuzzers: they may write into its region, and nowhere else."""

    def __init__(self, transport: str) -> None:
        options = FABRIC if transport == "memory" else None
        self.transport = create(transport, instance=uuid.uuid4().hex, options=options)
        self._memory = np.full(REGION + 2 * GUARD, CANARY, np.uint8)
        self.transport.register([Region.of(self._memory[GUARD:-GUARD])])

    @property
    def harmed(self) -> bool:
        """Whether a byte beside the region was written."""
        return bool((self._memory[:GUARD] != CANARY).any() or (self._memory[-GUARD:] != CANARY).any())


class Server:
    """All of it."""

    def __init__(self) -> None:
        self._registry = RegistryServer()
        self._registry.start()
        self._stack = contextlib.ExitStack()
        self._metrics = self._stack.enter_context(metrics_port(self._registry.app, "127.0.0.1", 0))
        self._doctor = DoctorServer("127.0.0.1:0")
        threading.Thread(target=self._doctor.run, daemon=True).start()
        self._pairs = {name: Pair(name, self._registry.url) for name in ("tcp", "memory")}
        self._targets = {name: Target(name) for name in ("tcp", "memory")}

    def where(self) -> Served:
        """See `Served`."""
        tcp = decode_descriptor(self._targets["tcp"].transport.describe())
        fabric = side.decode_descriptor(self._targets["memory"].transport.describe(), "memory")
        strangers = (
            decode_descriptor(self._pairs["tcp"].transports[1].describe()).port,
            side.decode_descriptor(self._pairs["memory"].transports[1].describe(), "memory").port,
        )
        return Served(
            control=int(self._pairs["tcp"].prefill.endpoint.rsplit(":", 1)[1]),
            registry=self._registry.port,
            metrics=self._metrics,
            doctor=self._doctor.address.port or 0,
            tcp=Where(tcp.port, tcp.token, tcp.instance),
            memory=Where(fabric.port, fabric.token, fabric.instance),
            strangers=strangers,
        )

    def answer(self, line: str) -> Any:
        """The answer to one line."""
        if line == "state":
            return self._state()
        return self._pairs[line].hand_over()

    def _state(self) -> State:
        gc.collect()
        return State(
            memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            faults=sum(pair.faults for pair in self._pairs.values()),
            harmed=any(target.harmed for target in self._targets.values()),
        )

    def close(self) -> None:
        """End all of it."""
        for pair in self._pairs.values():
            pair.close()
        for target in self._targets.values():
            target.transport.close()
        self._doctor.close()
        self._stack.close()
        self._registry.stop()


def main() -> None:
    """Serve until the standard input ends."""
    server = Server()
    for answer in itertools.chain([server.where()], (server.answer(line.strip()) for line in sys.stdin)):
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()
    server.close()


if __name__ == "__main__":
    main()
