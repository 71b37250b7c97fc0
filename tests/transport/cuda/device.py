"""A real device: memory for the conformance suite, the other process of tests, and the skip where there is none."""

import contextlib
import time

import numpy as np
import pytest
from peer_process import ROW

from kvbaton.errors import TransportError
from kvbaton.memory import Region
from kvbaton.transport.conformance import Memory
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.cuda.transport import CudaTransport


def why_not():
    """Why nothing can run on a device here; empty if it can."""
    try:
        import torch
        import triton
    except ImportError as error:
        return f"needs torch and Triton: {error}"
    return "" if triton and torch.cuda.device_count() else "needs a GPU"


needs_device = pytest.mark.skipif(bool(why_not()), reason=why_not())


def count():
    """How many devices there are."""
    if why_not():
        return 0
    import torch

    return torch.cuda.device_count()


class TorchMemory(Memory):
    """Memory of torch's caching allocator: a part of a larger allocation."""

    def __init__(self, nbytes, device=0):
        import torch

        self.tensor = torch.zeros(nbytes + 512, dtype=torch.uint8, device=f"cuda:{device}")[512:]
        torch.cuda.synchronize()
        self.region = Region.of(self.tensor)

    def read(self):
        return self.tensor.cpu().numpy()

    def fill(self, content):
        import torch

        if isinstance(content, np.ndarray):
            self.tensor.copy_(torch.from_numpy(content))
        else:
            self.tensor.fill_(content)
        torch.cuda.synchronize()

    def close(self):
        self.tensor = None


def destination(nbytes, connection, device=0, name="destination"):
    """Offer memory of a device until told to answer with its content, or killed."""
    transport = CudaTransport(name)
    memory = TorchMemory(nbytes, device)
    memory.fill(CANARY)
    transport.register([memory.region])
    connection.send(transport.describe())
    with contextlib.suppress(EOFError):
        while connection.recv() == "content":
            connection.send_bytes(memory.read().tobytes())
    transport.close()


def writer(nbytes, descriptor, connection, device=0):
    """Write to the destination over and over, a new value each time, until it cannot or is killed."""
    transport = CudaTransport("writer")
    memory = TorchMemory(nbytes, device)
    transport.register([memory.region])
    connection.send(transport.describe())
    connection.recv()
    peer = transport.connect(descriptor)
    everything = np.arange(nbytes // ROW)
    ticket = 0
    with contextlib.suppress(TransportError):
        while True:
            memory.fill(ticket % CANARY)
            # Several at a time: the device is never idle when this process is killed.
            tickets = range(ticket, ticket + 8)
            for each in tickets:
                transport.write(peer, [rows(ROW, everything, everything)], each)
            ticket += 8
            ended = 0
            while ended < 8:
                ended += len(transport.poll())
                time.sleep(0.0001)


def blind(descriptor, connection):
    """Say why a device that this process does not see cannot be written to."""
    transport = CudaTransport("blind")
    memory = TorchMemory(ROW)
    transport.register([memory.region])
    try:
        transport.connect(descriptor)
    except TransportError as error:
        connection.send(str(error))
    connection.recv()


def expandable(connection):
    """Say what a peer is told of memory that cannot be exported, and whether it can be read from."""
    import torch

    transport = CudaTransport("expandable")
    memory = TorchMemory(64 << 20)
    assert torch.cuda.memory._snapshot()["segments"][0]["is_expandable"]
    transport.register([memory.region])
    connection.send(transport.describe())
    descriptor = connection.recv()
    memory.fill(7)
    peer = transport.connect(descriptor)
    transport.write(peer, [rows(4096, np.arange(16), np.arange(16))], 1)
    while not (ended := transport.poll()):
        time.sleep(0.001)
    connection.send(ended[0].error)
    connection.recv()
