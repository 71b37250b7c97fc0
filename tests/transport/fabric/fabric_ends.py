"""What the tests of the fabric transport share: a connected writer and destination whose fabric can be broken."""

import numpy as np
from peer_process import eventually

from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport

SMALL = {"slabs": "8", "staging_slabs": "2", "slab_bytes": "64KiB"}
MIB = 1 << 20


def let_go(fabric, peer):
    """Whether the library gets done with a peer."""
    return eventually(lambda: fabric.disconnect(peer))


class Ends:
    """A writer and a destination of ``nbytes`` each."""

    numbers = iter(range(1_000_000))

    def __init__(self, executor, nbytes=MIB, limits=None, theirs=None, **options):
        number = next(self.numbers)
        self.names = f"writer-{number}", f"destination-{number}"
        self.fabrics = [MemoryFabric(name, limits=limits) for name in self.names]
        settings = {**SMALL, **options}
        self.writer, self.destination = (
            FabricTransport(name, fabric, options={**settings, "executor": chosen})
            for name, fabric, chosen in zip(self.names, self.fabrics, (executor, theirs or executor), strict=True)
        )
        self.source = np.random.default_rng(1).integers(0, CANARY, nbytes, dtype=np.uint8)
        self.target = np.full(nbytes, CANARY, dtype=np.uint8)
        self.writer.register([Region.of(self.source)])
        self.destination.register([Region.of(self.target)])
        self.ended = {}

    def connect(self):
        self.peer = self.writer.connect(self.destination.describe())
        self.destination.admit(self.writer.describe())
        return self

    def write(self, ticket, nbytes=MIB):
        everything = np.arange(nbytes // 4096)
        self.writer.write(self.peer, [rows(4096, everything, everything)], ticket)

    def stick(self, *, stubborn=False):
        """Post a write that never ends, as ticket 1."""
        faults = self.fabrics[0].faults
        faults.stuck, faults.stubborn = True, stubborn
        self.write(1)
        assert eventually(lambda: self.fabrics[0]._posts)

    def collect(self):
        for ticket, error in self.writer.poll():
            assert ticket not in self.ended
            self.ended[ticket] = error
        return self.ended

    def errors(self, *tickets):
        assert eventually(lambda: set(tickets) <= set(self.collect())), f"{tickets} of {self.ended}"
        return [self.ended[ticket] for ticket in tickets]

    def close(self):
        for fabric in self.fabrics:
            fabric.faults.stuck = False
        self.writer.close()
        self.destination.close()
        assert not [misuse for fabric in self.fabrics for misuse in fabric.misuses]
