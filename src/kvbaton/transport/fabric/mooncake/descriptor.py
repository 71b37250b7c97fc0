"""What a peer must know to reach a Mooncake engine: text that comes from another machine, checked."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError, TransportError
from kvbaton.plan.boxes import Int64s

MAX_DESCRIPTOR = 48 << 10
TOKEN_BYTES = 16
_MAX_ADDRESS = 1 << 62


class MooncakeDescriptor(msgspec.Struct, frozen=True, array_like=True, tag="mooncake1"):
    """Where an engine listens, and where its registered regions begin."""

    host: str
    port: int
    protocol: str
    token_address: Annotated[int, msgspec.Meta(ge=0, lt=_MAX_ADDRESS)]
    token: bytes
    regions: bytes
    """Addresses, as int64."""

    @property
    def address(self) -> Endpoint:
        """Where the engine answers handshakes."""
        return Endpoint(self.host, self.port)

    @property
    def bases(self) -> Int64s:
        """The addresses of the regions."""
        return np.frombuffer(self.regions, np.int64)

    def encode(self) -> bytes:
        """As bytes. Raises `TransportError` if they are too many."""
        encoded = msgspec.msgpack.encode(self)
        if len(encoded) > MAX_DESCRIPTOR:
            raise TransportError(
                f"{len(self.bases)} regions make a descriptor of {len(encoded)} bytes, more than {MAX_DESCRIPTOR}; "
                "register fewer, larger regions"
            )
        return encoded


def decode(descriptor: bytes, name: str) -> MooncakeDescriptor:
    """The descriptor of peer ``name``. Raises `TransportError` for bytes that are none."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=MooncakeDescriptor)
        Endpoint.parse(str(described.address))
    except (msgspec.DecodeError, AddressError) as error:
        raise TransportError(f"the descriptor of peer {name} cannot be understood: {error}") from error
    if len(described.regions) % 8 or len(described.token) != TOKEN_BYTES:
        raise TransportError(
            f"the descriptor of peer {name} cannot be understood: its regions or its token are cut off"
        )
    if ((described.bases < 0) | (described.bases >= _MAX_ADDRESS)).any():
        raise TransportError(f"the descriptor of peer {name} cannot be understood: a region has an impossible address")
    return described
