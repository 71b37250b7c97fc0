"""`kvbaton.cuda.base.Kernels` by the Triton kernels of `kvbaton.copy.gpu`."""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

from kvbaton.cuda.base import Stream
from kvbaton.errors import TransportUnavailable
from kvbaton.plan.boxes import Cast, Int64s, Transfer


class TritonKernels:
    """A copier for each device, made when something is copied there first."""

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._make: Any = importlib.import_module("kvbaton.copy.gpu.copier").Copier
        except ImportError as error:
            raise TransportUnavailable(
                f"copying on a device needs torch and Triton: {error}; pip install 'kvbaton[gpu]'"
            ) from error
        self._lock = threading.Lock()
        self._copiers: dict[int, Any] = {}

    def copy_boxes(
        self, transfer: Transfer, source_bases: Int64s, destination_bases: Int64s, stream: Stream, begin: int, end: int
    ) -> None:
        """As `Kernels.copy_boxes`."""
        self._copier(stream.device).copy_boxes(
            transfer, source_bases, destination_bases, begin=begin, end=end, stream=self._stream(stream)
        )

    def gather(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        packed: int,
        nbytes: int,
        stream: Stream,
        begin: int,
        cast: Cast | None,
    ) -> None:
        """As `Kernels.gather`."""
        self._copier(stream.device).gather(
            shape, side, units, bases, packed, nbytes, begin=begin, cast=cast, stream=self._stream(stream)
        )

    def scatter(
        self,
        shape: Int64s,
        side: Int64s,
        units: Int64s,
        bases: Int64s,
        packed: int,
        nbytes: int,
        stream: Stream,
        begin: int,
    ) -> None:
        """As `Kernels.scatter`."""
        self._copier(stream.device).scatter(
            shape, side, units, bases, packed, nbytes, begin=begin, stream=self._stream(stream)
        )

    def _copier(self, device: int) -> Any:
        with self._lock:
            found = self._copiers.get(device)
            if found is None:
                found = self._copiers[device] = self._make(device)
            return found

    def _stream(self, stream: Stream) -> Any:
        return self._torch.cuda.ExternalStream(stream.handle, device=f"cuda:{stream.device}")


@functools.cache
def kernels() -> TritonKernels:
    """The kernels of this process. Raises `TransportUnavailable` where torch or Triton is missing."""
    return TritonKernels()
