"""Device memory for checks, and which memory suits a transport."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kvbaton.cuda
from kvbaton.cuda.base import Driver
from kvbaton.memory import Region
from kvbaton.transport.base import Capabilities
from kvbaton.transport.conformance.case import Bytes, Memory
from kvbaton.transport.conformance.suite import host_memory


class DeviceMemory(Memory):
    """``nbytes`` zeroed bytes of a device of ``driver`` (that of this process by default).

    Raises `TransportUnavailable` where there is none.
    """

    def __init__(self, nbytes: int, device: int = 0, driver: Driver | None = None) -> None:
        self._driver = driver or kvbaton.cuda.driver()
        self._device = device
        self.region = Region(self._driver.allocate(nbytes, device), nbytes, "cuda", device=device)
        self.fill(0)

    def read(self) -> Bytes:
        """As `Memory.read`."""
        content = np.empty(self.region.nbytes, np.uint8)
        self._move(content, self._driver.to_host)
        return content

    def fill(self, content: Bytes | int) -> None:
        """As `Memory.fill`."""
        whole = np.empty(self.region.nbytes, np.uint8)
        whole[:] = content
        self._move(whole, lambda host, address, nbytes, stream: self._driver.to_device(address, host, nbytes, stream))

    def close(self) -> None:
        """As `Memory.close`."""
        self._driver.free(self.region.address, self._device)

    def _move(self, host: Bytes, copy: Callable[..., None]) -> None:
        stream = self._driver.stream(self._device)
        copy(host.ctypes.data, self.region.address, self.region.nbytes, stream)
        stream.wait()
        stream.close()


def suitable_memory(capabilities: Capabilities) -> Callable[[int, bool], Memory]:
    """What makes memory that a transport with ``capabilities`` reaches: of the host where it can, else of a device."""
    if "host" in capabilities.memory_kinds:
        return host_memory
    return lambda nbytes, shared: DeviceMemory(nbytes)
