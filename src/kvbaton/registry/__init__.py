"""The bootstrap service: prefill ranks register their topology here, and decode ranks look it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.registry.base import (
    FoundRooms,
    Registration,
    RegistryClient,
    RegistryRefused,
    RegistryUnauthorized,
    RegistryUnreachable,
    Topology,
    UnknownDeployment,
    UnknownInstance,
)
from kvbaton.registry.client import HttpRegistry
from kvbaton.registry.memory import MemoryRegistry
from kvbaton.registry.table import Limits, RegistryTable
from kvbaton.secret import SecretLike

if TYPE_CHECKING:
    from kvbaton.registry.server import RegistryServer

__all__ = [
    "FoundRooms",
    "HttpRegistry",
    "Limits",
    "MemoryRegistry",
    "Registration",
    "RegistryClient",
    "RegistryRefused",
    "RegistryTable",
    "RegistryUnauthorized",
    "RegistryUnreachable",
    "Topology",
    "UnknownDeployment",
    "UnknownInstance",
    "serve",
]


def serve(
    host: str = "127.0.0.1", port: int = 0, ttl: float = 10.0, *, secret: SecretLike | None = None
) -> RegistryServer:
    """Start a registry in a thread; the caller stops it. Needs the extra ``registry`` (else `ConfigurationError`).

    ``secret`` is what it shares with its clients; without one (see `kvbaton.secret`) ``host`` must be a loopback
    address.
    """
    from kvbaton.registry.server import RegistryServer

    server = RegistryServer(host, port, ttl, secret=secret)
    server.start()
    return server
