"""``python -m kvbaton.doctor.attempt NAME``: one transport writes some bytes from itself to itself, in this process.

A process of its own, since a vendor's library may end it, or never return. Prints one line of JSON: an `Attempt`.
"""

from __future__ import annotations

import sys
import time
import uuid

import msgspec
import numpy as np

from kvbaton.doctor.findings import Attempt
from kvbaton.doctor.rows import near_host_memory, rows_transfer
from kvbaton.errors import KVBatonError, TransportError, TransportUnavailable
from kvbaton.transport import Transport, create
from kvbaton.transport.conformance import Memory
from kvbaton.transport.conformance.device import suitable_memory

SECONDS = 10.0
NBYTES = 1 << 20


def attempt(name: str) -> Attempt:
    """Make two transports of that name and have one write to the other. Never raises what kvbaton raises on purpose."""
    writer = destination = None
    content = np.arange(NBYTES // 4, dtype=np.uint32).view(np.uint8)
    memories: list[Memory] = []
    try:
        writer = create(name, instance=f"doctor-{uuid.uuid4().hex}", near=near_host_memory)
        destination = create(name, instance=f"doctor-{uuid.uuid4().hex}", near=near_host_memory)
        make = suitable_memory(writer.capabilities)
        memories += [source := make(NBYTES, True), target := make(NBYTES, True)]
        source.fill(content)
        writer.register([source.region])
        destination.register([target.region])
        destination.admit(writer.describe())
        write_all(writer, destination)
    except TransportUnavailable as error:
        return Attempt(name, "missing", str(error))
    except KVBatonError as error:
        return Attempt(name, "fails", str(error))
    else:
        arrived = bool(np.array_equal(target.read(), content))
        can = writer.capabilities
        return Attempt(
            name,
            "works" if arrived else "fails",
            "" if arrived else "a write ended without an error, but its bytes are not all there",
            can.mapped,
            can.cross_host,
            can.cross_process,
            tuple(sorted(can.memory_kinds)),
        )
    finally:
        for transport in (writer, destination):
            if transport is not None:
                transport.close()
        for memory in memories:
            memory.close()


def write_all(writer: Transport, destination: Transport) -> None:
    """One write of all memory. Raises `TransportError` if it fails or does not end."""
    peer = writer.connect(destination.describe())
    writer.write(peer, [rows_transfer(NBYTES)], 1)
    give_up = time.monotonic() + SECONDS
    while not (ended := writer.poll()):
        destination.poll()
        if time.monotonic() > give_up:
            raise TransportError(f"a write of {NBYTES} bytes did not end within {SECONDS:g} s")
        time.sleep(0.001)
    if ended[0].error:
        raise TransportError(ended[0].error)
    writer.disconnect(peer)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(attempt(sys.argv[1])).decode() + "\n")
