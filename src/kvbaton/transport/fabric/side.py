"""What fabric transports say beside the fabric: descriptor, hello and welcome, frames, acknowledgements, goodbye.

Each writer has one connection to each peer. After the greeting of `kvbaton.transport.wire` it sends a hello and gets a
welcome. Then frames say what lies in a slab that was written over the fabric, and where it goes: several tickets may
share one. An acknowledgement with an error is of a ticket, which is refused; one without is of a slab: its frames are
in place, but for those of tickets that were refused before, and it may be written to again. A goodbye is the writer's
word that its library does nothing more for this connection; the receiver half-closes the connection to ask for it. All
numbers are little-endian.
"""

from __future__ import annotations

import socket
import struct
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from kvbaton.errors import TransportError
from kvbaton.transport.process import ProcessKey
from kvbaton.transport.wire import (
    TOKEN_BYTES,
    Instance,
    Length,
    Port,
    fits_frame,
    receive,
    receive_into,
)

VERSION = 4
MAX_HELLO = 4096
MAX_OVER = 64
"""Connections that a hello speaks of."""
MAX_WELCOME = 256 * 1024
MAX_FABRIC = 48 * 1024
"""Bytes that an adapter's descriptor may have."""

DIRECT, PACKED = 1, 2
"""Ways into a region, as bits: the library writes there by itself, the receiver puts in place what lies in a slab."""

PART, WHOLE, GOODBYE = range(3)
"""Kinds of headers: of a frame that others of the same slab follow, of the last of a slab, and of the end."""

_HEADER = struct.Struct("<4sBxxxIIIqQQQ")
_MAGIC = b"KVBS"
_LENGTH = struct.Struct("<I")


class FabricDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="fabric1"):
    """What a peer needs to connect, and to check its writes before they are sent."""

    fabric: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    instance: Instance
    host: str
    port: Port
    token: bytes
    regions: tuple[Length, ...]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a writer says first. ``direct``: it may write into the regions; ``process``: by what its death is proven.

    ``connection`` is a number that it gives this connection; ``over`` are those of its connections for which its
    library does nothing any more, in case that their goodbye was lost.
    """

    direct: bool
    process: ProcessKey | None
    connection: Annotated[int, msgspec.Meta(ge=0)] = 0
    over: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_OVER)] = ()


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What a writer needs: the adapter's descriptor, and the slabs that it may write into, by number.

    ``exposed``: regions can be written to over the fabric. ``ways`` into each region: bits of `DIRECT` and `PACKED`.
    ``refusal``: why there is nothing for this writer; empty if there is.
    """

    fabric: Annotated[bytes, msgspec.Meta(max_length=MAX_FABRIC)]
    exposed: bool
    slab_bytes: Length
    slabs: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)], ...]
    ways: tuple[Annotated[int, msgspec.Meta(ge=0, le=DIRECT | PACKED)], ...]
    refusal: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Header(NamedTuple):
    """What stands before the tables of a frame.

    Bytes ``[begin, begin + payload)`` of the packed stream of the tables lie in ``slab`` from byte ``offset``.
    """

    kind: int
    boxes: int
    units: int
    slab: int
    ticket: int
    offset: int
    begin: int
    payload: int

    def encode(self) -> bytes:
        """The header as `read_header` takes it."""
        return _HEADER.pack(_MAGIC, *self)


FAREWELL = Header(GOODBYE, 0, 0, 0, 0, 0, 0, 0).encode()

Said = TypeVar("Said", Hello, Welcome)


def decode_descriptor(descriptor: bytes, fabric: str) -> FabricDescriptor:
    """Decode a descriptor. Raises `TransportError` for anything else, and for another fabric's."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=FabricDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"this is not a descriptor of the {fabric} transport: {error}") from error
    if len(described.token) != TOKEN_BYTES:
        raise TransportError(f"the token of a descriptor has {len(described.token)} bytes instead of {TOKEN_BYTES}")
    if described.fabric != fabric:
        raise TransportError(f"this is a descriptor of the {described.fabric} transport, not of {fabric}")
    return described


def send(sock: socket.socket, said: Hello | Welcome) -> None:
    """Send a hello or a welcome."""
    encoded = msgspec.msgpack.encode(said)
    sock.sendall(_LENGTH.pack(len(encoded)) + encoded)


def read(sock: socket.socket, kind: type[Said], limit: int) -> Said:
    """Read what `send` sent, of at most ``limit`` bytes. Raises ``ValueError``, ``EOFError`` or ``OSError``."""
    (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size))
    if length > limit:
        raise ValueError(f"a {kind.__name__.lower()} of {length} bytes")
    # Both errors of msgspec are ValueErrors.
    return msgspec.msgpack.decode(receive(sock, length), type=kind)


def read_header(sock: socket.socket) -> Header | None:
    """The next header; None at the end of the connection. Raises ``ValueError`` for anything that is no header."""
    buffer = bytearray(_HEADER.size)
    if not receive_into(sock, memoryview(buffer)):
        return None
    magic, *numbers = _HEADER.unpack(buffer)
    header = Header(*numbers)
    if magic != _MAGIC or header.kind > GOODBYE:
        raise ValueError("not a header")
    if header.kind != GOODBYE and not fits_frame(header.boxes, header.units):
        raise ValueError("not a frame")
    return header
