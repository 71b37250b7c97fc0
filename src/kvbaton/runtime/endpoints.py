"""Control endpoints, ``tcp://host:port``, as peers name them."""

from __future__ import annotations

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError
from kvbaton.transport.resolve import is_address, resolve


def numeric(endpoint: str, seconds: float) -> str:
    """The control ``endpoint``, with an address where it has the name of a host. Takes ``seconds`` at most.

    Raises `AddressError` for a text that is no ``tcp://host:port``, for a wildcard, and for a name that is not found.
    """
    address = _parsed(endpoint)
    try:
        host = resolve(address.host, seconds)[0]
    except AddressError as error:
        raise AddressError(f"control endpoint {endpoint!r}: {error}") from error
    return Endpoint(host, address.port).url


def is_numeric(endpoint: str) -> bool:
    """Whether the control ``endpoint`` has an address, and no name. Raises `AddressError` as `numeric`."""
    return is_address(_parsed(endpoint).host)


def _parsed(endpoint: str) -> Endpoint:
    scheme, _, where = endpoint.partition("://")
    address = Endpoint.parse(where) if scheme == "tcp" else None
    if address is None or address.port is None:
        raise AddressError(f"control endpoint {endpoint!r} is not of the form tcp://host:port")
    if address.is_wildcard:
        raise AddressError(
            f"control endpoint {endpoint!r} stands for every address of a machine, so that we would reach "
            "ourselves: pass advertise= on the side that registered it"
        )
    return address
