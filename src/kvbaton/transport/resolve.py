"""Names of hosts that peers named, looked up within a time: the resolver of the operating system has no deadline.

Its default is to wait 5 s for each server and try, and a name can be made to cost all of them. So look-ups run in
threads of their own, a few at a time, and whoever asked goes on without those that do not end.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time

from kvbaton.address import is_wildcard
from kvbaton.errors import AddressError

AT_ONCE = 16
"""Look-ups under way in a process, those that nobody waits for any more included."""
MOST_ADDRESSES = 4
"""Of a host that has more, only the first are used."""

_free = threading.BoundedSemaphore(AT_ONCE)


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str, seconds: float) -> tuple[str, ...]:
    """The IP addresses of ``host``, the preferred one first; an address is returned as it is. Takes ``seconds``.

    Raises `AddressError` where the name is not known, is not answered in time, or stands for a wildcard.
    """
    if is_address(host):
        return (host,)
    limit = time.monotonic() + seconds
    late = AddressError(f"host {host!r} was not looked up within {seconds:.3g} s: advertise an IP address")
    if not _free.acquire(timeout=max(0.0, seconds)):
        raise late
    answer: queue.SimpleQueue[list[str] | AddressError] = queue.SimpleQueue()
    thread = threading.Thread(target=_ask, args=(host, answer), name="kvbaton-resolver", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _free.release()
        raise AddressError(f"host {host!r} was not looked up: {error}") from error
    try:
        found = answer.get(timeout=max(0.0, limit - time.monotonic()))
    except queue.Empty:
        raise late from None
    if isinstance(found, AddressError):
        raise found
    return tuple(found)


def _ask(host: str, answer: queue.SimpleQueue[list[str] | AddressError]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        # ValueError: a name that is no text for the resolver.
        answer.put(AddressError(f"host {host!r} was not found: {error}"))
    else:
        addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))[:MOST_ADDRESSES]
        wildcard = next(filter(is_wildcard, addresses), "")
        answer.put(AddressError(f"host {host!r} is {wildcard}: every address of a machine") if wildcard else addresses)
    finally:
        _free.release()
