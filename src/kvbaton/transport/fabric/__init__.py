"""Libraries of vendors as transports: `base` is the contract of an adapter, `transport` what is the same over all."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbaton.errors import ConfigurationError, TransportUnavailable

if TYPE_CHECKING:
    from kvbaton.transport.fabric.transport import FabricTransport

FABRICS = {"nixl": "NixlFabric", "mooncake": "MooncakeFabric", "mori": "MoriFabric", "memory": "MemoryFabric"}
"""The adapters: the module ``kvbaton.transport.fabric.<name>`` and its class.

A class is called with the instance id and the keywords ``options``, ``bind`` and ``advertise``; ``OPTIONS`` of its
module, where it is there, says in words what each option is for.
"""


def open_transport(
    name: str, instance: str, bind: str = "127.0.0.1", advertise: str = "", options: Mapping[str, str] | None = None
) -> FabricTransport:
    """Make the transport over the fabric ``name``, which is one of `FABRICS`.

    ``options`` are those of `kvbaton.transport.fabric.options.FabricOptions`, and the adapter's own. Raises
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
    fabric = adapter(instance, options=own, bind=bind, advertise=advertise)
    try:
        return FabricTransport(instance, fabric, bind=bind, advertise=advertise, options=generic)
    except BaseException:
        fabric.close()
        raise


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
