"""What the tcp transport says on the wire: descriptor, handshake, frames and acknowledgements.

One connection carries writes in one direction. The writer greets, the receiver answers, then frames go one way and
acknowledgements the other. A frame is a header, three tables (shape, destination, units) and the packed payload. All
numbers are little-endian.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvbaton.errors import TransportError
from kvbaton.plan.boxes import SHAPE_COLUMNS, SIDE_COLUMNS, Int64s, Transfer
from kvbaton.transport.chunks import split_boxes

MAGIC = b"KVBATON\n"
FRAME = b"KVBF"
VERSION = 1
TOKEN_BYTES = 16
MAX_INSTANCE = 255
MAX_BOXES = 4096
"""Boxes that one frame may have; a writer cuts larger tables."""
MAX_UNITS = 65536
"""Units that one frame may have. With `MAX_BOXES` it bounds the tables that a receiver holds to some 850 KiB."""
MAX_ERROR = 512
SLAB = 1 << 20
"""Bytes of payload that are packed and sent, or received and unpacked, at a time."""
DIRECT_RUN = 1024
"""From so many bytes in a run, on average, rows go to and come from the socket without a slab in between."""
DIRECT_STEP = 1 << 21
"""Bytes that go between rows and the socket at a time."""
FRAME_BYTES = 8 << 20
"""Bytes of payload that a frame has, about; a frame is what the connections of a peer share their work by."""
LEAST_FRAME = 1 << 20
"""Smaller frames cost more than it saves to send them over several connections."""

ACCEPTED, WRONG_VERSION, WRONG_TOKEN, FENCED, FULL = range(5)
REFUSALS = {
    WRONG_VERSION: "it speaks another version of the tcp transport; install the same kvbaton on both sides",
    WRONG_TOKEN: "its token differs: another process listens at that address now; get its new descriptor",
    FENCED: "it has fenced this instance; a new process needs a new instance id",
    FULL: "it has too many connections",
}

WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)

_GREETING = struct.Struct(f"<8sH{TOKEN_BYTES}sB")
_ANSWER = struct.Struct("<8sHBB")
_HEADER = struct.Struct("<4sBxxxIIqQ")
_ACK = struct.Struct("<qH")


class TcpDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="tcp1"):
    """What a peer needs to connect, and to check its writes before they are sent."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_INSTANCE)]
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes
    regions: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)], ...]


class Frame(NamedTuple):
    """The header of a frame. ``last``: an acknowledgement follows it, which also speaks for the ones before without.

    A writer asks for one after each frame: those of a ticket may go over several connections.
    """

    last: bool
    boxes: int
    units: int
    ticket: int
    payload: int


class Tables(NamedTuple):
    """The tables of a frame."""

    shape: Int64s
    destination: Int64s
    units: Int64s


def decode_descriptor(descriptor: bytes) -> TcpDescriptor:
    """Decode a descriptor. Raises `TransportError` for anything else."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=TcpDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"this is not a descriptor of the tcp transport: {error}") from error
    if len(described.token) != TOKEN_BYTES:
        raise TransportError(f"the token of a tcp descriptor has {len(described.token)} bytes instead of {TOKEN_BYTES}")
    return described


def receive_into(sock: socket.socket, view: memoryview) -> bool:
    """Fill ``view``; False if the connection ends first. Raises ``OSError``."""
    filled = 0
    while filled < len(view):
        # One wait for all of it, where the platform can: fewer wake-ups and fewer takings of the GIL.
        received = sock.recv_into(view[filled:], 0, WAIT_ALL)
        if not received:
            return False
        filled += received
    return True


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Receive exactly ``nbytes``, a small number. Raises ``EOFError`` if the connection ends first, or ``OSError``."""
    buffer = bytearray(nbytes)
    if not receive_into(sock, memoryview(buffer)):
        raise EOFError("the connection ended")
    return bytes(buffer)


def greet(sock: socket.socket, instance: str, described: TcpDescriptor) -> None:
    """The writer's half of the handshake. Raises `TransportError` if the peer refuses or is another one."""
    name = instance.encode()
    sock.sendall(_GREETING.pack(MAGIC, VERSION, described.token, len(name)) + name)
    magic, version, status, length = _ANSWER.unpack(receive(sock, _ANSWER.size))
    if magic != MAGIC:
        raise TransportError("what answers there does not speak the tcp transport of kvbaton")
    answered = receive(sock, length).decode(errors="replace")
    if status != ACCEPTED:
        reason = REFUSALS.get(status, f"status {status}")
        raise TransportError(f"the peer (version {version}, here {VERSION}) refused: {reason}")
    if answered != described.instance:
        raise TransportError(f"instance {answered} answered instead of {described.instance}; get its new descriptor")


class Greeting(NamedTuple):
    """What a writer said of itself."""

    version: int
    instance: str
    authentic: bool


def read_greeting(sock: socket.socket, token: bytes) -> Greeting:
    """The receiver's half. Raises ``ValueError`` for bytes that are no greeting, ``EOFError`` or ``OSError``."""
    magic, version, theirs, length = _GREETING.unpack(receive(sock, _GREETING.size))
    if magic != MAGIC or not length:
        raise ValueError("not a greeting")
    # UnicodeDecodeError is a ValueError.
    return Greeting(version, receive(sock, length).decode(), hmac.compare_digest(theirs, token))


def send_answer(sock: socket.socket, status: int, instance: str) -> None:
    """Answer a greeting; the instance is told only to those who have the token."""
    name = instance.encode() if status == ACCEPTED else b""
    sock.sendall(_ANSWER.pack(MAGIC, VERSION, status, len(name)) + name)


def cut(transfers: Iterable[Transfer], nbytes: int) -> Iterator[Transfer]:
    """Cut transfers to some ``nbytes`` bytes, but not within a unit, and to the table sizes that a frame may have."""
    for transfer in transfers:
        for boxes, source_units, destination_units in split_boxes(transfer, nbytes):
            for box in range(0, len(boxes.shape), MAX_BOXES):
                some = boxes.pick(slice(box, box + MAX_BOXES))
                step = min(MAX_UNITS, max(1, nbytes // some.bytes_per_unit))
                for unit in range(0, len(source_units), step):
                    chosen = slice(unit, unit + step)
                    yield Transfer(some, source_units[chosen], destination_units[chosen])


def goes_direct(shape: Int64s) -> bool:
    """Whether runs of that table are long enough to go without a slab."""
    pieces = shape[:, 0] * shape[:, 1]
    return int((pieces * shape[:, 2]).sum()) >= DIRECT_RUN * int(pieces.sum())


def encode_frame(transfer: Transfer, ticket: int, last: bool) -> bytes:
    """The header and the tables of a frame; the payload follows them."""
    boxes = transfer.boxes
    header = _HEADER.pack(FRAME, last, len(boxes.shape), len(transfer.destination_units), ticket, transfer.nbytes)
    return b"".join((header, boxes.shape.tobytes(), boxes.destination.tobytes(), transfer.destination_units.tobytes()))


def read_frame(sock: socket.socket) -> Frame | None:
    """The next header; None at the end of the connection. Raises ``ValueError`` for anything that is no header."""
    buffer = bytearray(_HEADER.size)
    if not receive_into(sock, memoryview(buffer)):
        return None
    magic, last, boxes, units, ticket, payload = _HEADER.unpack(buffer)
    if magic != FRAME or last > 1 or not 1 <= boxes <= MAX_BOXES or not 1 <= units <= MAX_UNITS:
        raise ValueError("not a frame")
    return Frame(bool(last), boxes, units, ticket, payload)


def read_tables(sock: socket.socket, frame: Frame) -> Tables | None:
    """The tables of a frame; None at the end of the connection."""
    shape, side = frame.boxes * len(SHAPE_COLUMNS), frame.boxes * len(SIDE_COLUMNS)
    numbers = np.empty(shape + side + frame.units, dtype=np.int64)
    if not receive_into(sock, numbers.view(np.uint8).data):
        return None
    return Tables(
        numbers[:shape].reshape(frame.boxes, -1),
        numbers[shape : shape + side].reshape(frame.boxes, -1),
        numbers[shape + side :],
    )


def encode_ack(ticket: int, error: str) -> bytes:
    """The end of a ticket, as the receiver tells it."""
    text = error.encode()[:MAX_ERROR]
    return _ACK.pack(ticket, len(text)) + text


def read_ack(sock: socket.socket) -> tuple[int, str]:
    """The next acknowledgement: ticket and error. Raises ``EOFError``, ``OSError``, or ``ValueError`` for nonsense."""
    ticket, length = _ACK.unpack(receive(sock, _ACK.size))
    if length > MAX_ERROR:
        raise ValueError("not an acknowledgement")
    return ticket, receive(sock, length).decode(errors="replace")
