"""The driver's own library, by ctypes: there is nothing to install, and no other package's CUDA to agree with.

Each call runs in the primary context of its device, which is the one that torch uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Iterator
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from kvbaton.cuda.base import HANDLE_BYTES, UUID_BYTES, Allocation, Driver, Kernels, Mark, Stream
from kvbaton.errors import TransportError, TransportUnavailable

LIBRARY = "libcuda.so.1"

SUCCESS = 0
NOT_READY = 600
HOST_MEMORY_ALREADY_REGISTERED = 712

STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
IPC_LAZY_ENABLE_PEER_ACCESS = 1
HOST_REGISTER_PORTABLE = 1
POINTER_DEVICE_ORDINAL = 9
POINTER_IS_LEGACY_IPC_CAPABLE = 13

NOT_SHAREABLE = (
    "it cannot be exported to another process, as memory of expandable segments or of an asynchronous pool cannot: set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native before torch is imported, or choose tcp"
)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", c_char * UUID_BYTES)]


def _raw(structure: ctypes.Structure) -> bytes:
    return ctypes.string_at(ctypes.addressof(structure), ctypes.sizeof(structure))


def load() -> ctypes.CDLL:
    """The library, which is not started by that. Raises `TransportUnavailable` where it is missing."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TransportUnavailable(f"there is no CUDA driver here: {error}") from error


class _Library:
    """Calls by name; those that fail raise `TransportError` with the driver's words."""

    def __init__(self) -> None:
        self._library = load()
        code = self.code("cuInit", c_uint(0))
        if code:
            raise TransportUnavailable(f"the CUDA driver does not start: {self.words(code)}")

    def code(self, name: str, *arguments: Any) -> int:
        """What the call returns."""
        returned: int = getattr(self._library, name)(*arguments)
        return returned

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code != SUCCESS:
            raise TransportError(f"{name} failed: {self.words(code)}")

    def words(self, code: int) -> str:
        """What a code means."""
        text = ctypes.c_char_p()
        name = ctypes.c_char_p()
        self.code("cuGetErrorName", c_int(code), byref(name))
        self.code("cuGetErrorString", c_int(code), byref(text))
        return f"{(name.value or b'error').decode()} ({code}), {(text.value or b'unknown').decode()}"


class _Device:
    """A device and its primary context, which is kept as long as the process lives."""

    def __init__(self, library: _Library, number: int) -> None:
        self._call = library
        device = c_int()
        library("cuDeviceGet", byref(device), c_int(number))
        self.device = device
        uuid = _Uuid()
        library("cuDeviceGetUuid_v2", byref(uuid), device)
        self.uuid = _raw(uuid)
        self._context: c_void_p | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make its context the current one of this thread."""
        with self._lock:
            if self._context is None:
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(context), self.device)
                self._context = context
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))


class LibraryDriver(Driver):
    """The devices of this machine that the process may see.

    Raises `TransportUnavailable` where the library is missing, or has no device.
    """

    def __init__(self) -> None:
        self._call = call = _Library()
        count = c_int()
        call("cuDeviceGetCount", byref(count))
        if not count.value:
            raise TransportUnavailable("the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES")
        self._devices = tuple(_Device(call, number) for number in range(count.value))
        self._lock = threading.Lock()
        self._exported: dict[bytes, Allocation] = {}
        self._exports: Counter[bytes] = Counter()
        self._own: Counter[int] = Counter()
        """How often allocations of this process are open, by where they begin."""
        self._streams: dict[int, list[int]] = {}
        """By device: streams that nobody uses."""

    @property
    def kernels(self) -> Kernels:  # type: ignore[override]
        """As `Driver.kernels`. Raises `TransportUnavailable` where what they are written in is missing."""
        from kvbaton.cuda.kernels import kernels

        return kernels()

    @property
    def uuids(self) -> tuple[bytes, ...]:
        """As `Driver.uuids`."""
        return tuple(device.uuid for device in self._devices)

    def reaches(self, device: int, other: int) -> bool:
        """As `Driver.reaches`."""
        if device == other:
            return True
        can = c_int()
        self._call("cuDeviceCanAccessPeer", byref(can), self._devices[device].device, self._devices[other].device)
        return bool(can.value)

    def allocation(self, address: int, device: int) -> Allocation:
        """As `Driver.allocation`."""
        base, nbytes, number = c_uint64(), c_size_t(), c_int(-1)
        with self._current(device):
            code = self._call.code("cuMemGetAddressRange_v2", byref(base), byref(nbytes), c_uint64(address))
            if code:
                raise TransportUnavailable(f"there is no device memory at {address:#x}: {self._call.words(code)}")
            self._call("cuPointerGetAttribute", byref(number), c_int(POINTER_DEVICE_ORDINAL), c_uint64(address))
        if number.value != device:
            raise TransportUnavailable(f"the memory at {address:#x} is on device {number.value}, not {device}")
        return Allocation(base.value, nbytes.value)

    def export(self, base: int, device: int) -> bytes:
        """As `Driver.export`."""
        handle, capable = _Handle(), c_int()
        with self._current(device):
            code = self._call.code(
                "cuPointerGetAttribute", byref(capable), c_int(POINTER_IS_LEGACY_IPC_CAPABLE), c_uint64(base)
            )
            if code == SUCCESS and not capable.value:
                raise TransportUnavailable(NOT_SHAREABLE)
            code = self._call.code("cuIpcGetMemHandle", byref(handle), c_uint64(base))
        if code:
            raise TransportUnavailable(f"{NOT_SHAREABLE} ({self._call.words(code)})")
        raw = _raw(handle)
        with self._lock:
            self._exported[raw] = self.allocation(base, device)
            self._exports[raw] += 1
        return raw

    def retract(self, handle: bytes) -> None:
        """As `Driver.retract`."""
        with self._lock:
            self._exports[handle] -= 1
            if self._exports[handle] <= 0:
                del self._exports[handle]
                self._exported.pop(handle, None)

    def open(self, handle: bytes, device: int) -> Allocation:
        """As `Driver.open`."""
        with self._lock:
            own = self._exported.get(handle)
            if own is not None:
                # The driver opens no handle in the process that it is of.
                self._own[own.base] += 1
                return own
        address = c_uint64()
        passed = _Handle.from_buffer_copy(handle)
        with self._current(device):
            code = self._call.code("cuIpcOpenMemHandle_v2", byref(address), passed, c_uint(IPC_LAZY_ENABLE_PEER_ACCESS))
            if code:
                raise TransportUnavailable(
                    f"the peer's memory cannot be opened: {self._call.words(code)}; it must be alive, on this host, "
                    "and both processes in one pid and ipc namespace"
                )
            base, nbytes = c_uint64(), c_size_t()
            self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return Allocation(address.value, nbytes.value)

    def close(self, base: int, device: int) -> None:
        """As `Driver.close`."""
        with self._lock:
            if self._own[base] > 0:
                self._own[base] -= 1
                return
        with self._current(device):
            self._call("cuIpcCloseMemHandle", c_uint64(base))

    def stream(self, device: int) -> Stream:
        """As `Driver.stream`."""
        with self._lock:
            idle = self._streams.setdefault(device, [])
            handle = idle.pop() if idle else 0
        return _LibraryStream(self._call, self._devices[device], device, handle, idle)

    def allocate(self, nbytes: int, device: int) -> int:
        """As `Driver.allocate`."""
        address = c_uint64()
        with self._current(device):
            code = self._call.code("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        if code:
            raise TransportUnavailable(f"no {nbytes} bytes are left on device {device}: {self._call.words(code)}")
        return address.value

    def free(self, address: int, device: int) -> None:
        """As `Driver.free`."""
        with self._current(device):
            self._call("cuMemFree_v2", c_uint64(address))

    def to_host(self, host: int, address: int, nbytes: int, stream: Stream) -> None:
        """As `Driver.to_host`."""
        with self._current(stream.device):
            self._call(
                "cuMemcpyDtoHAsync_v2", c_void_p(host), c_uint64(address), c_size_t(nbytes), c_void_p(stream.handle)
            )

    def to_device(self, address: int, host: int, nbytes: int, stream: Stream) -> None:
        """As `Driver.to_device`."""
        with self._current(stream.device):
            self._call(
                "cuMemcpyHtoDAsync_v2", c_uint64(address), c_void_p(host), c_size_t(nbytes), c_void_p(stream.handle)
            )

    def pin(self, host: int, nbytes: int) -> bool:
        """As `Driver.pin`."""
        with self._current(0):
            code = self._call.code(
                "cuMemHostRegister_v2", c_void_p(host), c_size_t(nbytes), c_uint(HOST_REGISTER_PORTABLE)
            )
        return code == SUCCESS

    def unpin(self, host: int) -> None:
        """As `Driver.unpin`."""
        with self._current(0):
            self._call("cuMemHostUnregister", c_void_p(host))

    def _current(self, device: int) -> contextlib.AbstractContextManager[None]:
        if not 0 <= device < len(self._devices):
            raise TransportUnavailable(f"there is no device {device}; this process sees {len(self._devices)}")
        return self._devices[device].current()


class _LibraryStream(Stream):
    """A stream that lives as long as the process, and is lent out.

    Torch remembers on which streams memory of its allocators was used, and asks them later: none may ever be destroyed.
    """

    def __init__(self, call: _Library, owner: _Device, device: int, handle: int, idle: list[int]) -> None:
        self.device = device
        self._call = call
        self._owner = owner
        self._idle = idle
        if not handle:
            stream = c_void_p()
            with owner.current():
                call("cuStreamCreate", byref(stream), c_uint(STREAM_NON_BLOCKING))
            handle = stream.value or 0
        self.handle = handle

    def mark(self) -> Mark:
        """As `Stream.mark`."""
        return _LibraryMark(self._call, self._owner, self.handle)

    def wait(self) -> None:
        """As `Stream.wait`."""
        with self._owner.current():
            self._call("cuStreamSynchronize", c_void_p(self.handle))

    def close(self) -> None:
        """As `Stream.close`."""
        handle, self.handle = self.handle, 0
        if handle:
            self._idle.append(handle)


class _LibraryMark(Mark):
    def __init__(self, call: _Library, owner: _Device, stream: int) -> None:
        self._call = call
        self._owner = owner
        self._event: c_void_p | None = None
        event = c_void_p()
        with owner.current():
            call("cuEventCreate", byref(event), c_uint(EVENT_DISABLE_TIMING))
            self._event = event
            call("cuEventRecord", event, c_void_p(stream))

    def ended(self) -> bool:
        """As `Mark.ended`."""
        if self._event is None:
            return True
        with self._owner.current():
            code = self._call.code("cuEventQuery", self._event)
        if code == NOT_READY:
            return False
        self._give_back()
        if code:
            raise TransportError(f"the device failed: {self._call.words(code)}")
        return True

    def _give_back(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            with self._owner.current():
                self._call.code("cuEventDestroy_v2", event)

    def __del__(self) -> None:
        self._give_back()
