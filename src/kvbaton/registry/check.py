"""Whether a registration can be believed: what a stranger sends is checked before it is kept or handed on."""

from __future__ import annotations

from kvbaton.address import Endpoint
from kvbaton.errors import AddressError, LayoutError
from kvbaton.layout import Coords, check_layout
from kvbaton.registry.base import Registration, RegistryRefused

MAX_TEXT = 1024


def coords_order(coords: Coords) -> tuple[int, int, int, int]:
    """Return the key by which ranks are ordered: dp, pp, cp, tp."""
    return (coords.dp[0], coords.pp[0], coords.cp[0], coords.tp[0])


def _check_endpoint(where: str, endpoint: str) -> None:
    scheme, _, text = endpoint[: MAX_TEXT + 1].partition("://")
    try:
        address = Endpoint.parse(text)
    except AddressError as error:
        raise RegistryRefused(f"{where}: endpoint {endpoint[:80]!r} is not like tcp://host:port: {error}") from None
    if scheme != "tcp" or not address.port:
        raise RegistryRefused(f"{where}: endpoint {endpoint[:80]!r} is not like tcp://host:port")
    if address.is_wildcard:
        raise RegistryRefused(
            f"{where}: endpoint {endpoint!r} stands for every address of a machine, and a peer that dials it reaches "
            "itself: pass advertise= with an address that peers can reach"
        )


def check_registration(registration: Registration) -> None:
    """Raise `RegistryRefused`, naming the field and its value, if something in it is what no rank can mean."""
    where = f"rank {registration.coords} ({registration.instance})"
    _check_endpoint(where, registration.endpoint)
    if len(registration.model) > MAX_TEXT:
        raise RegistryRefused(f"{where}: the model's name has {len(registration.model)} characters, over {MAX_TEXT}")
    try:
        # The sizes of the regions are known to the rank alone.
        check_layout(registration.layout, None)
    except LayoutError as error:
        raise RegistryRefused(f"{where}: {error}") from None
