"""What processes of the tests of NIXL do: where their ends are, and what an owner of memory is told."""

import mmap
import os
import signal
import time

import numpy as np
from owner_process import pieces

from kvbaton.memory import Region
from kvbaton.transport import create
from kvbaton.transport.fabric.nixl.adapter import NixlFabric

SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
PLACES = {"any": {}, "rxe0": {"devices": "rxe0:1"}, "rxe1": {"devices": "rxe1:1"}}
"""Where a process is: the options of its agent."""


def engine(instance, place="any"):
    return NixlFabric(instance, options=PLACES[place])


def transport(executor, instance, place="any"):
    return create("nixl", instance=instance, options=PLACES[place] | SMALL | {"executor": executor})


def take_away(fabric, region):
    """For an owner: let go of the library; it has no other way."""
    fabric.close()


def stuck_writer(nbytes, descriptor, destination_pid, connection):
    """Write to a process that was stopped, let go of it, have it go on; say what was told of that."""
    memory = mmap.mmap(-1, nbytes)
    fabric = NixlFabric("writer")
    fabric.register([Region.of(np.frombuffer(memory, dtype=np.uint8))])
    peer = fabric.connect(descriptor, "destination")
    everything = np.arange(nbytes // 4096)
    os.kill(destination_pid, signal.SIGSTOP)
    for handle in range(8):
        fabric.post(peer, pieces(everything, everything, 4096), handle)
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
    everything = np.arange(nbytes // 4096)
    os.kill(destination_pid, signal.SIGSTOP)
    for handle in range(8):
        fabric.post(peer, pieces(everything, everything, 4096), handle)
    fabric.disconnect(peer)
    fabric.close()
    memory.close()
    connection.send("freed")
