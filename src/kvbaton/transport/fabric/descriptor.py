"""What a process tells others of its end of a library, as bytes: bounded, and with a digest.

An adapter's descriptor is a struct of msgspec. Metadata of a library that were damaged on their way can end the process
that loads them; so nothing is looked at that does not have its digest.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TypeVar

import msgspec

from kvbaton.errors import TransportError

MAX_BYTES = 48 << 10
"""Bytes that the descriptor of an adapter may have, and..."""
MAX_UNPACKED = 4 << 20
"""... when it is unpacked."""
_DIGEST_BYTES = 16

Described = TypeVar("Described", bound=msgspec.Struct)


def encode(described: msgspec.Struct, regions: int) -> bytes:
    """The descriptor of an end with so many regions. Raises `TransportError` if its bytes are too many."""
    packed = zlib.compress(msgspec.msgpack.encode(described))
    if _DIGEST_BYTES + len(packed) > MAX_BYTES:
        raise TransportError(
            f"{regions} regions make a descriptor of {_DIGEST_BYTES + len(packed)} bytes, more than {MAX_BYTES}; "
            "register fewer, larger regions, or name fewer devices, where each has a key for each region"
        )
    return _digest(packed) + packed


def decode(kind: type[Described], descriptor: bytes, name: str) -> Described:
    """The descriptor of peer ``name``, which comes from another machine.

    Raises `TransportError` for what was damaged, or is none of that kind.
    """
    packed = descriptor[_DIGEST_BYTES:]
    if _digest(packed) != descriptor[:_DIGEST_BYTES]:
        raise TransportError(f"the descriptor of peer {name} was damaged on its way, or is none")
    try:
        return msgspec.msgpack.decode(zlib.decompressobj().decompress(packed, MAX_UNPACKED), type=kind)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(
            f"the descriptor of peer {name} cannot be understood: {error}; install the same kvbaton on both sides"
        ) from error


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()
