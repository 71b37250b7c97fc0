"""The text of network addresses, IPv6 included: parsed, printed, and never advertised as a wildcard."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from kvbaton.errors import AddressError

MAX_TEXT = 300
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+")


class Endpoint(NamedTuple):
    """A host (a name or an address, without brackets) and a port; ``port`` is None where none was given."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Endpoint:
        """The endpoint that ``text`` names: ``host``, ``host:port``, an IPv6 address, or ``[IPv6]:port``.

        Raises `AddressError` saying what is wrong with the text.
        """
        host, port_text = _split(text)
        _check_host(text, host, bracketed=text.startswith("["))
        if port_text is None:
            return cls(host, default_port)
        return cls(host, _parse_port(text, port_text))

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    @property
    def is_wildcard(self) -> bool:
        """Whether the host stands for every address of a machine, which nobody can dial."""
        return is_wildcard(self.host)

    @property
    def url(self) -> str:
        """The address as ZeroMQ takes it. Raises `AddressError` where there is no port."""
        if self.port is None:
            raise AddressError(
                f"address {self.host!r} has no port, and one is needed to connect: write it as {_example(self.host)}"
            )
        return f"tcp://{self}"

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def advertised(bind: str, advertise: str | None = None) -> str:
    """The host that peers are told: ``advertise`` if it is given, else ``bind``. Both are hosts without a port.

    Raises `AddressError` if that is a wildcard: a peer that dials it reaches itself.
    """
    host = bind if advertise is None else advertise
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if is_wildcard(host):
        raise AddressError(
            f"address {host!r} stands for every interface of this machine and cannot be dialled by a peer: "
            "pass advertise= with an address that peers can reach"
        )
    _check_host(host, host, bracketed=False)
    return host


def is_wildcard(host: str) -> bool:
    """Whether ``host`` is an unspecified address: 0.0.0.0, ::, or ``*``."""
    if host == "*":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from its own machine only: 127.0.0.0/8, ::1 or localhost.

    Other names are not asked for: what they mean may change, and differ from machine to machine.
    """
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _split(text: str) -> tuple[str, str | None]:
    if len(text) > MAX_TEXT:
        raise AddressError(f"an address of {len(text)} characters is too long (limit {MAX_TEXT})")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket:
            raise AddressError(f"address {text!r}: the bracket is not closed; write [IPv6]:port")
        if rest and not rest.startswith(":"):
            raise AddressError(f"address {text!r}: {rest!r} after the bracket is no :port")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        # More than one colon without brackets: all of it is an IPv6 address.
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _check_host(text: str, host: str, *, bracketed: bool) -> None:
    if not host:
        raise AddressError(f"address {text!r} has no host; write it as host:port")
    if ":" in host or bracketed:
        address, percent, scope = host.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError as error:
            raise AddressError(
                f"address {text!r}: {address!r} is no IPv6 address ({error}); write [IPv6]:port"
            ) from None
        if percent and not _SCOPE.fullmatch(scope):
            raise AddressError(f"address {text!r}: {scope!r} is no name of an interface")
    elif re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise AddressError(f"address {text!r}: {host!r} is no IPv4 address ({error})") from None
    elif not _NAME.fullmatch(host) or len(host) > 253:
        raise AddressError(f"address {text!r}: {host!r} is neither an IP address nor the name of a host")


def _parse_port(text: str, port: str) -> int:
    if not port:
        raise AddressError(f"address {text!r} ends with a colon but has no port; write it as host:port")
    if not re.fullmatch(r"[0-9]{1,10}", port) or int(port) > 65535:
        raise AddressError(f"address {text!r}: {port!r} is no port from 0 to 65535")
    return int(port)


def _example(host: str) -> str:
    return f"[{host}]:8998" if ":" in host else f"{host}:8998"
