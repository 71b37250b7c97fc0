"""The other process of the two-process tests: what it does, and how a test starts it."""

import contextlib
import multiprocessing
import os
import threading
import time

import numpy as np

from kvbaton.errors import TransportError
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import create
from kvbaton.transport.conformance.case import CANARY, rows

SPAWN = multiprocessing.get_context("spawn")
ROW = 1 << 20
LIMIT = 30.0


def destination(name, nbytes, connection):
    """Offer memory until told to answer with its content, or killed."""
    transport = create(name, instance="destination")
    memory = SharedMemory(nbytes)
    memory.array[:] = CANARY
    transport.register([Region.of(memory)])
    connection.send(transport.describe())
    with contextlib.suppress(EOFError):
        while connection.recv() == "content":
            connection.send_bytes(memory.array.tobytes())
    transport.close()


def writer(name, nbytes, descriptor, connection):
    """Write to the destination over and over, a new value each time, until it cannot or is killed."""
    transport = create(name, instance="writer")
    memory = SharedMemory(nbytes)
    transport.register([Region.of(memory)])
    connection.send(transport.describe())
    connection.recv()
    peer = transport.connect(descriptor)
    everything = np.arange(nbytes // ROW)
    error = ""
    for ticket in range(1_000_000):
        memory.array[:] = ticket % CANARY
        try:
            transport.write(peer, [rows(ROW, everything, everything)], ticket)
        except TransportError as raised:
            error = str(raised)
            break
        while not (ended := transport.poll()):
            time.sleep(0.0002)
        error = ended[0].error
        if error:
            break
    connection.send(error)
    connection.recv()


@contextlib.contextmanager
def started(function, *arguments):
    """A running process and the connection to it; killed at the end, come what may."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=function, args=(*arguments, there), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()


def eventually(condition):
    """Wait for a condition; whether it came."""
    limit = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
