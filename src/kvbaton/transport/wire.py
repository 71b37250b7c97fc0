"""What connections of transports have in common: greeting with a token, tables of boxes, bounded reads.

One connection carries writes in one direction. The writer greets, the receiver answers; what follows is the dialect's.
All numbers are little-endian. What is read here comes from the network and is bounded and checked.
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

TOKEN_BYTES = 16
MAX_INSTANCE = 255
MAX_BOXES = 4096
"""Boxes that one frame may have; a writer cuts larger tables."""
MAX_UNITS = 65536
"""Units that one frame may have. With `MAX_BOXES` it bounds the tables that a receiver holds to some 850 KiB."""
MAX_ERROR = 512

ACCEPTED, WRONG_VERSION, WRONG_TOKEN, FENCED, FULL = range(5)
REFUSALS = {
    WRONG_VERSION: "it speaks another version of the {} transport; install the same kvbaton on both sides",
    WRONG_TOKEN: "its token differs: another process listens at that address now; get its new descriptor",
    FENCED: "it has fenced this instance; a new process needs a new instance id",
    FULL: "it is full: it has too many connections, or too many that are beginning; try again",
}

WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)

_GREETING = struct.Struct(f"<8sH{TOKEN_BYTES}sB")
_ANSWER = struct.Struct("<8sHBB")
_ACK = struct.Struct("<qH")
MAX_GREETING = _GREETING.size + MAX_INSTANCE
"""Bytes of a greeting."""

Instance = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_INSTANCE)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Dialect(NamedTuple):
    """What is spoken after the greeting: the transport's name, eight bytes that begin each greeting, and a version."""

    name: str
    magic: bytes
    version: int


class Greeting(NamedTuple):
    """What a writer said of itself."""

    version: int
    instance: str
    authentic: bool


class Tables(NamedTuple):
    """The tables of a frame."""

    shape: Int64s
    destination: Int64s
    units: Int64s


class Ack(NamedTuple):
    """What a receiver tells of something that has a number: it is over; ``error`` is empty if it is in place."""

    number: int
    error: str = ""


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


def greet(sock: socket.socket, dialect: Dialect, instance: str, token: bytes, wanted: str) -> None:
    """The writer's half of the handshake with the instance ``wanted``.

    Raises `TransportError` if the peer refuses or is another one, ``EOFError`` or ``OSError`` if the connection ends.
    """
    name = instance.encode()
    sock.sendall(_GREETING.pack(dialect.magic, dialect.version, token, len(name)) + name)
    magic, version, status, length = _ANSWER.unpack(receive(sock, _ANSWER.size))
    if magic != dialect.magic:
        raise TransportError(f"what answers there does not speak the {dialect.name} transport of kvbaton")
    answered = receive(sock, length).decode(errors="replace")
    if status != ACCEPTED:
        reason = REFUSALS.get(status, f"status {status}").format(dialect.name)
        raise TransportError(f"the peer (version {version}, here {dialect.version}) refused: {reason}")
    if answered != wanted:
        raise TransportError(f"instance {answered} answered instead of {wanted}; get its new descriptor")


def read_greeting(sock: socket.socket, dialect: Dialect, token: bytes) -> Greeting:
    """The receiver's half. Raises ``ValueError`` for bytes that are no greeting, ``EOFError`` or ``OSError``."""
    magic, version, theirs, length = _GREETING.unpack(receive(sock, _GREETING.size))
    if magic != dialect.magic or not length:
        raise ValueError("not a greeting")
    # UnicodeDecodeError is a ValueError.
    return Greeting(version, receive(sock, length).decode(), hmac.compare_digest(theirs, token))


def send_answer(sock: socket.socket, dialect: Dialect, status: int, instance: str) -> None:
    """Answer a greeting; the instance is told only to those who have the token."""
    name = instance.encode() if status == ACCEPTED else b""
    sock.sendall(_ANSWER.pack(dialect.magic, dialect.version, status, len(name)) + name)


def cut(transfers: Iterable[Transfer], nbytes: int) -> Iterator[Transfer]:
    """Cut transfers to some ``nbytes`` bytes, but not within a unit, and to the table sizes that a frame may have."""
    for transfer in transfers:
        if transfer.nbytes <= nbytes and fits_frame(len(transfer.boxes.shape), len(transfer.source_units)):
            # Small requests come by the thousand.
            yield transfer
            continue
        for boxes, source_units, destination_units in split_boxes(transfer, nbytes):
            for box in range(0, len(boxes.shape), MAX_BOXES):
                some = boxes.pick(slice(box, box + MAX_BOXES))
                step = min(MAX_UNITS, max(1, nbytes // some.bytes_per_unit))
                for unit in range(0, len(source_units), step):
                    chosen = slice(unit, unit + step)
                    yield Transfer(some, source_units[chosen], destination_units[chosen])


def encode_tables(transfer: Transfer) -> bytes:
    """The tables of a frame as `read_tables` takes them."""
    boxes = transfer.boxes
    return b"".join((boxes.shape.tobytes(), boxes.destination.tobytes(), transfer.destination_units.tobytes()))


def fits_frame(boxes: int, units: int) -> bool:
    """Whether a frame may have so many boxes and units."""
    return 1 <= boxes <= MAX_BOXES and 1 <= units <= MAX_UNITS


def read_tables(sock: socket.socket, boxes: int, units: int) -> Tables | None:
    """The tables of a frame with counts that `fits_frame` allows; None at the end of the connection."""
    shape, side = boxes * len(SHAPE_COLUMNS), boxes * len(SIDE_COLUMNS)
    numbers = np.empty(shape + side + units, dtype=np.int64)
    if not receive_into(sock, numbers.view(np.uint8).data):
        return None
    return Tables(
        numbers[:shape].reshape(boxes, -1),
        numbers[shape : shape + side].reshape(boxes, -1),
        numbers[shape + side :],
    )


def encode_ack(ack: Ack) -> bytes:
    """The acknowledgement as `take_acks` takes it; a text that is too long is cut off."""
    text = ack.error.encode()[:MAX_ERROR]
    return _ACK.pack(ack.number, len(text)) + text


def take_acks(buffer: bytearray) -> list[Ack]:
    """Take all whole acknowledgements off the front of ``buffer``. Raises ``ValueError`` for nonsense."""
    acks = []
    at = 0
    while len(buffer) - at >= _ACK.size:
        number, length = _ACK.unpack_from(buffer, at)
        if length > MAX_ERROR:
            raise ValueError("not an acknowledgement")
        end = at + _ACK.size + length
        if len(buffer) < end:
            break
        acks.append(Ack(number, buffer[at + _ACK.size : end].decode(errors="replace")))
        at = end
    del buffer[:at]
    return acks
