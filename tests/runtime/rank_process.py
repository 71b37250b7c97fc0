"""One rank in a process of its own, driven by lines on its standard input; each answer is one line.

python rank_process.py ROLE REGISTRY TRANSPORT SCALE [TP_RANK TP_SIZE]

``RANK_OPTIONS`` in the environment is a JSON object: ``cables`` puts the rank's ports behind proxies that `cut` cuts,
``limits`` are settings of the manager; the others are arguments of it.
``SCALE`` multiplies the width of the cache, so that a transfer takes long enough to be interrupted. With a TP rank the
cache is a latent that every rank holds whole, and prefill ranks share the work by stripes.
"""

import json
import os
import sys
import threading
import time

import numpy as np

import kvbaton as kb
from kvbaton.check.soak.cables import CabledRegistry, Cables
from kvbaton.layout import build
from kvbaton.runtime.transports import instance_of
from kvbaton.transport import create

PAGE, ROWS = 16, 64


def make_layout(scale, tp):
    if tp is not None:
        latent = build.mla_latent(
            "kv", layers=range(4), rows=ROWS, page_size=PAGE, latent_dim=32 * scale, dtype="float32"
        )
        return kb.RankLayout((latent,), kb.Coords(tp=tp))
    part = build.paged_kv(layers=range(4), rows=ROWS, page_size=PAGE, heads=2, head_dim=8 * scale, dtype="float32")
    return kb.RankLayout((part,))


def content(rank_pages, seed, nbytes):
    """The bytes of one tensor's pages; a page depends on its place in the request, not on its row."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 200, (rank_pages, nbytes), np.uint8)


class Driver:
    def __init__(self, role, registry, transport, scale, tp=None, *, cables=False, limits=None, **options):
        self.layout = make_layout(scale, tp)
        self.tensors = self.layout.components[0].tensors
        self.page_bytes = self.tensors[0].row_stride
        self.memory = kb.SharedMemory(build.required_bytes(self.layout.components)[0])
        self.memory.array[:] = 0xEE
        settings = kb.Settings(
            **{
                "heartbeat_seconds": 0.2,
                "peer_timeout_seconds": 1.0,
                "connect_seconds": 0.5,
                "registry_heartbeat_seconds": 0.5,
                "striped": tp is not None,
                **(limits or {}),
            }
        )
        region = kb.Region.of(self.memory)
        self.cables = Cables()
        if cables:
            registry = CabledRegistry(registry, self.cables)
            transport = self.cables.front(create(transport, instance=instance_of([transport])))
        self.manager = kb.Manager(
            self.layout, [region], role=role, registry=registry, transports=[transport], settings=settings, **options
        )
        self.rooms = {}

    def pages(self, tensor):
        at = tensor.offset
        return self.memory.array[at : at + ROWS * self.page_bytes].reshape(ROWS, self.page_bytes)

    def send(self, room, count):
        """Offer the first ``count`` rows as one chunk and finish."""
        for index, tensor in enumerate(self.tensors):
            self.pages(tensor)[:count] = content(count, room * 100 + index, self.page_bytes)
        sender = self.rooms[room] = self.manager.sender(room)
        sender.finish({"kv": np.arange(count)}, (0, count * PAGE))
        return "sent"

    def send_chunk(self, room, count):
        """Offer the first ``count`` rows as one chunk, and leave the room unfinished."""
        for index, tensor in enumerate(self.tensors):
            self.pages(tensor)[:count] = index
        sender = self.rooms[room] = self.manager.sender(room)
        sender.send({"kv": np.arange(count)}, (0, count * PAGE))
        return "sent"

    def receive(self, room, count):
        """Ask for ``count`` pages, into the last rows in falling order."""
        receiver = self.rooms[room] = self.manager.receiver(room)
        receiver.offer({"kv": np.arange(ROWS - 1, ROWS - 1 - count, -1)}, count * PAGE)
        return "offered"

    def receive_at(self, room, count, port):
        """As `receive`, from the prefill ranks of another registry."""
        receiver = self.rooms[room] = self.manager.receiver(room, f"http://127.0.0.1:{port}")
        receiver.offer({"kv": np.arange(ROWS - 1, ROWS - 1 - count, -1)}, count * PAGE)
        return "offered"

    def check(self, room, count):
        """Whether exactly the pages of the room have arrived, since the last `wipe`."""
        for index, tensor in enumerate(self.tensors):
            expected = np.full((ROWS, self.page_bytes), 0xEE, np.uint8)
            expected[ROWS - count :] = content(count, room * 100 + index, self.page_bytes)[::-1]
            if not (self.pages(tensor) == expected).all():
                return f"tensor {index} differs"
        return "same"

    def wipe(self):
        self.memory.array[:] = 0xEE
        return "wiped"

    def over(self, room):
        """Wait for the room's end."""
        while not self.rooms[room].poll().terminal:
            time.sleep(0.001)
        return f"{self.rooms[room].poll().name} {self.rooms[room].reason}".replace("\n", " ")

    def moving(self, room):
        """Wait until the first bytes have landed here."""
        tensor = self.tensors[0]
        while (self.pages(tensor)[ROWS - 1] == 0xEE).all():
            time.sleep(0.0002)
        return "moving"

    def strike(self, pid, number):
        """As soon as the first bytes have landed here, send a signal to the process that writes them.

        Answers whether the write was caught in the middle.
        """
        pages = [self.pages(tensor) for tensor in self.tensors]
        while all((each[:, 0] == 0xEE).all() for each in pages):
            pass
        os.kill(pid, number)
        return "middle" if any((each[:, -1] == 0xEE).all() for each in pages) else "late"

    def abort_when_moving(self, room):
        """As soon as the first bytes have landed here, abort the room; answers as `strike` does."""
        pages = [self.pages(tensor) for tensor in self.tensors]
        while all((each[:, 0] == 0xEE).all() for each in pages):
            pass
        self.rooms[room].abort()
        return "middle" if any((each[:, -1] == 0xEE).all() for each in pages) else "late"

    def abort(self, room):
        self.rooms[room].abort()
        return "aborted"

    def transferring(self, room):
        while self.rooms[room].poll() is kb.Status.WAITING:
            time.sleep(0.001)
        return self.rooms[room].poll().name

    def released(self, room):
        while not self.rooms[room].rows_released:
            time.sleep(0.001)
        return "released"

    def is_released(self, room):
        return str(self.rooms[room].rows_released)

    def close(self, room):
        self.rooms.pop(room).close()
        return "closed"

    def cut(self, inwards, outwards):
        """Cut the cables, in these directions."""
        self.cables.hold(inwards=bool(inwards), outwards=bool(outwards))
        return "cut"

    def reset(self):
        """Break every connection."""
        self.cables.reset()
        return "broken"

    def heal(self):
        self.cables.heal()
        return "healed"

    def fenced(self):
        """Wait until nothing is kept for a lost prefill rank."""
        sources = self.manager.side._sources
        while len(sources._lost) or sources._source_of_peer:
            time.sleep(0.001)
        return "fenced"

    def alone(self):
        """Wait until no decode rank is joined, nor let go of."""
        destinations = self.manager.side._destinations
        while destinations._joined or destinations._leaving:
            time.sleep(0.001)
        return "alone"

    def kept(self):
        """What is kept: tables, and open descriptors of the process."""
        done = threading.Event()
        # Behind everything that was asked for before.
        self.manager._control.post(done.set)
        done.wait(10)
        side = self.manager.side
        sizes = {name: size for name, size in side.core.table_sizes().items() if size}
        return f"{sizes} {len(side.rooms)} {len(os.listdir('/proc/self/fd'))}"


def main():
    role, registry, transport, scale, *tp = sys.argv[1:]
    options = json.loads(os.environ.get("RANK_OPTIONS", "{}"))
    driver = Driver(role, registry, transport, int(scale), tuple(map(int, tp)) or None, **options)
    print("ready", flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(getattr(driver, name)(*map(int, numbers)), flush=True)
    driver.manager.close()


if __name__ == "__main__":
    main()
