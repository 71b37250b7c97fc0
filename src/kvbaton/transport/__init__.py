"""Transports: what moves bytes between the registered regions of two processes. `base` says what they promise."""

from __future__ import annotations

from kvbaton.errors import ConfigurationError
from kvbaton.transport.base import Capabilities, Completion, RemotePeer, Transport

__all__ = ["NAMES", "Capabilities", "Completion", "RemotePeer", "Transport", "create"]

NAMES = ("loopback", "shm", "tcp")
"""The transports that `create` knows."""


def create(name: str, *, instance: str, bind: str = "127.0.0.1", advertise: str = "") -> Transport:
    """Make the transport ``name`` for the process with that instance id.

    ``bind`` is the address to listen on, ``host`` or ``host:port`` (``[host]:port`` for IPv6); ``advertise`` is the
    host that peers dial, where it is not the same. Both are for transports that cross hosts; the others ignore them.
    Raises `ConfigurationError` for an unknown name, `AddressError` for an address that cannot be used, and
    `TransportUnavailable` if this machine lacks what the transport needs.
    """
    if name == "loopback":
        from kvbaton.transport.loopback import LoopbackTransport

        return LoopbackTransport(instance)
    if name == "shm":
        from kvbaton.transport.shm import ShmTransport

        return ShmTransport(instance)
    if name == "tcp":
        from kvbaton.transport.tcp import TcpTransport

        return TcpTransport(instance, bind=bind, advertise=advertise)
    raise ConfigurationError(f"there is no transport {name!r}; choose one of {', '.join(NAMES)}")
