"""What the copier does with a device: puts numbers there, and launches kernels."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np
import torch

from kvbaton.copy.gpu import kernels
from kvbaton.copy.gpu.tables import Launch
from kvbaton.errors import ConfigurationError, TransportError
from kvbaton.plan.boxes import Int64s

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton's interpreter runs the kernels, on host memory: for tests."""
FIRST_BYTES = 128 << 10
MOST_PLACES = 64


class Place:
    """Room for the numbers of one call, on the host (pinned) and on the device, until its work is over."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._tensors = host, device
        self.bytes = host.numpy()
        self.host: int = host.data_ptr()
        self.device: int = device.data_ptr()
        self.sent: Any = None
        self.done: Any = None


class Device(ABC):
    """One device. Not for two threads at once."""

    multiprocessors: int

    @abstractmethod
    def take(self, nbytes: int) -> Place:
        """A place of at least that many bytes which nobody reads."""

    @abstractmethod
    def send(self, place: Place, nbytes: int, stream: Any) -> None:
        """Bring the first ``nbytes`` bytes to the device; what ``stream`` gets from now on finds them there."""

    @abstractmethod
    def launch(
        self, launch: Launch, order: dict[str, bool], grid: int, arguments: tuple[int, ...], stream: Any
    ) -> None:
        """Queue ``grid`` programs of a kernel."""

    @abstractmethod
    def used(self, place: Place, stream: Any) -> None:
        """Everything that reads ``place`` is in ``stream``."""

    @abstractmethod
    def upload(self, table: Int64s) -> torch.Tensor:
        """A copy of ``table`` on the device, which is there when this returns."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until no place is read."""


class Interpreter(Device):
    """Triton's interpreter, on host memory: everything is done when a call returns."""

    multiprocessors = 2

    def __init__(self, warps: int) -> None:
        self._warps = warps

    def take(self, nbytes: int) -> Place:
        """As `Device.take`."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return Place(memory, memory)

    def send(self, place: Place, nbytes: int, stream: Any) -> None:
        """As `Device.send`."""

    def launch(
        self, launch: Launch, order: dict[str, bool], grid: int, arguments: tuple[int, ...], stream: Any
    ) -> None:
        """As `Device.launch`."""
        with np.errstate(all="ignore"):
            getattr(kernels, launch.kernel)[(grid,)](*arguments, **launch.constants, **order, num_warps=self._warps)

    def used(self, place: Place, stream: Any) -> None:
        """As `Device.used`."""

    def upload(self, table: Int64s) -> torch.Tensor:
        """As `Device.upload`."""
        return torch.from_numpy(table.copy())

    def drain(self) -> None:
        """As `Device.drain`."""


class Cuda(Device):
    """A CUDA device. Numbers travel on a stream of their own, so that they are there before their copy may begin."""

    def __init__(self, index: int, warps: int) -> None:
        if index >= torch.cuda.device_count():
            raise ConfigurationError(f"there is no CUDA device {index}; {torch.cuda.device_count()} were found")
        self._device = torch.device("cuda", index)
        self._warps = warps
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self._uploads: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._places: deque[Place] = deque()
        self._compiled: dict[tuple[Any, ...], Any] = {}
        # torch's own copy takes longer on the CPU than everything else here.
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def take(self, nbytes: int) -> Place:
        """As `Device.take`. Waits only where very many are read."""
        if self._places and (len(self._places) >= MOST_PLACES or self._places[0].done.query()):
            place = self._places.popleft()
            place.done.synchronize()
            if len(place.bytes) < nbytes:
                place = self._new(nbytes)
        else:
            place = self._new(nbytes)
        self._places.append(place)
        return place

    def _new(self, nbytes: int) -> Place:
        size = max(FIRST_BYTES, 1 << (nbytes - 1).bit_length())
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._uploads):
            place = Place(host, torch.empty(size, dtype=torch.uint8, device=self._device))
            place.sent, place.done = _event(), _event()
            place.done.record()
        return place

    def send(self, place: Place, nbytes: int, stream: Any) -> None:
        """As `Device.send`."""
        if code := self._copy(place.device, place.host, nbytes, self._uploads.cuda_stream):
            raise TransportError(f"CUDA could not copy {nbytes} bytes to device {self._device.index}: error {code}")
        place.sent.record(self._uploads)
        stream.wait_event(place.sent)

    def launch(
        self, launch: Launch, order: dict[str, bool], grid: int, arguments: tuple[int, ...], stream: Any
    ) -> None:
        """As `Device.launch`."""
        constants = launch.constants | order
        key = (launch.kernel, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is None:
            with torch.cuda.stream(stream):
                run = getattr(kernels, launch.kernel)[(grid,)]
                self._compiled[key] = run(*arguments, **constants, num_warps=self._warps)
            return
        # What Triton looks up at every call does not change: addresses are never specialised.
        compiled[(grid, 1, 1)](*arguments, *constants.values(), stream=stream.cuda_stream)

    def used(self, place: Place, stream: Any) -> None:
        """As `Device.used`."""
        place.done.record(stream)

    def upload(self, table: Int64s) -> torch.Tensor:
        """As `Device.upload`."""
        with torch.cuda.stream(self._uploads):
            made = torch.from_numpy(table.copy()).pin_memory().to(self._device, non_blocking=True)
            self._uploads.synchronize()
        return made

    def drain(self) -> None:
        """As `Device.drain`."""
        for place in self._places:
            place.done.synchronize()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
