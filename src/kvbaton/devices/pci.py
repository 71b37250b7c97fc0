"""How near two PCI devices are to each other, by the bridges above them."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path

from kvbaton.devices.files import read_number

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"([0-9a-f]{4,}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


class Distance(enum.IntEnum):
    """What two devices share; less is nearer."""

    SAME_SWITCH = 0
    SAME_ROOT_PORT = 1
    SAME_HOST_BRIDGE = 2
    SAME_NUMA_NODE = 3
    ACROSS = 4
    UNKNOWN = 5

    @property
    def words(self) -> str:
        """For sentences: "it is ... "."""
        return _WORDS[self]


_WORDS = {
    Distance.SAME_SWITCH: "on the same PCI switch",
    Distance.SAME_ROOT_PORT: "behind the same PCI root port",
    Distance.SAME_HOST_BRIDGE: "under the same PCI host bridge",
    Distance.SAME_NUMA_NODE: "on the same NUMA node",
    Distance.ACROSS: "across NUMA nodes",
    Distance.UNKNOWN: "at an unknown distance",
}


@dataclass(frozen=True)
class PciDevice:
    """Where a device is plugged in. All is empty, and the node -1, for a device that is not on a PCI bus."""

    address: str = ""
    """As the kernel writes it: "0000:17:00.0"."""
    chain: tuple[str, ...] = ()
    """The host bridge, every bridge below it, and the device itself."""
    numa_node: int = -1
    """-1: the machine does not say."""

    @classmethod
    def at(cls, path: Path) -> PciDevice:
        """The device that a path in sysfs leads to (``/sys/class/net/eth0/device``, for example)."""
        try:
            parts = path.resolve(strict=True).parts
        except (OSError, RuntimeError):
            return cls()
        bridge = next((number for number, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
        if bridge is None:
            return cls(numa_node=read_number(path / "numa_node", -1))
        last = max((number for number, part in enumerate(parts) if _ADDRESS.fullmatch(part)), default=-1)
        if last < bridge:
            return cls()
        device = Path(*parts[: last + 1])
        return cls(parts[last], parts[bridge : last + 1], read_number(device / "numa_node", -1))

    @classmethod
    def of_address(cls, root: Path, address: str) -> PciDevice:
        """The device of that address, under ``root`` (which holds ``sys``); only the address where it is not there."""
        address = normal_address(address)
        found = cls.at(root / "sys/bus/pci/devices" / address)
        return found if found.address else cls(address)


def normal_address(text: str) -> str:
    """A PCI address as the kernel writes it; tools write more zeros and capitals: "00000000:17:00.0"."""
    address = text.strip().lower()
    if address.count(":") == 1:
        address = "0000:" + address
    domain, _, rest = address.partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{rest}"


def distance(one: PciDevice, other: PciDevice) -> Distance:
    """What the two share."""
    shared = _shared(one, other)
    # The host bridge, a root port, and the upper side of a switch.
    if shared >= 3:
        return Distance.SAME_SWITCH
    if shared == 2:
        return Distance.SAME_ROOT_PORT
    if shared == 1:
        return Distance.SAME_HOST_BRIDGE
    if one.numa_node >= 0 and other.numa_node >= 0:
        return Distance.SAME_NUMA_NODE if one.numa_node == other.numa_node else Distance.ACROSS
    return Distance.UNKNOWN


def steps(one: PciDevice, other: PciDevice) -> int:
    """How many bridges lie between the two; for telling apart devices of the same `distance`."""
    return len(one.chain) + len(other.chain) - 2 * _shared(one, other)


def _shared(one: PciDevice, other: PciDevice) -> int:
    shared = 0
    for here, there in zip(one.chain, other.chain, strict=False):
        if here != there:
            break
        shared += 1
    return shared
