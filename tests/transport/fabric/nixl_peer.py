"""The other process of the tests of NIXL: what it does, and how a test starts it."""

import contextlib
import itertools
import mmap
import multiprocessing
import os
import signal
import time

import numpy as np

from kvbaton.memory import Region
from kvbaton.transport import create
from kvbaton.transport.conformance.case import rows
from kvbaton.transport.fabric.base import Writes
from kvbaton.transport.fabric.nixl.adapter import NixlFabric

SPAWN = multiprocessing.get_context("spawn")
CANARY = 251
SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
LIMIT = 300.0 if os.environ.get("RDMA_VM") else 30.0


def destination(nbytes, connection):
    """Offer one region until told otherwise: "content", "revoke" (let go of the library and of the memory), "bye"."""
    memory = mmap.mmap(-1, nbytes)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = CANARY
    fabric = NixlFabric("destination")
    fabric.register([Region.of(array)])
    connection.send_bytes(fabric.describe())
    with contextlib.suppress(EOFError):
        while (wanted := connection.recv()) != "bye":
            if wanted == "content":
                connection.send_bytes(array.tobytes())
            if wanted == "revoke":
                fabric.close()
                del array
                memory.close()
                connection.send("revoked")
    fabric.close()


def stuck_writer(nbytes, descriptor, destination_pid, connection):
    """Write to a process that was stopped, let go of it, have it go on; say what was told of that."""
    memory = mmap.mmap(-1, nbytes)
    fabric = NixlFabric("writer")
    fabric.register([Region.of(np.frombuffer(memory, dtype=np.uint8))])
    peer = fabric.connect(descriptor, "destination")
    os.kill(destination_pid, signal.SIGSTOP)
    for handle in range(8):
        fabric.post(peer, pieces(np.arange(nbytes // 4096), 4096), handle)
    clean = fabric.disconnect(peer)
    early = fabric.poll()
    # Only now may the library get done with what it has.
    os.kill(destination_pid, signal.SIGCONT)
    late = []
    limit = time.monotonic() + 20
    while len(early) + len(late) < 8 and time.monotonic() < limit:
        late += fabric.poll()
    connection.send((clean, [handle for handle, _ in early], [handle for handle, _ in late]))
    fabric.close()
    memory.close()


def leaving_writer(nbytes, descriptor, destination_pid, connection):
    """Write to a process that was stopped; free the memory all the same; end in the ordinary way."""
    memory = mmap.mmap(-1, nbytes)
    fabric = NixlFabric("writer")
    fabric.register([Region.of(np.frombuffer(memory, dtype=np.uint8))])
    peer = fabric.connect(descriptor, "destination")
    os.kill(destination_pid, signal.SIGSTOP)
    for handle in range(8):
        fabric.post(peer, pieces(np.arange(nbytes // 4096), 4096), handle)
    fabric.disconnect(peer)
    fabric.close()
    memory.close()
    connection.send("freed")


def transport_destination(executor, nbytes, connection):
    """Offer memory over the whole transport until killed."""
    transport = create("nixl", instance="destination", options={"executor": executor, **SMALL})
    array = np.full(nbytes, CANARY, dtype=np.uint8)
    transport.register([Region.of(array)])
    connection.send_bytes(transport.describe())
    connection.recv()


def transport_writer(executor, nbytes, descriptor, connection):
    """Write over the whole transport again and again, a new value each time, until killed."""
    transport = create("nixl", instance="writer", options={"executor": executor, **SMALL})
    array = np.zeros(nbytes, dtype=np.uint8)
    transport.register([Region.of(array)])
    connection.send_bytes(transport.describe())
    peer = transport.connect(descriptor)
    everything = np.arange(nbytes // 4096)
    for ticket in itertools.count():
        array[:] = ticket % CANARY
        transport.write(peer, [rows(4096, everything, everything)], ticket)
        while not transport.poll():
            time.sleep(0.0002)


def pieces(numbers, size, remote=None, stride=None):
    """Writes of ``size`` bytes each: the pieces ``numbers`` of this side to ``remote`` of the other."""
    numbers = np.asarray(numbers, dtype=np.int64)
    remote = numbers if remote is None else np.asarray(remote, dtype=np.int64)
    return Writes(0, 0, numbers * size, remote * (stride or size), np.full(len(numbers), size, dtype=np.int64))


def collect(fabric, count):
    """Poll until ``count`` handles ended; a dict of their errors. Fails if one ends twice, or too few do in time."""
    ended = {}
    limit = time.monotonic() + LIMIT
    while len(ended) < count:
        assert time.monotonic() < limit, f"{len(ended)} of {count} handles ended in {LIMIT} s"
        for handle, error in fabric.poll():
            assert handle not in ended, f"handle {handle} was reported twice"
            ended[handle] = error
        fabric.wait(1e-3)
    return ended


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


def receive(connection):
    """What the other process says next."""
    assert connection.poll(LIMIT), "the other process did not answer"
    return connection.recv_bytes()
