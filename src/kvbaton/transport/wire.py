"""What connections of transports have in common: greeting with a token, tables of boxes, bounded reads.

One connection carries writes in one direction. The receiver begins with a nonce, the writer greets, the receiver
answers; each proves to the other that it knows the token of the receiver's descriptor, which is itself never sent here.
What follows is the dialect's. All numbers are little-endian. What is read here comes from the network and is bounded
and checked.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
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

ACCEPTED, WRONG_VERSION, WRONG_TOKEN, FENCED, FULL, BEGIN = range(6)
REFUSALS = {
    WRONG_VERSION: "it speaks another version of the {} transport; install the same kvbaton on both sides",
    WRONG_TOKEN: "its token differs: another process listens at that address now; get its new descriptor",
    FENCED: "it has fenced this instance; a new process needs a new instance id",
    FULL: "it is full: it has too many connections, or too many that are beginning; try again",
}

WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)

_ACK = struct.Struct("<qH")
_PROOF_BYTES = 32
_GREETING = struct.Struct(f"<H{_PROOF_BYTES}s{_PROOF_BYTES}sB")
"""After the magic: version, the writer's nonce and proof, the length of its instance id, and that."""
_ANSWER = struct.Struct(f"<HB{_PROOF_BYTES}sB")
"""After the magic: version, status, the receiver's proof (to begin with, its nonce), the length of its id, and that."""
MAX_GREETING = 8 + _GREETING.size + MAX_INSTANCE
"""Bytes of a greeting."""

Instance = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_INSTANCE)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Full(TransportError):
    """The receiver has no room for another connection at the moment."""


class Dialect(NamedTuple):
    """What is spoken after the greeting: the transport's name, eight bytes that begin each greeting, and a version."""

    name: str
    magic: bytes
    version: int
    refusals: Mapping[int, str] = REFUSALS
    """What the statuses of refusals mean, for people."""


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


def _prove(token: bytes, side: bytes, dialect: Dialect, nonces: bytes, instance: bytes) -> bytes:
    """What only those can say who know the token, and only about these nonces."""
    return hmac.digest(token, b"kvbaton " + side + dialect.magic + nonces + instance, "sha256")


def greet(sock: socket.socket, dialect: Dialect, instance: str, token: bytes, wanted: str) -> None:
    """The writer's half of the handshake with the instance ``wanted``.

    Raises `Full` if it has no room, `TransportError` if it refuses otherwise or is another one, ``EOFError`` or
    ``OSError`` if the connection ends.
    """
    theirs, _ = _read_answer(sock, dialect, BEGIN)
    name, mine = instance.encode(), secrets.token_bytes(_PROOF_BYTES)
    proof = _prove(token, b"writer", dialect, theirs + mine, name)
    sock.sendall(dialect.magic + _GREETING.pack(dialect.version, mine, proof, len(name)) + name)
    proof, answered = _read_answer(sock, dialect, ACCEPTED)
    if not hmac.compare_digest(proof, _prove(token, b"receiver", dialect, theirs + mine, answered)):
        raise TransportError("what answers there does not know the token of its descriptor: it is another process")
    if answered != wanted.encode():
        there = answered.decode(errors="replace")
        raise TransportError(f"instance {there} answered instead of {wanted}; get its new descriptor")


def _read_answer(sock: socket.socket, dialect: Dialect, expected: int) -> tuple[bytes, bytes]:
    """The proof, or nonce, and the name in an answer of status ``expected``. Raises `TransportError` for another."""
    if receive(sock, len(dialect.magic)) != dialect.magic:
        raise TransportError(f"what answers there does not speak the {dialect.name} transport of kvbaton")
    version, status, proof, length = _ANSWER.unpack(receive(sock, _ANSWER.size))
    if status != expected:
        reason = dialect.refusals.get(status, f"status {status}").format(dialect.name)
        kind = Full if status == FULL else TransportError
        raise kind(f"the peer (version {version}, here {dialect.version}) refused: {reason}")
    return proof, receive(sock, length)


class Reception:
    """The receiver's half of the handshake: begins it at once, then `read`, then `answer`.

    Each may raise ``OSError``. Where ``sock`` does not block, `read` is called again after ``BlockingIOError``.
    """

    def __init__(self, sock: socket.socket, dialect: Dialect, token: bytes) -> None:
        self.sock = sock
        self._dialect = dialect
        self._token = token
        self._said = bytearray()
        self._nonces = secrets.token_bytes(_PROOF_BYTES)
        _send_answer(sock, dialect, BEGIN, self._nonces, b"")

    def read(self) -> Greeting:
        """What the writer said. Raises ``ValueError`` for bytes that are no greeting, ``EOFError`` at the end."""
        while lacks := self._lacks():
            received = self.sock.recv(lacks)
            if not received:
                raise EOFError("the connection ended")
            self._said += received
        version, nonce, proof, _ = _GREETING.unpack_from(self._said, len(self._dialect.magic))
        name = bytes(self._said[len(self._dialect.magic) + _GREETING.size :])
        self._nonces += nonce
        authentic = hmac.compare_digest(proof, _prove(self._token, b"writer", self._dialect, self._nonces, name))
        # UnicodeDecodeError is a ValueError.
        return Greeting(version, name.decode(), authentic)

    def answer(self, status: int, instance: str) -> None:
        """Answer; who we are is told, and proven, only to those who know the token."""
        name = instance.encode() if status == ACCEPTED else b""
        proof = _prove(self._token, b"receiver", self._dialect, self._nonces, name) if name else bytes(_PROOF_BYTES)
        _send_answer(self.sock, self._dialect, status, proof, name)

    def _lacks(self) -> int:
        """How many bytes are to come, as far as it is known; 0 if the greeting is whole. Raises ``ValueError``."""
        magic, begins = self._dialect.magic, len(self._said)
        if bytes(self._said[: len(magic)]) != magic[:begins]:
            raise ValueError("not a greeting")
        head = len(magic) + _GREETING.size
        if begins < head:
            # What says that it is none by its first bytes is not waited for.
            return (len(magic) if begins < len(magic) else head) - begins
        length = int(self._said[head - 1])
        if not length:
            raise ValueError("not a greeting")
        return head + length - begins


def say_full(sock: socket.socket, dialect: Dialect) -> None:
    """Tell a writer, in place of the beginning, that there is no room. Raises ``OSError``."""
    _send_answer(sock, dialect, FULL, bytes(_PROOF_BYTES), b"")


def _send_answer(sock: socket.socket, dialect: Dialect, status: int, proof: bytes, name: bytes) -> None:
    sock.sendall(dialect.magic + _ANSWER.pack(dialect.version, status, proof, len(name)) + name)


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
