"""Libraries of vendors as transports: `base` is the contract of an adapter, `transport` what is the same over all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from kvbaton.errors import ConfigurationError, TransportUnavailable

if TYPE_CHECKING:
    from kvbaton.devices.choose import Choice
    from kvbaton.transport.fabric.transport import FabricTransport

FABRICS = {"nixl": "NixlFabric", "mooncake": "MooncakeFabric", "mori": "MoriFabric", "memory": "MemoryFabric"}
"""The adapters: the module ``kvbaton.transport.fabric.<name>`` and its class.

A class is called with the instance id and the keywords ``options``, ``bind`` and ``advertise``; ``OPTIONS`` of its
module, where it is there, says in words what each option is for. ``devices_option(options, near)`` of it, where it is
there, gives the option ``devices`` for what ``near()`` finds, or "" where these options, or the environment, leave it
nothing to be told.
"""


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
        module = importlib.import_module(f"kvbaton.transport.fabric.{name}")
        adapter = getattr(module, FABRICS[name])
    except ImportError as error:
        raise TransportUnavailable(
            f"{name} cannot be used here: {error}; install its library with pip install 'kvbaton[{name}]'"
        ) from error
    _check_own(name, own, getattr(module, "OPTIONS", None))
    fabric = adapter(instance, options=_with_devices(module, own, near), bind=bind, advertise=advertise)
    try:
        return FabricTransport(instance, fabric, bind=bind, advertise=advertise, options=generic)
    except BaseException:
        fabric.close()
        raise


def _with_devices(module: ModuleType, own: dict[str, str], near: Callable[[], Choice] | None) -> dict[str, str]:
    """The options of an adapter, with the network devices that are near where it can be told."""
    tell = getattr(module, "devices_option", None)
    if near is None or tell is None or own.get("devices"):
        return own
    devices = tell(own, near)
    return {**own, "devices": devices} if devices else own


def _check_own(name: str, given: Mapping[str, str], known: object) -> None:
    """Raise `ConfigurationError` for options that neither the adapter nor the transport knows, with all that are."""
    from kvbaton.transport.fabric.options import FabricOptions

    if not isinstance(known, Mapping):
        return
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ConfigurationError(
            f"{name} has no option {', '.join(unknown)}; known are {', '.join((*known, *FabricOptions._fields))}"
        )
