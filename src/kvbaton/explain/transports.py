"""What transports can do, by name: those of this release, and those whose kind is known."""

from __future__ import annotations

from kvbaton.errors import ConfigurationError
from kvbaton.transport import NAMES, Capabilities
from kvbaton.transport.loopback import LoopbackTransport
from kvbaton.transport.shm import ShmTransport
from kvbaton.transport.tcp import TcpTransport

_HERE = {kind.name: kind.capabilities for kind in (LoopbackTransport, ShmTransport, TcpTransport)}
_ONE_SIDED = Capabilities(False, True, frozenset({"host", "cuda"}), False, one_sided=True)
_PLANNED = dict.fromkeys(("nixl", "mooncake", "mori"), _ONE_SIDED)


def capabilities_of(name: str) -> Capabilities:
    """What the transport ``name`` can do. Raises `ConfigurationError` for an unknown one."""
    known = {**_HERE, **_PLANNED}
    if name not in known:
        raise ConfigurationError(f"there is no transport {name!r}; known are {', '.join(known)}")
    return known[name]


def available(name: str) -> bool:
    """Whether this release has it."""
    return name in NAMES
