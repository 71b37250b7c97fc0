"""The other process of the tests of Mooncake: an engine with two regions, and what it is told to do with them."""

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport import create
from kvbaton.transport.conformance.case import rows
from kvbaton.transport.fabric.base import Writes
from kvbaton.transport.fabric.mooncake.adapter import MooncakeFabric
from kvbaton.transport.fabric.mooncake.engine import library

SPAWN = multiprocessing.get_context("spawn")
CANARY = 0xEE
# Nothing is quick in the virtual machine that has RDMA.
LIMIT = 240.0 if os.environ.get("RDMA_VM") else 60.0
ROW = 1 << 20
SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
TCP = {"protocol": "tcp"}
PLACES = {
    "tcp": ("127.0.0.1", TCP),
    "rxe0": ("10.77.0.1", {"protocol": "rdma", "devices": "rxe0"}),
    "rxe1": ("10.77.0.2", {"protocol": "rdma", "devices": "rxe1"}),
}
"""Where a process is: the address, and the options of its engine."""

try:
    library()
    MISSING = ""
except TransportUnavailable as error:
    MISSING = f"{error}; make setup-fabrics does that"


def engine(instance, place="tcp"):
    bind, options = PLACES[place]
    return MooncakeFabric(instance, bind, options=options)


def owner(nbytes, place, connection):
    """Offer two regions of ``nbytes`` each; answer with content, take memory away and back, until killed."""
    memory = [np.full(nbytes, CANARY, np.uint8) for _ in range(2)]
    fabric = engine("owner", place)
    fabric.register([Region.of(array) for array in memory])
    connection.send((fabric.describe(), fabric._engine.get_rpc_port()))
    with contextlib.suppress(EOFError):
        while True:
            command, region = connection.recv()
            address = memory[region].ctypes.data
            if command == "content":
                connection.send_bytes(memory[region].tobytes())
            elif command == "take away":
                connection.send(fabric._engine.unregister_memory(address))
            elif command == "give back":
                connection.send(fabric._engine.register_memory(address, nbytes))


class Owner:
    """A running `owner`."""

    def __init__(self, nbytes, place="tcp"):
        self.connection, there = SPAWN.Pipe()
        self.process = SPAWN.Process(target=owner, args=(nbytes, place, there), daemon=True)
        self.process.start()
        there.close()
        self.descriptor, self.port = self.answer()

    def answer(self):
        assert self.connection.poll(LIMIT), "the other process did not answer"
        return self.connection.recv()

    def ask(self, command, region=0):
        self.connection.send((command, region))
        return self.answer()

    def content(self, region=0):
        self.connection.send(("content", region))
        assert self.connection.poll(LIMIT), "the other process did not answer"
        return np.frombuffer(self.connection.recv_bytes(), np.uint8)

    def signal(self, number):
        """Send a signal that stops it or lets it go on, and wait until that is so."""
        os.kill(self.process.pid, number)
        stat = Path(f"/proc/{self.process.pid}/stat")
        stopped = number == 19
        assert eventually(lambda: (stat.read_text().rpartition(")")[2].split()[0] == "T") == stopped)

    def kill(self):
        self.process.kill()
        self.process.join()
        self.connection.close()


class Relay:
    """Passes what comes to its own port on to ``port``, one exchange of a handshake at a time."""

    def __enter__(self):
        self.port = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                with caller, socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT) as called:
                    back = threading.Thread(target=copy, args=(called, caller))
                    back.start()
                    copy(caller, called)
                    back.join()

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


def copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def pieces(local, remote, nbytes, region=0):
    """Writes of ``nbytes`` each from and to the numbered places of that size."""
    local, remote = np.asarray(local, np.int64), np.asarray(remote, np.int64)
    return Writes(region, region, local * nbytes, remote * nbytes, np.full(len(local), nbytes, np.int64))


def finish(fabric, *handles):
    """Poll until those handles ended, each once; their errors."""
    ended = {}
    limit = time.monotonic() + LIMIT
    while not ended.keys() >= set(handles):
        assert time.monotonic() < limit, f"handles {set(handles) - ended.keys()} did not end"
        for handle, error in fabric.poll():
            assert handle not in ended, f"handle {handle} was reported twice"
            ended[handle] = error
        fabric.wait(1e-3)
    assert ended.keys() == set(handles)
    return [ended[handle] for handle in handles]


def eventually(condition):
    limit = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def transport(executor, instance, place="tcp"):
    bind, options = PLACES[place]
    return create("mooncake", instance=instance, bind=bind, options=options | SMALL | {"executor": executor})


def destination(executor, nbytes, place, connection):
    """Offer memory until told to answer with its content, or killed."""
    here = transport(executor, "destination", place)
    memory = np.full(nbytes, CANARY, np.uint8)
    here.register([Region.of(memory)])
    connection.send(here.describe())
    with contextlib.suppress(EOFError):
        while connection.recv() == "content":
            connection.send_bytes(memory.tobytes())
    here.close()


def writer(executor, nbytes, descriptor, connection):
    """Write to the destination over and over, a new value each time, until it cannot or is killed."""
    here = transport(executor, "writer")
    memory = np.zeros(nbytes, np.uint8)
    here.register([Region.of(memory)])
    connection.send(here.describe())
    connection.recv()
    peer = here.connect(descriptor)
    everything = np.arange(nbytes // ROW)
    ended = []
    for ticket in range(1_000_000):
        memory[:] = ticket % CANARY
        try:
            here.write(peer, [rows(ROW, everything, everything)], ticket)
        except TransportError as raised:
            ended = [(ticket, str(raised))]
        while not ended:
            time.sleep(0.0002)
            ended = here.poll()
        if ended[0][1]:
            break
        ended = []
    connection.send(ended[0][1])
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


def receive(connection):
    assert connection.poll(LIMIT), "the other process did not answer"
    return connection.recv()
