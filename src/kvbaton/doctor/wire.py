"""What two doctors say to each other: small frames on one TCP connection, bounded, and plain values only."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Annotated, TypeVar, Union

import msgspec
from msgspec import Meta

from kvbaton.errors import ProtocolError, TransportError
from kvbaton.secret import VARIABLE, Secret
from kvbaton.transport.dial import cut_off_after
from kvbaton.transport.wire import ACCEPTED, FULL, WRONG_TOKEN, WRONG_VERSION, Dialect, Reception, greet, say_full

VERSION = 1
MAX_FRAME_BYTES = 2 << 20
STEP_SECONDS = 20.0
"""How long one message may take, waiting for it included: transports may wait some seconds for devices."""

_HEAD = struct.Struct("<4sI")
_MAGIC = b"KVBD"
_SECRET = Dialect(
    "doctor",
    b"KVBSECR\n",
    1,
    {
        WRONG_VERSION: "it is of another release; install the same kvbaton on both sides",
        WRONG_TOKEN: f"it has another secret; set {VARIABLE} to the same there and here",
        FULL: "it is busy: too many others are connected; try again later",
    },
)
"""What is said first where there is a secret: the handshake of the transports, with a key of the secret for a token."""
_NAME = "doctor"

Text = Annotated[str, Meta(max_length=2000)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Descriptor = Annotated[bytes, Meta(max_length=1 << 16)]


class Greeting(msgspec.Struct, frozen=True, tag="greeting", forbid_unknown_fields=True):
    """First, from the side that measures: the transports that work there."""

    version: Annotated[int, Meta(ge=0, le=0xFFFF)]
    transports: Annotated[tuple[Name, ...], Meta(max_length=16)]


class Offers(msgspec.Struct, frozen=True, tag="offers", forbid_unknown_fields=True):
    """The answer: who is here, a descriptor for each transport that works here too, and why the others do not."""

    version: Annotated[int, Meta(ge=0, le=0xFFFF)]
    host: Text
    libraries: Annotated[dict[Name, Text], Meta(max_length=32)]
    transports: Annotated[dict[Name, Descriptor], Meta(max_length=16)]
    missing: Annotated[dict[Name, Text], Meta(max_length=16)]


class Admit(msgspec.Struct, frozen=True, tag="admit", forbid_unknown_fields=True):
    """Let the owner of this descriptor write."""

    transport: Name
    descriptor: Descriptor


class Check(msgspec.Struct, frozen=True, tag="check", forbid_unknown_fields=True):
    """Asks for the checksum of what was written."""


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Asks for an empty answer."""


class Answer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """The answer to each of the others."""

    error: Text = ""
    checksum: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0


Message = Union[Greeting, Offers, Admit, Check, Ping, Answer]  # noqa: UP007 (msgspec reads it at run time)
Kind = TypeVar("Kind", Greeting, Offers, Admit, Check, Ping, Answer)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def token_of(secret: Secret) -> bytes:
    """What two doctors that share a secret know."""
    return secret.keys("doctor")[0]


def prove(sock: socket.socket, token: bytes) -> None:
    """Show to the doctor that waits that this one shares its secret, and have it shown. Raises `ProtocolError`."""
    sock.settimeout(STEP_SECONDS)
    try:
        greet(sock, _SECRET, _NAME, token, _NAME)
    except TransportError as error:
        raise ProtocolError(str(error)) from None
    except EOFError:
        raise ProtocolError(f"it has no secret, and there is one here: set {VARIABLE} to the same there") from None


def shares_secret(sock: socket.socket, token: bytes, seconds: float) -> bool:
    """Whether a visitor shows within so many seconds that it shares the secret; it is answered either way."""
    try:
        with cut_off_after(sock, seconds):
            reception = Reception(sock, _SECRET, token)
            said = reception.read()
            same_version = said.version == _SECRET.version
            status = WRONG_VERSION if not same_version else ACCEPTED if said.authentic else WRONG_TOKEN
            reception.answer(status, _NAME)
            return status == ACCEPTED
    except (OSError, EOFError, ValueError):
        return False


def send(sock: socket.socket, message: Message) -> None:
    """Send one frame. Raises ``OSError``, ``TimeoutError`` after `STEP_SECONDS`."""
    packed = _encoder.encode(message)
    sock.settimeout(STEP_SECONDS)
    sock.sendall(_HEAD.pack(_MAGIC, len(packed)) + packed)


def receive(sock: socket.socket) -> Message | None:
    """The next message; None if the connection ended between two.

    Raises `ProtocolError`, or ``OSError``: ``TimeoutError`` if it is not there as a whole after `STEP_SECONDS`.
    """
    give_up = time.monotonic() + STEP_SECONDS
    head = _receive(sock, _HEAD.size, give_up)
    if not head:
        return None
    if head == _SECRET.magic:
        raise ProtocolError(f"it wants a secret, and there is none here: set {VARIABLE} to the same as there")
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise ProtocolError(f"what answers there is no doctor of kvbaton: it began with {head!r}")
    length = _HEAD.unpack(head)[1]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is longer than a doctor's may be ({MAX_FRAME_BYTES} bytes)")
    packed = _receive(sock, length, give_up)
    if len(packed) < length:
        raise ProtocolError(f"the connection ended after {len(packed)} of {length} bytes of a frame")
    try:
        return _decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame of a doctor cannot be decoded: {error}") from None


def begins_like_a_doctor(sock: socket.socket, seconds: float) -> bool:
    """Whether the first bytes that come within so many seconds are those of a frame; they stay to be read."""
    give_up = time.monotonic() + seconds
    try:
        while (left := give_up - time.monotonic()) > 0:
            sock.settimeout(left)
            seen = sock.recv(_HEAD.size, socket.MSG_PEEK)
            if not seen or not _MAGIC.startswith(seen[: len(_MAGIC)]):
                return False
            if len(seen) == _HEAD.size:
                return True
            # A peek returns at once as long as something is there.
            time.sleep(0.01)
    except OSError:
        pass
    return False


def expect(sock: socket.socket, kind: type[Kind]) -> Kind:
    """The next message, of that kind. Raises `ProtocolError` for another one or none, or ``OSError``."""
    message = receive(sock)
    if not isinstance(message, kind):
        if isinstance(message, Answer) and message.error:
            raise ProtocolError(f"it refused: {message.error}")
        came = "the connection ended" if message is None else f"{type(message).__name__} came"
        raise ProtocolError(f"{came} where {kind.__name__} was expected")
    return message


def turn_away_early(sock: socket.socket) -> None:
    """Say that it is busy to a visitor that wants to show its secret; without waiting for it."""
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        say_full(sock, _SECRET)
        sock.shutdown(socket.SHUT_WR)


def turn_away(sock: socket.socket, why: str, seconds: float) -> None:
    """Answer with ``why``, and read away for so many seconds what still comes: a reset would overtake the answer."""
    give_up = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        send(sock, Answer(why))
        sock.shutdown(socket.SHUT_WR)
        while _receive(sock, 1 << 12, give_up):
            pass


def _receive(sock: socket.socket, nbytes: int, give_up: float) -> bytes:
    """So many bytes, or fewer at the end of the connection. Raises ``TimeoutError`` when it is ``give_up``."""
    received = bytearray()
    while len(received) < nbytes:
        # A timeout on each read alone would let a peer drip bytes for ever.
        left = give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        part = sock.recv(min(nbytes - len(received), 1 << 16))
        if not part:
            break
        received += part
    return bytes(received)
