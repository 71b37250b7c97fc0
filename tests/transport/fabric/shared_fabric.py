"""A fabric between processes of this host, in shared memory."""

import numpy as np

from kvbaton.copy import copy_boxes
from kvbaton.memory import AttachedMemory, Region, SharedMemory, SharedMemoryKey
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport.fabric.base import Ended, Fabric, FabricLimits, FabricPeer
from kvbaton.transport.fabric.transport import FabricTransport

OPTIONS = {"slabs": "8", "staging_slabs": "4", "slab_bytes": "256KiB"}


class SharedPeer(FabricPeer):
    def __init__(self, name, mapped):
        super().__init__(name)
        self.mapped = mapped
        self.bases = np.array([memory.address for memory in mapped])


class SharedFabric(Fabric):
    """Maps what the peer registered, all of which is shared memory; copies a write in each poll, like a slow library.

    It never finds out by itself that a peer is dead.
    """

    name = "memory"
    memory_kinds = frozenset({"host"})
    cross_host = False
    limits = FabricLimits(writes=1000, posts=16)

    def __init__(self):
        self.posts = []
        self.cancelled = []

    def register(self, regions):
        self.regions = regions
        self.bases = np.array([region.address for region in regions])

    def describe(self):
        return repr([tuple(region.shared.key) for region in self.regions]).encode()

    def connect(self, descriptor, name):
        keys = [SharedMemoryKey(*key) for key in eval(descriptor.decode())]
        return SharedPeer(name, [AttachedMemory(key) for key in keys])

    def post(self, peer, writes, handle):
        self.posts.append((peer, writes, handle))

    def poll(self):
        cancelled, self.cancelled = self.cancelled, []
        if not self.posts:
            return cancelled
        peer, writes, handle = self.posts.pop(0)
        count = len(writes.lengths)
        sides = [np.zeros((count, 7), dtype=np.int64) for _ in range(2)]
        for side, region, offsets in zip(
            sides,
            (writes.local_region, writes.remote_region),
            (writes.local_offsets, writes.remote_offsets),
            strict=True,
        ):
            side[:, 0], side[:, 1], side[:, 3] = region, offsets, 1
        shape = np.stack([np.ones(count, np.int64), np.ones(count, np.int64), writes.lengths], axis=1)
        one = np.zeros(1, dtype=np.int64)
        copy_boxes(Transfer(Boxes(shape, *sides), one, one), self.bases, peer.bases)
        return [*cancelled, Ended(handle)]

    def disconnect(self, peer):
        mine = [post for post in self.posts if post[0] is peer]
        self.posts = [post for post in self.posts if post[0] is not peer]
        self.cancelled += [Ended(handle, "disconnected") for _, _, handle in mine]
        for memory in peer.mapped:
            memory.close()
        peer.mapped = []
        return True

    def close(self):
        self.posts = []


def shared(nbytes):
    return Region.of(SharedMemory(nbytes))


def end(executor, name):
    return FabricTransport(name, SharedFabric(), options={**OPTIONS, "executor": executor}, allocate=shared)
