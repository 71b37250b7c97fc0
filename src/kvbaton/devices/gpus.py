"""GPUs of a machine: AMD's from the kernel's own tree, NVIDIA's from the driver's tree and from ``nvidia-smi``."""

from __future__ import annotations

import csv
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvbaton.devices.files import names_in, read_number, read_text
from kvbaton.devices.pci import PciDevice

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,pci.bus_id,name,memory.total", "--format=csv,noheader,nounits")
SECONDS = 10.0
"""How long ``nvidia-smi`` may take; it waits for drivers that are being loaded."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``index`` counts those of one vendor in the order of the driver."""

    vendor: str
    """ "nvidia" or "amd"."""
    index: int
    name: str
    pci: PciDevice
    memory_bytes: int = 0
    """0: not known."""

    def describe(self) -> str:
        """For messages: "nvidia GPU 0 (NVIDIA H200, 0000:18:00.0)"."""
        return f"{self.vendor} GPU {self.index} ({self.name}, {self.pci.address or 'no PCI address'})"


def find_gpus(root: Path = Path("/"), nvidia_smi: str = "") -> tuple[Gpu, ...]:
    """The GPUs under ``root`` (which holds ``sys`` and ``proc``); ``nvidia_smi`` is what `run_nvidia_smi` gave."""
    nvidia = parse_nvidia_smi(root, nvidia_smi) or _nvidia_in_proc(root)
    return (*nvidia, *_amd(root))


def run_nvidia_smi() -> str:
    """What ``nvidia-smi`` says of the GPUs; empty where it is not installed, fails, or takes longer than it may."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return ""
    try:
        ended = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def parse_nvidia_smi(root: Path, text: str) -> tuple[Gpu, ...]:
    """The GPUs in the output of ``nvidia-smi``; lines that say something else are passed over."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 4 or not row[0].strip().isdecimal() or row[1].count(":") != 2:
            continue
        index, address, name, megabytes = (field.strip() for field in row)
        memory = int(megabytes) << 20 if megabytes.isdecimal() else 0
        gpus.append(Gpu("nvidia", int(index), name, PciDevice.of_address(root, address), memory))
    return tuple(gpus)


def _nvidia_in_proc(root: Path) -> tuple[Gpu, ...]:
    folder = root / "proc/driver/nvidia/gpus"
    gpus = []
    for index, address in enumerate(sorted(names_in(folder))):
        says = _fields(read_text(folder / address / "information"), ":")
        gpus.append(Gpu("nvidia", index, says.get("Model", "NVIDIA GPU"), PciDevice.of_address(root, address)))
    return tuple(gpus)


def _amd(root: Path) -> tuple[Gpu, ...]:
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    gpus: list[Gpu] = []
    for name in names_in(folder):
        says = _fields(read_text(folder / name / "properties"), " ")
        if not _number(says, "simd_count"):
            # Nodes of the kernel's tree are CPUs too.
            continue
        location = _number(says, "location_id")
        address = (
            f"{_number(says, 'domain'):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}"
        )
        pci = PciDevice.of_address(root, address)
        product = read_text(root / "sys/bus/pci/devices" / pci.address / "product_name")
        model = product or read_text(folder / name / "name") or f"gfx{_number(says, 'gfx_target_version')}"
        memory = read_number(root / "sys/bus/pci/devices" / pci.address / "mem_info_vram_total", 0)
        gpus.append(Gpu("amd", len(gpus), model, pci, memory))
    return tuple(gpus)


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _number(fields: dict[str, str], name: str) -> int:
    value = fields.get(name, "")
    return int(value) if value.isdecimal() else 0
