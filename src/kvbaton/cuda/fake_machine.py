"""The memory of devices that are none; see `kvbaton.cuda.fake`."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from kvbaton.memory import AttachedMemory, SharedMemory
from kvbaton.plan.boxes import Int64s

ELSEWHERE = 1 << 46
"""What is added to the address of host memory, which the kernel maps high up, to get one at which nothing is."""
PART_BYTES = 32
"""How much of memory that cannot be exported is one allocation."""


class DriverMisuse(AssertionError):
    """A caller broke the contract of `Driver`."""


class Mapping:
    """Device memory that can be addressed: where, whose, and how much work on it is under way."""

    def __init__(self, memory: SharedMemory | AttachedMemory, nbytes: int, device: int, exportable: bool) -> None:
        self.memory = memory
        self.base = memory.address ^ ELSEWHERE
        self.nbytes = nbytes
        self.device = device
        self.exportable = exportable
        self.under_way = 0
        self.opened = 0


class FakeMachine:
    """The memory of ``devices`` devices, and what is mapped of it in this process.

    ``links`` are the pairs of devices that reach each other; None is all of them. ``delay`` are seconds before each
    work of a stream begins; it may be set at any time.
    """

    def __init__(self, devices: int = 1, links: Iterable[tuple[int, int]] | None = None, delay: float = 0.0) -> None:
        # The same in each process of the host.
        self.uuids = tuple(f"fake-device-{number:04}".encode() for number in range(devices))
        self.links = None if links is None else {frozenset(pair) for pair in links}
        self.delay = delay
        self.misuses: list[str] = []
        self.failure = ""
        """Why the devices take no more work; empty while they do. May be set at any time."""
        self.lock = threading.Lock()
        self._mappings: dict[int, Mapping] = {}

    def allocate(self, nbytes: int, device: int = 0, *, exportable: bool = True) -> int:
        """New memory of a device; its address. What is not ``exportable`` is as memory of expandable segments."""
        mapping = Mapping(SharedMemory(nbytes), nbytes, device, exportable)
        return self.add(mapping)

    def free(self, base: int) -> None:
        """Give memory back. Raises `DriverMisuse` while work on it is under way."""
        with self.lock:
            mapping = self._mappings.get(base)
            self.require(mapping is not None, f"no memory begins at {base:#x}")
            assert mapping is not None
            self.require(not mapping.under_way, f"memory at {base:#x} was closed while work on it was under way")
            del self._mappings[base]
        mapping.memory.close()

    def array(self, base: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The bytes of an allocation, for a test to look at."""
        with self.lock:
            return self._mappings[base].memory.array

    @property
    def mapped(self) -> int:
        """How many allocations are mapped, own ones and those of others."""
        with self.lock:
            return len(self._mappings)

    def add(self, mapping: Mapping) -> int:
        """Map memory."""
        with self.lock:
            self._mappings[mapping.base] = mapping
        return mapping.base

    def at(self, address: int) -> Mapping | None:
        """What is mapped at ``address``."""
        with self.lock:
            return self._at(address)

    def _at(self, address: int) -> Mapping | None:
        for mapping in self._mappings.values():
            if mapping.base <= address < mapping.base + mapping.nbytes:
                return mapping
        return None

    def hold(self, addresses: Iterable[int]) -> list[Mapping]:
        """Note work on what is mapped at ``addresses``; `let_go` must follow."""
        with self.lock:
            held = [mapping for mapping in map(self._at, addresses) if mapping is not None]
            for mapping in held:
                mapping.under_way += 1
        return held

    def let_go(self, held: Iterable[Mapping]) -> None:
        """End what `hold` began."""
        with self.lock:
            for mapping in held:
                mapping.under_way -= 1

    def room(self, address: int) -> int:
        """Bytes from ``address`` to the end of what is mapped there; 0 where nothing is."""
        mapping = self.at(address)
        return mapping.base + mapping.nbytes - address if mapping else 0

    def require(self, kept: bool, what: str) -> None:
        """Raise `DriverMisuse` unless ``kept``."""
        if not kept:
            self.misuses.append(what)
            raise DriverMisuse(what)


def on_host(bases: Int64s) -> Int64s:
    """Where memory of a fake device really is, for a library that reaches it; other addresses stay as they are."""
    moved: Int64s = np.where(bases & ELSEWHERE, bases, bases ^ ELSEWHERE)
    return moved
