"""Which network devices to use for a GPU or for host memory, and why. Pure: a machine's devices in, a choice out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbaton.devices.gpus import Gpu
from kvbaton.devices.nics import Nic
from kvbaton.devices.pci import Distance, distance, steps
from kvbaton.errors import ConfigurationError

VARIABLE = "KVBATON_DEVICES"
"""The environment variable that names devices where no option does."""


@dataclass(frozen=True)
class Choice:
    """The devices that were chosen, by name and in natural order; empty if there is none. ``why`` is one sentence."""

    devices: tuple[str, ...]
    why: str
    ports: tuple[str, ...] = ()
    """The active ports of the devices: "mlx5_0:1"."""


def wanted_devices(options: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, str]:
    """The list of devices that the user asked for, and where: the option ``devices`` before ``KVBATON_DEVICES``."""
    if options.get("devices", "").strip():
        return options["devices"], "devices="
    return environment.get(VARIABLE, ""), VARIABLE


def choose(nics: Sequence[Nic], *, gpu: Gpu | None = None, nodes: Sequence[int] = ()) -> Choice:
    """The active devices nearest to ``gpu``, or those of the NUMA ``nodes`` of host memory.

    Of those that are equally near, only the fastest: slower ones beside them serve storage and logins.
    """
    active = [nic for nic in nics if nic.active]
    if not active:
        if not nics:
            return Choice((), "this machine has no InfiniBand or RoCE device")
        return Choice((), f"no InfiniBand or RoCE device has an active port; found are {listed(nics)}")
    if gpu is not None:
        return _nearest(active, gpu)
    local = [nic for nic in active if nic.pci.numa_node in nodes]
    if local:
        numbers = ", ".join(str(node) for node in sorted({nic.pci.numa_node for nic in local}))
        return _fastest(local, f"host memory: on NUMA node {numbers}, where this process runs")
    return _fastest(active, "host memory: no device is known to be on a NUMA node of this process, so any")


def choose_by_name(nics: Sequence[Nic], text: str, source: str) -> Choice:
    """The devices that ``text`` names, separated by commas; ``mlx5_0:1`` names a port too. ``source`` said so.

    Raises `ConfigurationError`, with a list of what was found, for one that is not there or not active.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {nic.name: nic for nic in nics}
    for name in names:
        device, colon, number = name.partition(":")
        nic = known.get(device)
        if nic is None:
            raise ConfigurationError(f"{source} names device {device!r}, which is not here; found are {listed(nics)}")
        ports = [port for port in nic.ports if not colon or str(port.number) == number]
        if not any(port.active for port in ports):
            what = f"port {number} of device {device!r}" if colon else f"device {device!r}"
            raise ConfigurationError(f"{source} names {what}, which has no active port; found are {listed(nics)}")
    if not names:
        raise ConfigurationError(f"{source} is {text!r}, which names no device; found are {listed(nics)}")
    names = list(dict.fromkeys(names))
    chosen = [name if ":" in name else port for name in names for port in _ports(known[name.partition(":")[0]])]
    return Choice(tuple(names), f"{source} says so", tuple(dict.fromkeys(chosen)))


def listed(nics: Sequence[Nic]) -> str:
    """All devices, for messages."""
    return "; ".join(nic.describe() for nic in nics) or "none"


def _nearest(nics: Sequence[Nic], gpu: Gpu) -> Choice:
    by_distance = {nic.name: (distance(nic.pci, gpu.pci), steps(nic.pci, gpu.pci)) for nic in nics}
    nearest = min(by_distance.values())
    if nearest[0] > Distance.SAME_SWITCH:
        # The bridges in between are then no measure: the way leads through the processor.
        chosen = [nic for nic in nics if by_distance[nic.name][0] == nearest[0]]
    else:
        chosen = [nic for nic in nics if by_distance[nic.name] == nearest]
    return _fastest(chosen, f"{gpu.describe()}: {nearest[0].words}")


def _fastest(nics: Sequence[Nic], why: str) -> Choice:
    rate = max(nic.gbits for nic in nics)
    chosen = tuple(nic.name for nic in nics if nic.gbits == rate)
    slower = [nic.name for nic in nics if nic.gbits != rate]
    ports = tuple(port for nic in nics if nic.gbits == rate for port in _ports(nic))
    return Choice(chosen, why + (f"; without the slower {', '.join(slower)}" if slower else ""), ports)


def _ports(nic: Nic) -> list[str]:
    return [f"{nic.name}:{port.number}" for port in nic.ports if port.active]
