"""Memory of a fake device, for the conformance suite and other tests."""

from kvbaton.memory import Region
from kvbaton.transport.conformance import Memory


class DeviceMemory(Memory):
    """``nbytes`` bytes of a device of ``machine``."""

    def __init__(self, machine, nbytes, device=0, *, exportable=True):
        self.machine = machine
        self.base = machine.allocate(nbytes, device, exportable=exportable)
        self.region = Region(self.base, nbytes, "cuda", device=device)

    def read(self):
        return self.machine.array(self.base).copy()

    def fill(self, content):
        self.machine.array(self.base)[:] = content

    def close(self):
        self.machine.free(self.base)
