"""Network devices and GPUs of a machine, how near they are to each other, and which ones to use for what memory.

Everything is read from a tree of files whose root is an argument, so that any machine can be described by a folder.
"""

from __future__ import annotations

from kvbaton.devices.choose import VARIABLE, Choice, choose, choose_by_name
from kvbaton.devices.gpus import Gpu, find_gpus
from kvbaton.devices.machine import Devices
from kvbaton.devices.nics import Gid, Nic, Port, find_nics
from kvbaton.devices.pci import Distance, PciDevice, distance

__all__ = [
    "VARIABLE",
    "Choice",
    "Devices",
    "Distance",
    "Gid",
    "Gpu",
    "Nic",
    "PciDevice",
    "Port",
    "choose",
    "choose_by_name",
    "distance",
    "find_gpus",
    "find_nics",
]
