"""InfiniBand and RoCE devices of a machine, read from sysfs. Nothing here opens a device."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from kvbaton.devices.files import names_in, read_number, read_text
from kvbaton.devices.pci import PciDevice

MTUS = (4096, 2048, 1024, 512, 256)
"""The payload bytes of one packet that RDMA knows."""
ROCE_HEADERS = 96
"""What the kernel leaves free for headers when it takes a RoCE MTU from that of the Ethernet device."""


@dataclass(frozen=True)
class Gid:
    """One of the addresses of a port."""

    index: int
    address: str
    """An IPv4 address where the GID stands for one, else an IPv6 address."""
    kind: str
    """ "RoCE v2", "IB/RoCE v1", or empty where the kernel does not say."""
    netdev: str = ""


@dataclass(frozen=True)
class Port:
    """A port of a device."""

    number: int
    state: str
    """ "ACTIVE", "DOWN", "INIT"... """
    link_layer: str
    """ "InfiniBand" or "Ethernet"."""
    gbits: float
    """Gbit/s; 0 where the kernel does not say."""
    mtu: int
    """Payload bytes of one packet, of a RoCE port: what the MTU of its Ethernet device allows. 0: not known."""
    netdev: str
    netdev_mtu: int
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        """Whether it can be used."""
        return self.state == "ACTIVE"

    @property
    def best_gid(self) -> Gid | None:
        """The GID to use: of RoCE v2 that of an IPv4 address first, of InfiniBand the first one."""
        return min(self.gids, key=lambda gid: (*_roce_order(gid), gid.index), default=None)


@dataclass(frozen=True)
class Nic:
    """An InfiniBand or RoCE device."""

    name: str
    pci: PciDevice
    ports: tuple[Port, ...]

    @property
    def active(self) -> bool:
        """Whether any of its ports can be used."""
        return any(port.active for port in self.ports)

    @property
    def gbits(self) -> float:
        """Gbit/s of its active ports together."""
        return sum(port.gbits for port in self.ports if port.active)

    def describe(self) -> str:
        """For lists in messages: "mlx5_0 (port 1 ACTIVE, Ethernet, 400 Gbit/s, NUMA node 0)"."""
        ports = ", ".join(
            f"port {port.number} {port.state}, {port.link_layer}, {port.gbits:g} Gbit/s" for port in self.ports
        )
        where = f"NUMA node {self.pci.numa_node}" if self.pci.numa_node >= 0 else "NUMA node unknown"
        return f"{self.name} ({ports or 'no ports'}, {where})"


def find_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """The devices under ``root`` (which holds ``sys``), in natural order of their names."""
    folder = root / "sys/class/infiniband"
    return tuple(_nic(root, folder / name) for name in names_in(folder))


def roce_mtu(netdev_mtu: int) -> int:
    """The RDMA payload of a packet that an Ethernet device of that MTU carries; 0 if none fits."""
    return next((mtu for mtu in MTUS if mtu <= netdev_mtu - ROCE_HEADERS), 0)


def _nic(root: Path, folder: Path) -> Nic:
    ports = tuple(
        _port(root, folder / "ports" / name, int(name)) for name in names_in(folder / "ports") if name.isdecimal()
    )
    pci = PciDevice.at(folder / "device")
    if not pci.address:
        # Software devices have no PCI device of their own, but that of the Ethernet device below them.
        below = [PciDevice.at(root / "sys/class/net" / port.netdev / "device") for port in ports if port.netdev]
        pci = next((each for each in below if each.address), pci)
    return Nic(folder.name, pci, ports)


def _port(root: Path, folder: Path, number: int) -> Port:
    link_layer = read_text(folder / "link_layer") or "InfiniBand"
    gids = tuple(gid for name in names_in(folder / "gids") if name.isdecimal() and (gid := _gid(folder, int(name))))
    netdev = next((gid.netdev for gid in gids if gid.netdev), "")
    netdev_mtu = read_number(root / "sys/class/net" / netdev / "mtu", 0) if netdev else 0
    return Port(
        number=number,
        # "4: ACTIVE", "100 Gb/sec (4X EDR)".
        state=read_text(folder / "state").rpartition(":")[2].strip() or "unknown",
        link_layer=link_layer,
        gbits=_leading_number(read_text(folder / "rate")),
        mtu=roce_mtu(netdev_mtu) if link_layer == "Ethernet" and netdev_mtu else 0,
        netdev=netdev,
        netdev_mtu=netdev_mtu,
        gids=gids,
    )


def _gid(folder: Path, index: int) -> Gid | None:
    try:
        address = ipaddress.IPv6Address(read_text(folder / "gids" / str(index)))
    except ValueError:
        return None
    if int(address) == 0:
        return None
    return Gid(
        index,
        str(address.ipv4_mapped or address),
        read_text(folder / "gid_attrs/types" / str(index)),
        read_text(folder / "gid_attrs/ndevs" / str(index)),
    )


def _roce_order(gid: Gid) -> tuple[bool, bool, bool]:
    address = ipaddress.ip_address(gid.address)
    return gid.kind != "RoCE v2", address.version != 4, address.is_link_local


def _leading_number(text: str) -> float:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return 0.0
