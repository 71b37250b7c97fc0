"""The devices of this machine together, and what transports use of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbaton.devices.choose import Choice, choose, choose_by_name, wanted_devices
from kvbaton.devices.files import names_in, numbers_in_list, read_text
from kvbaton.devices.gpus import Gpu, find_gpus, run_nvidia_smi
from kvbaton.devices.nics import Nic, find_nics
from kvbaton.memory import Region

ROOT = Path("/")


@dataclass(frozen=True)
class Devices:
    """What one machine has."""

    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    nodes: tuple[int, ...]
    """NUMA nodes whose processors this process may run on."""

    @classmethod
    def find(
        cls, root: Path = ROOT, *, nvidia_smi: str | None = None, processors: Sequence[int] | None = None
    ) -> Devices:
        """Look at ``root`` (which holds ``sys`` and ``proc``).

        ``nvidia_smi`` is the text of that tool (None: run it), ``processors`` those of this process (None: ask).
        """
        smi = run_nvidia_smi() if nvidia_smi is None else nvidia_smi
        allowed = sorted(os.sched_getaffinity(0)) if processors is None else processors
        return cls(find_nics(root), find_gpus(root, smi), nodes_of(root, allowed))

    def choose(self, regions: Sequence[Region] = (), options: Mapping[str, str] | None = None) -> Choice:
        """The network devices for ``regions``, unless the option ``devices`` or ``KVBATON_DEVICES`` names some.

        Memory of several GPUs gets the devices near any of them. Raises `ConfigurationError`, with a list of what was
        found, for a device that is named and not there, or has no active port.
        """
        text, source = wanted_devices(options or {}, os.environ)
        if text.strip():
            return choose_by_name(self.nics, text, source)
        numbers = sorted({region.device for region in regions if region.kind != "host"})
        gpus = [gpu for number in numbers if (gpu := self.gpu_of_torch(number)) is not None]
        choices = [choose(self.nics, gpu=gpu) for gpu in gpus] or [choose(self.nics, nodes=self.nodes)]
        chosen = {name for choice in choices for name in choice.devices}
        return Choice(
            tuple(nic.name for nic in self.nics if nic.name in chosen),
            "; ".join(dict.fromkeys(choice.why for choice in choices)),
            tuple(dict.fromkeys(port for choice in choices for port in choice.ports)),
        )

    def choose_for_gpus(self, options: Mapping[str, str] | None = None) -> dict[str, Choice]:
        """The choice for host memory and for that of each GPU, by what it is for. Raises as `choose`."""
        text, source = wanted_devices(options or {}, os.environ)
        if text.strip():
            return {"all memory": choose_by_name(self.nics, text, source)}
        choices = {"host memory": choose(self.nics, nodes=self.nodes)}
        return choices | {f"{gpu.vendor} GPU {gpu.index}": choose(self.nics, gpu=gpu) for gpu in self.gpus}

    def gpu_of_torch(self, number: int) -> Gpu | None:
        """The GPU that torch calls ``cuda:number``; None where it is not known.

        ``CUDA_VISIBLE_DEVICES`` may have changed the order, so torch is asked where it says; else the driver's order
        counts.
        """
        address = _address_by_torch(number)
        if address:
            return next((gpu for gpu in self.gpus if gpu.pci.address.rpartition(".")[0] == address), None)
        return next((gpu for gpu in self.gpus if gpu.index == number), None)


def nodes_of(root: Path, processors: Sequence[int]) -> tuple[int, ...]:
    """The NUMA nodes of ``processors``."""
    folder, nodes = root / "sys/devices/system/node", []
    for name in names_in(folder):
        if name.startswith("node") and name[4:].isdecimal():
            held = numbers_in_list(read_text(folder / name / "cpulist"))
            if set(held) & set(processors):
                nodes.append(int(name[4:]))
    return tuple(nodes)


def _address_by_torch(number: int) -> str:
    """The PCI address without the function, if torch has its devices up already."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or number >= torch.cuda.device_count():
        return ""
    properties = torch.cuda.get_device_properties(number)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{device:02x}"
