"""What one process of NIXL tells another of itself."""

from __future__ import annotations

import msgspec


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
