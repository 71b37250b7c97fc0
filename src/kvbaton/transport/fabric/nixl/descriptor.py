"""What one process of NIXL tells another of itself. It travels with a digest: damaged metadata can end who loads it."""

from __future__ import annotations

import hashlib

import msgspec

from kvbaton.errors import TransportError

MAX_BYTES = 48 << 10
TOKEN_BYTES = 16


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies: its address there, its length, and the kind and number of its device."""

    address: int
    nbytes: int
    kind: str
    device: int


class NixlDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="nixl1"):
    """An agent's name, what the library says of it, where its token lies and what it is, and its regions."""

    agent: str
    metadata: bytes
    token_address: int
    token: bytes
    regions: tuple[Place, ...]

    def encode(self) -> bytes:
        """As bytes. Raises `TransportError` if they are more than a descriptor may have."""
        encoded = msgspec.msgpack.encode(self)
        if len(encoded) + TOKEN_BYTES > MAX_BYTES:
            raise TransportError(
                f"{len(self.regions)} regions make a descriptor of {len(encoded)} bytes, more than {MAX_BYTES}; "
                "register fewer, larger regions, or name the devices to use: each has a key for each region"
            )
        return _digest(encoded) + encoded

    @classmethod
    def decode(cls, descriptor: bytes, name: str) -> NixlDescriptor:
        """From bytes of the peer ``name``. Raises `TransportError` for what is not one, or was damaged."""
        encoded = descriptor[TOKEN_BYTES:]
        if _digest(encoded) != descriptor[:TOKEN_BYTES]:
            raise TransportError(f"the descriptor of peer {name} was damaged on its way, or is not one of NIXL")
        try:
            return msgspec.msgpack.decode(encoded, type=cls)
        except msgspec.DecodeError as error:
            raise TransportError(f"the descriptor of peer {name} cannot be understood: {error}") from error


def _digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=TOKEN_BYTES).digest()
