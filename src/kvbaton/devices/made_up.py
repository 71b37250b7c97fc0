"""Machines that do not exist: writes the part of sysfs and proc that describes one. For tests."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path


class MadeUpMachine:
    """A tree under ``root``. Places are chains of bridges: ``"pci0000:00/0000:00:01.0/0000:01:00.0"``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def node(self, number: int, processors: str) -> None:
        """A NUMA node with these processors ("0-31")."""
        self.write(f"sys/devices/system/node/node{number}/cpulist", processors)

    def pci(self, place: str, node: int = -1) -> Path:
        """A PCI device; returns its folder."""
        folder = self.root / "sys/devices" / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{node}\n")
        self._link(self.root / "sys/bus/pci/devices" / folder.name, folder)
        return folder

    def netdev(self, name: str, place: str = "", mtu: int = 1500) -> None:
        """An Ethernet device, of a PCI device where ``place`` is given."""
        self.write(f"sys/class/net/{name}/mtu", str(mtu))
        if place:
            self._link(self.root / "sys/class/net" / name / "device", self.root / "sys/devices" / place)

    def nic(
        self,
        name: str,
        place: str = "",
        *,
        node: int = -1,
        state: str = "4: ACTIVE",
        link_layer: str = "InfiniBand",
        rate: str = "400 Gb/sec (4X NDR)",
        netdev: str = "",
        gids: Sequence[tuple[str, str]] = (("fe80::1", "IB/RoCE v1"),),
        port: int = 1,
    ) -> None:
        """A device with one port; called again with another ``port``, one more. ``gids`` are addresses and kinds."""
        folder = f"sys/class/infiniband/{name}"
        if place:
            device = self.pci(place, node)
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            self._link(self.root / folder / "device", device)
        at = f"{folder}/ports/{port}"
        self.write(f"{at}/state", state)
        self.write(f"{at}/link_layer", link_layer)
        self.write(f"{at}/rate", rate)
        for index, (address, kind) in enumerate(gids):
            self.write(f"{at}/gids/{index}", ipaddress.IPv6Address(address).exploded)
            self.write(f"{at}/gid_attrs/types/{index}", kind)
            self.write(f"{at}/gid_attrs/ndevs/{index}", netdev)

    def amd_gpu(self, number: int, place: str, *, node: int = -1, name: str = "gfx942", memory: int = 0) -> None:
        """An AMD GPU as the kernel's compute driver shows it; ``number`` is that of its node in the driver's tree."""
        device = self.pci(place, node)
        domain, bus, rest = device.name.split(":")
        slot, function = rest.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function, 16)
        at = f"sys/class/kfd/kfd/topology/nodes/{number}"
        self.write(f"{at}/properties", f"simd_count 304\nlocation_id {location}\ndomain {int(domain, 16)}")
        self.write(f"{at}/name", name)
        (device / "mem_info_vram_total").write_text(str(memory))

    def nvidia_gpu(self, place: str, *, node: int = -1, name: str = "NVIDIA H200") -> str:
        """An NVIDIA GPU in the driver's tree; returns its address."""
        device = self.pci(place, node)
        self.write(f"proc/driver/nvidia/gpus/{device.name}/information", f"Model: \t\t {name}\nBus Type: \t PCIe")
        return device.name

    def write(self, path: str, text: str) -> None:
        """A file of the tree, with a line end as the kernel writes it."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    @staticmethod
    def _link(link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
