"""What a peer must know to reach a Mooncake engine: text that comes from another machine, checked."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError, TransportError
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.fabric import descriptor
from kvbaton.transport.fabric.scratch import TOKEN_BYTES

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
        return descriptor.encode(self, len(self.regions) // 8)

    @classmethod
    def decode(cls, encoded: bytes, name: str) -> MooncakeDescriptor:
        """The descriptor of peer ``name``. Raises `TransportError` for bytes that are none."""
        described = descriptor.decode(cls, encoded, name)
        wrong = ""
        try:
            Endpoint.parse(str(described.address))
        except AddressError as error:
            wrong = str(error)
        if len(described.regions) % 8 or len(described.token) != TOKEN_BYTES:
            wrong = "its regions or its token are cut off"
        elif ((described.bases < 0) | (described.bases >= _MAX_ADDRESS)).any():
            wrong = "a region has an impossible address"
        if wrong:
            raise TransportError(f"the descriptor of peer {name} cannot be understood: {wrong}")
        return described
