"""What the tcp transport says on the wire: descriptor, frames and acknowledgements, after the greeting of `wire`.

One connection carries writes in one direction: frames go one way and acknowledgements the other. A frame is a header,
three tables (shape, destination, units) and the packed payload. All numbers are little-endian.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.wire import (
    TOKEN_BYTES,
    Ack,
    Dialect,
    Instance,
    Length,
    Port,
    encode_tables,
    fits_frame,
    receive_into,
    take_acks,
)

TCP = Dialect("tcp", b"KVBATON\n", 2)
FRAME = b"KVBF"
SLAB = 1 << 20
"""Bytes of payload that are packed and sent, or received and unpacked, at a time."""
DIRECT_RUN = 1024
"""From so many bytes in a run, on average, rows go to and come from the socket without a slab in between."""
DIRECT_STEP = 1 << 21
"""Bytes that go between rows and the socket at a time."""
ACKS_BYTES = 4096
"""Bytes of acknowledgements that are read at a time."""
FRAME_BYTES = 8 << 20
"""Bytes of payload that a frame has, about; a frame is what the connections of a peer share their work by."""
LEAST_FRAME = 1 << 20
"""Smaller frames cost more than it saves to send them over several connections."""

_HEADER = struct.Struct("<4sBxxxIIqQ")


class TcpDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="tcp1"):
    """What a peer needs to connect, and to check its writes before they are sent."""

    instance: Instance
    host: str
    port: Port
    token: bytes
    regions: tuple[Length, ...]


class Frame(NamedTuple):
    """The header of a frame. ``last``: an acknowledgement follows it, which also speaks for the ones before without.

    A writer asks for one after each frame: those of a ticket may go over several connections.
    """

    last: bool
    boxes: int
    units: int
    ticket: int
    payload: int


def decode_descriptor(descriptor: bytes) -> TcpDescriptor:
    """Decode a descriptor. Raises `TransportError` for anything else."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=TcpDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"this is not a descriptor of the tcp transport: {error}") from error
    if len(described.token) != TOKEN_BYTES:
        raise TransportError(f"the token of a tcp descriptor has {len(described.token)} bytes instead of {TOKEN_BYTES}")
    return described


def goes_direct(shape: Int64s) -> bool:
    """Whether runs of that table are long enough to go without a slab."""
    pieces = shape[:, 0] * shape[:, 1]
    return int((pieces * shape[:, 2]).sum()) >= DIRECT_RUN * int(pieces.sum())


def encode_frame(transfer: Transfer, ticket: int, last: bool) -> bytes:
    """The header and the tables of a frame; the payload follows them."""
    boxes = transfer.boxes
    header = _HEADER.pack(FRAME, last, len(boxes.shape), len(transfer.destination_units), ticket, transfer.nbytes)
    return header + encode_tables(transfer)


def read_frame(sock: socket.socket) -> Frame | None:
    """The next header; None at the end of the connection. Raises ``ValueError`` for anything that is no header."""
    buffer = bytearray(_HEADER.size)
    if not receive_into(sock, memoryview(buffer)):
        return None
    magic, last, boxes, units, ticket, payload = _HEADER.unpack(buffer)
    if magic != FRAME or last > 1 or not fits_frame(boxes, units):
        raise ValueError("not a frame")
    return Frame(bool(last), boxes, units, ticket, payload)


def read_acks(sock: socket.socket) -> Iterator[Ack]:
    """The acknowledgements of tickets that come, for ever.

    Raises ``EOFError`` at the end of the connection, ``OSError``, or ``ValueError`` for nonsense.
    """
    buffer = bytearray()
    while received := sock.recv(ACKS_BYTES):
        buffer += received
        yield from take_acks(buffer)
    raise EOFError("the connection ended")
