"""The other process of the two-process tests: what it does, and how a test starts it.

A process makes its transport by a ``make`` that it is given, called with the instance id: a function of a module, or a
`functools.partial` of one.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from kvbaton.errors import TransportError
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import create
from kvbaton.transport.conformance.case import CANARY, rows

SPAWN = multiprocessing.get_context("spawn")
ROW = 1 << 20
# Nothing is quick in the virtual machine that has RDMA.
LIMIT = 300.0 if os.environ.get("RDMA_VM") else 60.0


def named(name, instance, **keywords):
    """The transport of that name, for a `functools.partial`."""
    return create(name, instance=instance, **keywords)


def destination(make, nbytes, connection, name="destination"):
    """Offer memory until told to answer with its content, or killed."""
    transport = make(name)
    memory = SharedMemory(nbytes)
    memory.array[:] = CANARY
    transport.register([Region.of(memory)])
    connection.send(transport.describe())
    with contextlib.suppress(EOFError):
        while connection.recv() == "content":
            connection.send_bytes(memory.array.tobytes())
    transport.close()


def writer(make, nbytes, descriptor, connection):
    """Write to the destination over and over, a new value each time, until it cannot or is killed."""
    transport = make("writer")
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
def started(function, *arguments, **keywords):
    """A running process and the connection to it; killed at the end, come what may."""
    here, there = SPAWN.Pipe()
    keywords["connection"] = there
    process = SPAWN.Process(target=function, args=arguments, kwargs=keywords, daemon=True)
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
    return connection.recv()


def content(connection):
    """What is in the memory of a `destination` now."""
    connection.send("content")
    assert connection.poll(LIMIT), "the other process did not answer"
    return np.frombuffer(connection.recv_bytes(), dtype=np.uint8)


def stand_still(process):
    """Stop a process, and wait until it stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    assert eventually(lambda: _state(process) == "T"), "the other process does not stop"


def go_on(process):
    """Have a process that was stopped go on, and wait until it does."""
    os.kill(process.pid, signal.SIGCONT)
    assert eventually(lambda: _state(process) != "T"), "the other process does not go on"


def _state(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


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
