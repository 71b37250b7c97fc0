"""The other process of the tests of a library: it owns memory, and does what it is told with its end of the fabric."""

import contextlib
import mmap
import time

import numpy as np
from peer_process import LIMIT, receive, started

from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY
from kvbaton.transport.fabric.base import Writes


def owner(make, nbytes, connection):
    """Offer two regions of ``nbytes`` each, by the fabric that ``make`` makes; answer until killed.

    It is told "content" and the number of a region, or a function, which is called with the fabric and the memory.
    """
    memory = [mmap.mmap(-1, nbytes) for _ in range(2)]
    for one in memory:
        one[:] = bytes([CANARY]) * nbytes
    fabric = make("owner")
    fabric.register([Region.of(np.frombuffer(one, dtype=np.uint8)) for one in memory])
    connection.send(fabric.describe())
    with contextlib.suppress(EOFError):
        while True:
            what, *arguments = connection.recv()
            if what == "content":
                connection.send_bytes(memory[arguments[0]][:])
            else:
                connection.send(what(fabric, *arguments))


class Owner:
    """A running `owner`. Used as a context, it is killed at the end."""

    def __init__(self, make, nbytes):
        self._running = started(owner, make, nbytes)
        self.process, self.connection = self._running.__enter__()
        try:
            self.descriptor = receive(self.connection)
        except BaseException:
            self.kill()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.kill()

    def ask(self, function, *arguments):
        """What ``function`` gives there, called with the fabric and ``arguments``."""
        self.connection.send((function, *arguments))
        return receive(self.connection)

    def content(self, region=0):
        """What is in a region now."""
        self.connection.send(("content", region))
        assert self.connection.poll(LIMIT), "the other process did not answer"
        return np.frombuffer(self.connection.recv_bytes(), np.uint8)

    def kill(self):
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None


def pieces(local, remote, nbytes, region=0, stride=None):
    """Writes of ``nbytes`` each from and to the numbered places, which are ``stride`` apart on the other side."""
    local, remote = np.asarray(local, np.int64), np.asarray(remote, np.int64)
    return Writes(region, region, local * nbytes, remote * (stride or nbytes), np.full(len(local), nbytes, np.int64))


def finish(fabric, *handles):
    """Poll until those handles ended, each once, and no others; their errors."""
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
