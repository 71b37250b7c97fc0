"""The transports of one manager: those that were named, or with "auto" every one that works here."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Mapping, Sequence

from kvbaton.devices import Choice, Devices
from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport import AUTO, NAMES, Transport, create
from kvbaton.transport.preference import best_first, preference

logger = logging.getLogger(__name__)


def instance_of(transports: Sequence[str | Transport]) -> str:
    """The id of ready transports, by which peers can fence them; a new one where there are none."""
    given = {each.instance for each in transports if isinstance(each, Transport)}
    if len(given) > 1:
        raise ConfigurationError(
            f"the transports have {len(given)} different instance ids ({', '.join(sorted(given))}); give those of one "
            "rank the same"
        )
    return given.pop() if given else uuid.uuid4().hex


def make_transports(
    wanted: Sequence[str | Transport],
    options: Mapping[str, Mapping[str, str]],
    instance: str,
    regions: Sequence[Region],
    bind: str,
    advertise: str,
) -> tuple[dict[str, Transport], dict[str, str]]:
    """Those of the ``wanted`` transports that can reach ``regions``, registered, and why the others cannot; by name.

    ``options`` of those given by name. Raises `TransportUnavailable` with all reasons if there is none, and
    `ConfigurationError` for "auto" among others, and for options that nobody takes.
    """
    if AUTO not in wanted:
        return _make(wanted, options, instance, regions, bind, advertise)
    if len(wanted) > 1:
        raise ConfigurationError(f"transports: {AUTO!r} is every transport; pass it alone, or name those to use")
    ready, left_out = _make(NAMES, options, instance, regions, bind, advertise)
    sockets = ""
    for name, transport in list(ready.items()):
        if not transport.capabilities.cross_process:
            ready.pop(name).close()
        elif not preference(transport.capabilities).better_than_sockets:
            if sockets:
                # It would reach nobody else, listen at more ports and hold more memory.
                left_out[name] = (
                    f"no network card carries its bytes here, as with {sockets}; name it to use it all the same"
                )
                ready.pop(name).close()
            sockets = sockets or name
    if not ready:
        raise TransportUnavailable(f"no transport between processes can be used here: {_listed(left_out)}")
    return {transport.name: transport for transport in best_first(ready.values())}, left_out


def _make(
    wanted: Sequence[str | Transport],
    options: Mapping[str, Mapping[str, str]],
    instance: str,
    regions: Sequence[Region],
    bind: str,
    advertise: str,
) -> tuple[dict[str, Transport], dict[str, str]]:
    ready: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            f"transport_options are {options!r}; they must be options by transport: "
            '{"nixl": {"executor": "packed"}}'
        )
    unused = sorted(map(str, options.keys() - {each for each in wanted if isinstance(each, str)}))
    if unused:
        raise ConfigurationError(f"transport_options are given for {', '.join(unused)}, which are not in transports")
    near = functools.cache(lambda: _near(regions))
    for each in wanted:
        name = each if isinstance(each, str) else each.name
        transport = None
        try:
            transport = (
                create(each, instance=instance, bind=bind, advertise=advertise, options=options.get(each), near=near)
                if isinstance(each, str)
                else each
            )
            transport.register(regions)
        except (TransportUnavailable, TransportError) as error:
            left_out[name] = str(error)
            if transport is not None:
                transport.close()
            continue
        except BaseException:
            for made in (*ready.values(), *([transport] if transport is not None else [])):
                made.close()
            raise
        ready[name] = transport
    if not ready:
        raise TransportUnavailable(f"no transport can be used here: {_listed(left_out) or 'none was given'}")
    for name, reason in left_out.items():
        logger.info("transport not used: %s: %s", name, reason)
    return ready, left_out


def _near(regions: Sequence[Region]) -> Choice:
    """The network devices for ``regions``; the tool that knows GPUs is asked only where there is memory of one."""
    found = Devices.find(nvidia_smi="" if all(region.kind == "host" for region in regions) else None)
    choice = found.choose(regions)
    logger.info("network devices: %s (%s)", ", ".join(choice.devices) or "none", choice.why)
    return choice


def _listed(left_out: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
