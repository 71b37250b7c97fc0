"""Libraries of vendors as transports: `base` is the contract of an adapter, `transport` what is the same over all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvbaton.errors import ConfigurationError, TransportUnavailable

if TYPE_CHECKING:
    from kvbaton.devices.choose import Choice
    from kvbaton.transport.fabric.base import Fabric
    from kvbaton.transport.fabric.transport import FabricTransport

FABRICS = {
    "nixl": "nixl.adapter:NixlFabric",
    "mooncake": "mooncake.adapter:MooncakeFabric",
    "mori": "mori.adapter:MoriFabric",
    "memory": "memory:MemoryFabric",
}
"""The adapters: the module, from this package on, and the class, which is a `kvbaton.transport.fabric.base.Fabric`."""


def adapter_of(name: str) -> type[Fabric]:
    """The adapter ``name``, which is one of `FABRICS`. The library itself need not be installed."""
    module, _, kind = FABRICS[name].partition(":")
    found: type[Fabric] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    return found


def open_transport(
    name: str,
    instance: str,
    bind: str = "127.0.0.1",
    advertise: str = "",
    options: Mapping[str, str] | None = None,
    near: Callable[[], Choice] | None = None,
) -> FabricTransport:
    """Make the transport over the fabric ``name``, which is one of `FABRICS`.

    ``options`` are those of `kvbaton.transport.fabric.options.FabricOptions`, and the adapter's own; devices that they
    do not name are what ``near`` finds. Raises
    `ConfigurationError` for others, `TransportUnavailable` where the library or the device is missing.
    """
    from kvbaton.transport.fabric.options import FabricOptions
    from kvbaton.transport.fabric.transport import FabricTransport

    _, own = FabricOptions.take(options or {})
    generic = {key: value for key, value in (options or {}).items() if key not in own}
    try:
        adapter = adapter_of(name)
    except ImportError as error:
        raise TransportUnavailable(
            f"{name} cannot be used here: {error}; install its library with pip install 'kvbaton[{name}]'"
        ) from error
    unknown = sorted(own.keys() - adapter.OPTIONS.keys())
    if unknown:
        known = ", ".join((*adapter.OPTIONS, *FabricOptions._fields))
        raise ConfigurationError(f"{name} has no option {', '.join(unknown)}; known are {known}")
    if near is not None and not own.get("devices") and (devices := adapter.devices_option(own, near)):
        own["devices"] = devices
    make: Callable[..., Fabric] = adapter
    fabric = make(instance, options=own, bind=bind, advertise=advertise)
    try:
        return FabricTransport(instance, fabric, bind=bind, advertise=advertise, options=generic)
    except BaseException:
        fabric.close()
        raise
