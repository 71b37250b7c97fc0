"""``python -m kvbaton.doctor.measure HOST:PORT NAMES``: the way to a machine on which ``kvbaton doctor --serve`` runs.

A process of its own, since a vendor's library may end it, or never return. After each step it prints all that is known
as one line of JSON, a `PeerReport`: whoever ends it has that.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from kvbaton.address import Endpoint
from kvbaton.doctor import wire
from kvbaton.doctor.findings import Measured, PeerReport
from kvbaton.doctor.rows import MEMORY_BYTES, near_host_memory, rows_transfer
from kvbaton.doctor.serve import DEFAULT_PORT
from kvbaton.errors import KVBatonError, ProtocolError, TransportError, TransportUnavailable
from kvbaton.memory import Region, SharedMemory
from kvbaton.plan.boxes import Transfer
from kvbaton.secret import Secret
from kvbaton.transport import RemotePeer, Transport, create

CONNECT_SECONDS = 5.0
PINGS = 50
SMALL_BYTES = 4096
ROUND_TRIPS = 200
PHASE_SECONDS = 1.0
"""How long one transport's small writes, and then its large ones, are repeated at most."""
WRITE_SECONDS = 15.0
"""How long one write may take."""


def measure(where: str, names: tuple[str, ...]) -> Iterator[PeerReport]:
    """Measure; gives the same report again after each step. Never raises what kvbaton raises on purpose."""
    report = PeerReport(where)
    yield report
    try:
        address = Endpoint.parse(where, default_port=DEFAULT_PORT)
        report.address = str(address)
        secret = Secret.of(None)
        with socket.create_connection((address.host, address.port or 0), CONNECT_SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secret is not None:
                wire.prove(sock, wire.token_of(secret))
            wire.send(sock, wire.Greeting(wire.VERSION, names))
            offers = wire.expect(sock, wire.Offers)
            report.host, report.libraries = offers.host, offers.libraries
            if offers.version != wire.VERSION:
                raise ProtocolError(
                    f"its doctor speaks version {offers.version}, this one {wire.VERSION}: install the same release of "
                    "kvbaton on both sides"
                )
            report.round_trip_seconds = statistics.median(_times(lambda: _ask(sock, wire.Ping()), PINGS))
            yield report
            for name in names:
                report.trying = name
                yield report
                report.transports.append(_measure_transport(sock, offers, name))
            report.trying = ""
    except (OSError, KVBatonError) as error:
        report.error = _words(error)
    yield report


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time; is 'kvbaton doctor --serve' running there?"
    if isinstance(error, ConnectionRefusedError):
        return f"{error}; start 'kvbaton doctor --serve' there"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"it hung up ({error}), as it may when too many measure at the same time; try again in a minute"
    return str(error)


def _measure_transport(sock: socket.socket, offers: wire.Offers, name: str) -> Measured:
    if name not in offers.transports:
        return Measured(name, "missing", f"at the peer: {offers.missing.get(name, 'not offered')}")
    transport, memory = None, SharedMemory(MEMORY_BYTES)
    try:
        instance, bind = f"doctor-{uuid.uuid4().hex}", sock.getsockname()[0]
        transport = create(name, instance=instance, bind=bind, near=near_host_memory)
        transport.register([Region.of(memory)])
        refused = _ask(sock, wire.Admit(name, transport.describe())).error
        if refused:
            return Measured(name, "fails", f"at the peer: {refused}")
        memory.array.view(np.uint32)[:] = np.arange(len(memory.array) // 4, dtype=np.uint32) + zlib.crc32(name.encode())
        peer = transport.connect(offers.transports[name])
        writer = _Writer(transport, peer)
        small, large = rows_transfer(SMALL_BYTES, SMALL_BYTES), rows_transfer(MEMORY_BYTES)
        round_trip = statistics.median(_times(lambda: writer.write(small), ROUND_TRIPS))
        # It may take a while: the peer shall not take us for gone.
        _ask(sock, wire.Ping())
        seconds = _times(lambda: writer.write(large), ROUND_TRIPS)
        if _ask(sock, wire.Check()).checksum != zlib.crc32(memory.array.data):
            return Measured(name, "fails", "writes ended without an error, but their bytes are not all there")
        transport.disconnect(peer)
        return Measured(name, "works", "", round_trip, MEMORY_BYTES / statistics.median(seconds))
    except TransportUnavailable as error:
        return Measured(name, "missing", str(error))
    except KVBatonError as error:
        return Measured(name, "fails", str(error))
    finally:
        if transport is not None:
            transport.close()
        memory.close()


class _Writer:
    """Writes one thing after the other, and waits for each."""

    def __init__(self, transport: Transport, peer: RemotePeer) -> None:
        self._transport = transport
        self._peer = peer
        self._ticket = 0
        self._woken = threading.Event()
        transport.set_waker(self._woken.set)

    def write(self, transfer: Transfer) -> None:
        """Raises `TransportError` if it fails or does not end in time."""
        self._ticket += 1
        self._transport.write(self._peer, [transfer], self._ticket)
        give_up = time.monotonic() + WRITE_SECONDS
        while not (ended := self._transport.poll()):
            if time.monotonic() > give_up:
                raise TransportError(f"a write of {transfer.nbytes} bytes did not end within {WRITE_SECONDS:g} s")
            self._woken.wait(0.05)
            self._woken.clear()
        if ended[0].error:
            raise TransportError(ended[0].error)


def _times(step: Callable[[], object], most: int) -> list[float]:
    """Seconds of each of ``most`` steps, or of those that begin within the time that there is; at least two."""
    times: list[float] = []
    give_up = time.perf_counter() + PHASE_SECONDS
    while len(times) < 2 or (len(times) < most and time.perf_counter() < give_up):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times


def _ask(sock: socket.socket, message: wire.Admit | wire.Check | wire.Ping) -> wire.Answer:
    wire.send(sock, message)
    return wire.expect(sock, wire.Answer)


if __name__ == "__main__":
    for state in measure(sys.argv[1], tuple(name for name in sys.argv[2].split(",") if name)):
        sys.stdout.write(msgspec.json.encode(state).decode() + "\n")
        sys.stdout.flush()
