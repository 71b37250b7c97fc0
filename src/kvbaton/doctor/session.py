"""``python -m kvbaton.doctor.session DESCRIPTOR``: one visit of a doctor that measures, on the side that is measured.

The number is that of a connected socket which this process inherited. All that the visitor can write to is memory that
was made for the visit.
"""

from __future__ import annotations

import contextlib
import platform
import select
import socket
import sys
import time
import uuid
import zlib

from kvbaton.doctor import wire
from kvbaton.doctor.libraries import library_versions
from kvbaton.doctor.rows import MEMORY_BYTES, near_host_memory
from kvbaton.errors import KVBatonError, ProtocolError
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import NAMES, Transport, create

TURN_SECONDS = 0.02
"""How often transports are polled while nothing is said."""
IDLE_SECONDS = 30.0
"""How long a visitor may say nothing: others wait for its place. Who measures says something after each phase."""


class Visit:
    """The transports that the visitor has too, and one region for all of them."""

    def __init__(self, sock: socket.socket, wanted: tuple[str, ...]) -> None:
        self.memory = SharedMemory(MEMORY_BYTES)
        self.transports: dict[str, Transport] = {}
        self.missing: dict[str, str] = {}
        # The address that the visitor reached is one that it can reach.
        bind, instance = sock.getsockname()[0], f"doctor-{uuid.uuid4().hex}"
        for name in wanted:
            if name not in NAMES:
                self.missing[name] = "this release does not have it"
                continue
            try:
                transport = create(name, instance=instance, bind=bind, near=near_host_memory)
                self.transports[name] = transport
                transport.register([Region.of(self.memory)])
            except KVBatonError as error:
                self.missing[name] = str(error)[:2000]

    def offers(self) -> wire.Offers:
        """What the visitor may try."""
        descriptors: dict[str, bytes] = {}
        for name, transport in self.transports.items():
            if name not in self.missing:
                descriptors[name] = transport.describe()
        return wire.Offers(wire.VERSION, platform.node(), library_versions(), descriptors, self.missing)

    def answer(self, message: wire.Message) -> wire.Answer:
        """The answer to one request. Raises `ProtocolError` for what is none."""
        if isinstance(message, wire.Ping):
            return wire.Answer()
        if isinstance(message, wire.Check):
            return wire.Answer(checksum=zlib.crc32(self.memory.array.data))
        if not isinstance(message, wire.Admit):
            raise ProtocolError(f"a {type(message).__name__} came in the middle of a visit")
        transport = self.transports.get(message.transport)
        if transport is None:
            return wire.Answer(f"transport {message.transport!r} was not offered")
        try:
            transport.admit(message.descriptor)
        except KVBatonError as error:
            return wire.Answer(str(error)[:2000])
        return wire.Answer()

    def close(self) -> None:
        """End the transports."""
        for transport in self.transports.values():
            transport.close()
        self.memory.close()


def serve_visit(sock: socket.socket) -> None:
    """Answer until the visitor hangs up. Raises `ProtocolError` for what no doctor says, or nothing, or ``OSError``."""
    greeting = wire.expect(sock, wire.Greeting)
    if greeting.version != wire.VERSION:
        wire.send(sock, wire.Offers(wire.VERSION, platform.node(), library_versions(), {}, {}))
        return
    visit = Visit(sock, greeting.transports)
    try:
        wire.send(sock, visit.offers())
        give_up = time.monotonic() + IDLE_SECONDS
        while True:
            readable, _, _ = select.select([sock], [], [], TURN_SECONDS)
            for transport in visit.transports.values():
                transport.poll()
            if not readable:
                if time.monotonic() > give_up:
                    raise ProtocolError(f"the visitor said nothing for {IDLE_SECONDS:g} s")
                continue
            message = wire.receive(sock)
            if message is None:
                return
            wire.send(sock, visit.answer(message))
            give_up = time.monotonic() + IDLE_SECONDS
    finally:
        visit.close()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as visitor, contextlib.suppress(OSError):
        try:
            serve_visit(visitor)
        except KVBatonError as error:
            sys.exit(str(error))
