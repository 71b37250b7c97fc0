"""The other process of the two-process tests of the cuda transport, over a fake device."""

import contextlib
import time

import numpy as np
from fake_memory import DeviceMemory
from peer_process import ROW

from kvbaton.cuda.fake import FakeDriver, FakeMachine
from kvbaton.errors import TransportError
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.cuda.transport import CudaTransport


def destination(nbytes, connection):
    """Offer memory of a device until told to answer with its content, or killed."""
    machine = FakeMachine()
    transport = CudaTransport("destination", driver=FakeDriver(machine))
    memory = DeviceMemory(machine, nbytes)
    memory.fill(CANARY)
    transport.register([memory.region])
    connection.send(transport.describe())
    with contextlib.suppress(EOFError):
        while connection.recv() == "content":
            connection.send_bytes(memory.read().tobytes())
    transport.close()
    memory.close()


def writer(nbytes, descriptor, connection):
    """Write to the destination over and over, a new value each time, until it is killed."""
    machine = FakeMachine()
    transport = CudaTransport("writer", driver=FakeDriver(machine))
    memory = DeviceMemory(machine, nbytes)
    transport.register([memory.region])
    connection.send(transport.describe())
    connection.recv()
    peer = transport.connect(descriptor)
    everything = np.arange(nbytes // ROW)
    with contextlib.suppress(TransportError):
        for ticket in range(1_000_000):
            memory.fill(ticket % CANARY)
            transport.write(peer, [rows(ROW, everything, everything)], ticket)
            while not transport.poll():
                time.sleep(0.0002)
