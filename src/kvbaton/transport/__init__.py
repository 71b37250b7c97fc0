"""Transports: what moves bytes between the registered regions of two processes. `base` says what they promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvbaton.devices.choose import Choice
from kvbaton.errors import ConfigurationError
from kvbaton.transport.base import Capabilities, Completion, RemotePeer, Transport
from kvbaton.transport.fabric import FABRICS, open_transport
from kvbaton.transport.fabric.options import check_text

__all__ = ["AUTO", "NAMES", "Capabilities", "Completion", "RemotePeer", "Transport", "create"]

NAMES = ("loopback", "shm", "cuda", "tcp", "nixl", "mooncake", "mori")
"""The transports that `create` knows."""
AUTO = "auto"
"""Instead of names, for a manager: every transport that works on its machine, the best first."""


def create(
    name: str,
    *,
    instance: str,
    bind: str = "127.0.0.1",
    advertise: str = "",
    options: Mapping[str, str] | None = None,
    near: Callable[[], Choice] | None = None,
) -> Transport:
    """Make the transport ``name`` for the process with that instance id.

    ``bind`` is the address to listen on, ``host`` or ``host:port`` (``[host]:port`` for IPv6); ``advertise`` is the
    host that peers dial, where it is not the same. Both are for transports that cross hosts; the others ignore them.
    ``options`` tune the transports over a vendor's library (see docs/transports.md); the others have none.
    ``near`` finds the network devices near the memory that will be registered: those are used by transports that can be
    told which, unless ``options`` name some.
    Raises `ConfigurationError` for an unknown name or option and for options that are not text, `AddressError` for an
    address that cannot be used, and `TransportUnavailable` if this machine lacks what the transport needs.
    """
    if options is not None:
        check_text(name, options)
    if name in FABRICS:
        return open_transport(name, instance, bind, advertise, options, near)
    if options:
        raise ConfigurationError(f"{name} has no option {', '.join(sorted(options))}; it has none at all")
    if name == "loopback":
        from kvbaton.transport.loopback import LoopbackTransport

        return LoopbackTransport(instance)
    if name == "shm":
        from kvbaton.transport.shm import ShmTransport

        return ShmTransport(instance)
    if name == "cuda":
        from kvbaton.transport.cuda.transport import CudaTransport

        return CudaTransport(instance)
    if name == "tcp":
        from kvbaton.transport.tcp import TcpTransport

        return TcpTransport(instance, bind=bind, advertise=advertise)
    raise ConfigurationError(f"there is no transport {name!r}; choose one of {', '.join(NAMES)}")
