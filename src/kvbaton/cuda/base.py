"""The interface of a CUDA driver: what transports and copies of device memory are written against.

Devices are numbered as this process sees them (``CUDA_VISIBLE_DEVICES``); between processes a device is named by its
uuid. Addresses are those of unified addressing, as integers. Every method may be called from any thread.
"""

from __future__ import annotations

import abc
from typing import NamedTuple, Protocol

from kvbaton.plan.boxes import Cast, Int64s, Transfer

HANDLE_BYTES = 64
"""Of a handle by which another process opens an allocation."""
UUID_BYTES = 16


class Allocation(NamedTuple):
    """``nbytes`` bytes of device memory from ``base`` that were allocated, or are mapped, as one."""

    base: int
    nbytes: int


class Mark(abc.ABC):
    """A point in the work of a stream."""

    @abc.abstractmethod
    def ended(self) -> bool:
        """Whether all work before it is done, and visible. Never blocks.

        Raises `TransportError` if the device failed; it takes no more work then.
        """


class Stream(abc.ABC):
    """Work of a device that is done in the order in which it was given, beside that of other streams."""

    device: int
    handle: int
    """What kernels are launched on (a ``CUstream``)."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """A mark after all that was given so far. Raises `TransportError` if the device failed."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until all that was given is done. Raises `TransportError` if the device failed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give it back, after `wait`. Safe to call twice."""


class Kernels(Protocol):
    """Copies that a device does: `kvbaton.copy` for its memory. They return when the work is given to the stream.

    The tables must stay as they are until the work is done. Addresses are not checked.
    """

    def copy_boxes(
        self, transfer: Transfer, source_bases: Int64s, destination_bases: Int64s, stream: Stream, begin: int, end: int
    ) -> None:
        """Copy the bytes ``[begin, end)`` of the transfer's packed stream from rows to rows."""

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
        """Fill ``nbytes`` bytes at address ``packed`` with the packed stream from its byte ``begin``."""

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
        """Spread ``nbytes`` bytes at address ``packed``, the packed stream from its byte ``begin``, over the rows."""


class Driver(abc.ABC):
    """The devices that this process sees, and the memory that it shares with other processes of the host."""

    kernels: Kernels

    @property
    @abc.abstractmethod
    def uuids(self) -> tuple[bytes, ...]:
        """The uuid of each device that this process sees, by its number."""

    @abc.abstractmethod
    def reaches(self, device: int, other: int) -> bool:
        """Whether ``device`` can address the memory of ``other``."""

    @abc.abstractmethod
    def allocation(self, address: int, device: int) -> Allocation:
        """The allocation that holds ``address``. Raises `TransportUnavailable` if there is none on that device."""

    @abc.abstractmethod
    def export(self, base: int, device: int) -> bytes:
        """A handle of the allocation that begins at ``base``, for other processes; the same for each call.

        Raises `TransportUnavailable`, with what to change, for memory that cannot be shared.
        """

    @abc.abstractmethod
    def retract(self, handle: bytes) -> None:
        """Undo one `export`: `open` in this process finds it no more when all of them are undone."""

    @abc.abstractmethod
    def open(self, handle: bytes, device: int) -> Allocation:
        """The allocation behind a handle, addressable by ``device``; that of this process is not mapped again.

        Raises `TransportUnavailable` if it cannot be opened: the exporter is gone, on another host, or closed it.
        """

    @abc.abstractmethod
    def close(self, base: int, device: int) -> None:
        """Undo one `open`; no work on that memory may be under way."""

    @abc.abstractmethod
    def stream(self, device: int) -> Stream:
        """A new stream of ``device``, beside the default one."""

    @abc.abstractmethod
    def allocate(self, nbytes: int, device: int) -> int:
        """The address of ``nbytes`` bytes of new memory. Raises `TransportUnavailable` if there is none left."""

    @abc.abstractmethod
    def free(self, address: int, device: int) -> None:
        """Give back what `allocate` gave; no work on it may be under way."""

    @abc.abstractmethod
    def to_host(self, host: int, address: int, nbytes: int, stream: Stream) -> None:
        """Copy from the device into host memory, in the order of the stream."""

    @abc.abstractmethod
    def to_device(self, address: int, host: int, nbytes: int, stream: Stream) -> None:
        """Copy from host memory to the device, in the order of the stream."""

    @abc.abstractmethod
    def pin(self, host: int, nbytes: int) -> bool:
        """Make copies from and to host memory fast by locking its pages; whether that could be done."""

    @abc.abstractmethod
    def unpin(self, host: int) -> None:
        """Undo `pin`."""
