"""The other process of the tests of the mori fabric."""

import contextlib

import numpy as np

from kvbaton.errors import TransportError
from kvbaton.memory import Region
from kvbaton.transport import create
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric.mori.adapter import MoriFabric

ROW = 1 << 20


def transport(instance, executor, options):
    return create("mori", instance=instance, options={"executor": executor, **options})


def destination(executor, options, nbytes, connection):
    """Offer memory until told to answer with its content, to be fenced, or killed."""
    here = transport("destination", executor, options)
    memory = np.full(nbytes, CANARY, np.uint8)
    here.register([Region.of(memory)])
    connection.send(here.describe())
    with contextlib.suppress(EOFError):
        while connection.recv() == "content":
            connection.send_bytes(memory.tobytes())
    here.close()


def writer(executor, options, nbytes, descriptor, connection):
    """Write over and over, a new value each time, until it cannot or is killed."""
    here = transport("writer", executor, options)
    memory = np.zeros(nbytes, np.uint8)
    here.register([Region.of(memory)])
    connection.send(here.describe())
    connection.recv()
    peer = here.connect(descriptor)
    everything = np.arange(nbytes // ROW)
    for ticket in range(1_000_000):
        memory[:] = ticket % CANARY
        try:
            here.write(peer, [rows(ROW, everything, everything)], ticket)
        except TransportError as error:
            connection.send(str(error))
            return
        while not (ended := here.poll()):
            pass
        if ended[0].error:
            connection.send(ended[0].error)
            return


def fabric(options, nbytes, connection):
    """Offer memory by the fabric alone; answers "content" and, with "give up", deregisters the memory."""
    here = MoriFabric("destination", options)
    memory = np.full(nbytes, CANARY, np.uint8)
    here.register([Region.of(memory)])
    connection.send(here.describe())
    with contextlib.suppress(EOFError):
        while (word := connection.recv()) != "end":
            if word == "give up":
                engine = here._engine
                engine.engine.deregister_memory(engine.memories.pop())
            connection.send_bytes(memory.tobytes())
    here.close()


def taken_port(port, connection):
    """Whether a port that is taken is refused, rather than the end of this process."""
    try:
        MoriFabric("one", {"port": str(port)})
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send("it was made")
