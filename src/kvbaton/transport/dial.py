"""Sockets of transports: how one listens, dials and greets, and finds a dead host out."""

from __future__ import annotations

import contextlib
import socket
import time

from kvbaton.address import is_wildcard
from kvbaton.errors import AddressError, TransportError, TransportUnavailable
from kvbaton.transport.wire import Dialect, greet

CONNECT_SECONDS = 5.0


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host``; port 0 is any. Raises `AddressError`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"cannot listen on host {host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise AddressError(f"cannot listen on host {host!r} port {port}: {error}") from error
    return listener


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """Connect, with the deadline on the handshake that follows too. Raises ``OSError``."""
    end = time.monotonic() + timeout
    sock = socket.create_connection((host, port), timeout=timeout)
    sock.settimeout(max(0.1, end - time.monotonic()))
    return sock


def tune(sock: socket.socket) -> None:
    """Blocking, no delay for small frames, and a dead host found out within half a minute."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def reach(dialect: Dialect, host: str, port: int, token: bytes, *, writer: str, peer: str) -> socket.socket:
    """A tuned connection to ``peer``, greeted as ``writer``. Raises `TransportUnavailable`."""
    where = f"peer {peer} at {host} port {port}"
    if is_wildcard(host):
        raise TransportUnavailable(f"cannot connect to {where}: that is every address of a machine; advertise one")
    try:
        sock = dial(host, port, CONNECT_SECONDS)
    except (OSError, UnicodeError) as error:
        raise TransportUnavailable(f"cannot connect to {where}: {error}") from error
    try:
        greet(sock, dialect, writer, token, peer)
        tune(sock)
    except (OSError, EOFError, TransportError) as error:
        sock.close()
        raise TransportUnavailable(f"cannot connect to {where}: {error}") from error
    return sock
