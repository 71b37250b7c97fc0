"""Sockets of transports: how one listens, dials and greets, and finds a dead host out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from kvbaton.address import is_wildcard
from kvbaton.errors import AddressError, TransportError, TransportUnavailable
from kvbaton.transport.resolve import resolve
from kvbaton.transport.wire import Dialect, Full, greet

CONNECT_SECONDS = 5.0
"""How long it may take to connect to a peer, its greeting and the rest of a handshake included."""
ANSWER_SECONDS = 2.0
"""How long of that its host may take to accept a connection, and to be looked up where it is a name. Peers name
addresses, and those may be dead."""
CROWD = 16
CROWDED_SECONDS = 1.2
"""The same, while more than `CROWD` of them are waited for. The operating system asks again after a second."""
PAUSES = (0.05, 0.1, 0.2, 0.4)
"""Seconds before each new try with a receiver that has no room, or hung up before it answered."""


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


@contextlib.contextmanager
def cut_off_after(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Let what is done with ``sock`` inside take so many seconds, all of it together: then it is shut down.

    Raises ``TimeoutError`` in place of what the end of the socket led to.
    """
    late = threading.Event()

    def cut_off() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    # From outside: a timeout on each read would let the other side drip bytes for ever.
    guard = threading.Timer(seconds, cut_off)
    guard.name, guard.daemon = f"{threading.current_thread().name}-guard", True
    guard.start()
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        if late.is_set():
            raise TimeoutError(f"it took more than {seconds:.3g} s") from error
        raise
    finally:
        guard.cancel()


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


def reach(
    dialect: Dialect, host: str, port: int, token: bytes, *, writer: str, peer: str, seconds: float = CONNECT_SECONDS
) -> socket.socket:
    """A tuned connection to ``peer``, greeted as ``writer``, within ``seconds``. Raises `TransportUnavailable`."""
    with _waiting:
        return _reach(dialect, host, port, token, writer, peer, time.monotonic() + seconds)


class _Waiting:
    """How many threads wait for peers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def patience(self) -> float:
        """Seconds that a host may take to accept a connection."""
        return CROWDED_SECONDS if self._count > CROWD else ANSWER_SECONDS

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1


_waiting = _Waiting()


def _reach(dialect: Dialect, host: str, port: int, token: bytes, writer: str, peer: str, end: float) -> socket.socket:
    where = f"peer {peer} at {host} port {port}"
    if is_wildcard(host):
        raise TransportUnavailable(f"cannot connect to {where}: that is every address of a machine; advertise one")
    try:
        addresses = resolve(host, min(_waiting.patience, end - time.monotonic()))
    except AddressError as error:
        raise TransportUnavailable(f"cannot connect to {where}: {error}") from error
    for pause in (*PAUSES, None):
        sock = None
        try:
            sock = _connect(addresses, port, end)
            sock.settimeout(None)
            with cut_off_after(sock, max(0.1, end - time.monotonic())):
                greet(sock, dialect, writer, token, peer)
            tune(sock)
            return sock
        except (OSError, EOFError, TransportError) as error:
            if sock is not None:
                sock.close()
            crowded = sock is not None and isinstance(error, Full | EOFError | ConnectionError)
            if not crowded or pause is None or time.monotonic() + pause > end:
                raise TransportUnavailable(f"cannot connect to {where}: {error}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _connect(addresses: tuple[str, ...], port: int, end: float) -> socket.socket:
    """A connection to the first of ``addresses`` that accepts one. Raises what the last one raised."""
    *others, last = addresses
    for address in others:
        with contextlib.suppress(OSError):
            return _connect_one(address, port, end)
    return _connect_one(last, port, end)


def _connect_one(address: str, port: int, end: float) -> socket.socket:
    patience = min(_waiting.patience, end - time.monotonic())
    return socket.create_connection((address, port), timeout=max(0.1, patience))
