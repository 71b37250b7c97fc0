"""Memory that can be registered: plain regions, and memory that another process of the host can map.

`SharedMemory` is an anonymous file (``memfd_create``). It has no name in any file system, so nothing is left behind
when its owner is killed; a peer opens it through ``/proc/<pid>/fd/<descriptor>`` and proves by device, inode and size
that it is the same file. It is sealed against shrinking, so that no peer can take mapped pages away.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvbaton.errors import TransportUnavailable

Bytes = npt.NDArray[np.uint8]


class SharedMemoryKey(NamedTuple):
    """What a peer needs to find a `SharedMemory`, and to prove that it found the right one."""

    pid: int
    descriptor: int
    device: int
    inode: int
    nbytes: int


class _Mapping:
    """A writable, shared mapping of a file descriptor."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map: mmap.mmap | None = mmap.mmap(descriptor, nbytes)
        # Fewer look-ups of addresses for scattered rows, where the system has huge pages for shared memory.
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._array: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self._array.ctypes.data
        self.nbytes: int = nbytes

    @property
    def array(self) -> Bytes:
        """The bytes, as a writable uint8 array. Raises `TransportUnavailable` after `close`."""
        if self._array is None:
            raise TransportUnavailable("this shared memory was closed; make a new one")
        return self._array

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._array is None

    def close(self) -> None:
        """Unmap. Where views of `array` are still held, the pages go with the last view. Safe to call twice."""
        self._array = None
        if self._map is not None:
            # A view that somebody still holds keeps the mapping; Python unmaps it with the view.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None


class SharedMemory(_Mapping):
    """``nbytes`` zeroed bytes that peers on this host can map.

    Raises `TransportUnavailable` where the platform has no ``memfd_create`` or no memory is left. ``close()`` gives the
    descriptor back, as does the end of the last reference; peers that mapped the memory keep their pages.
    """

    descriptor = -1
    _map = None

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"shared memory needs at least 1 byte, not {nbytes}")
        self.descriptor = _create(nbytes)
        try:
            super().__init__(self.descriptor, nbytes)
        except (OSError, ValueError) as error:
            os.close(self.descriptor)
            raise TransportUnavailable(f"cannot map {nbytes} bytes of shared memory: {error}") from error
        status = os.fstat(self.descriptor)
        self.key = SharedMemoryKey(os.getpid(), self.descriptor, status.st_dev, status.st_ino, nbytes)

    def close(self) -> None:
        """As above, and close the descriptor: peers that did not map it yet no longer can. Safe to call twice."""
        super().close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


class AttachedMemory(_Mapping):
    """A peer's `SharedMemory`, mapped here.

    Raises `TransportUnavailable` if the peer is gone, may not be looked into (another user, another host or pid
    namespace), or if what is found there is another file.
    """

    def __init__(self, key: SharedMemoryKey) -> None:
        path = f"/proc/{key.pid}/fd/{key.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportUnavailable(
                f"cannot open the peer's shared memory {path}: {error.strerror}; "
                "the peer must be alive, on this host, in this pid namespace and of the same user"
            ) from error
        try:
            _verify(descriptor, key, path)
            super().__init__(descriptor, key.nbytes)
        except (OSError, ValueError) as error:
            raise TransportUnavailable(f"cannot map the peer's {key.nbytes} bytes at {path}: {error}") from error
        finally:
            os.close(descriptor)


def _create(nbytes: int) -> int:
    """Make a sealed anonymous file of that size; give its descriptor."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise TransportUnavailable(
            f"{sys.platform} lacks memfd_create, which shared memory needs; use another transport"
        )
    try:
        descriptor = os.memfd_create("kvbaton", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TransportUnavailable(f"memfd_create failed: {error.strerror}; use another transport") from error
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise TransportUnavailable(f"cannot make {nbytes} bytes of shared memory: {error.strerror}") from error
    return descriptor


def _verify(descriptor: int, key: SharedMemoryKey, path: str) -> None:
    status = os.fstat(descriptor)
    found = (status.st_dev, status.st_ino, status.st_size)
    wanted = (key.device, key.inode, key.nbytes)
    if found != wanted:
        raise TransportUnavailable(
            f"{path} is not the peer's shared memory: (device, inode, size) is {found}, the descriptor says {wanted}; "
            "the peer was replaced or closed it"
        )
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise TransportUnavailable(f"{path} is not sealed against shrinking, so it was not made by SharedMemory")


@runtime_checkable
class _TensorLike(Protocol):
    """What `Region.of` needs of a torch tensor; torch itself is not imported here."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def is_contiguous(self) -> bool: ...


class Region(NamedTuple):
    """``nbytes`` bytes from ``address``, to be registered. Its index in the registered list is `Tensor.region`.

    ``kind`` is "host" or "cuda", ``device`` the number of the device where it is not "host". ``shared`` is the
    `SharedMemory` that holds it, if one does (the region may be a part of it). ``owner`` is whatever must stay alive as
    long as the region.
    """

    address: int
    nbytes: int
    kind: str = "host"
    shared: SharedMemory | None = None
    owner: object = None
    device: int = 0

    @classmethod
    def of(cls, memory: SharedMemory | npt.NDArray[Any] | _TensorLike) -> Region:
        """Give the region of a `SharedMemory`, a C-contiguous numpy array or a contiguous torch tensor.

        Raises ``ValueError`` if the bytes are not contiguous or not writable, ``TypeError`` for anything else.
        """
        if isinstance(memory, SharedMemory):
            return cls(memory.address, memory.nbytes, "host", memory, memory)
        if isinstance(memory, np.ndarray):
            if not memory.flags.c_contiguous or not memory.flags.writeable:
                raise ValueError(
                    "a region needs a C-contiguous, writable array; register the whole buffer instead of a view"
                )
            return cls(memory.ctypes.data, memory.nbytes, "host", None, memory)
        if isinstance(memory, _TensorLike):
            if not memory.is_contiguous():
                raise ValueError("a region needs a contiguous tensor; register the whole buffer instead of a view")
            kind, _, number = str(getattr(memory, "device", "cpu")).partition(":")
            nbytes = memory.numel() * memory.element_size()
            kind = "host" if kind == "cpu" else kind
            return cls(memory.data_ptr(), nbytes, kind, None, memory, int(number or 0))
        raise TypeError(
            f"a region is made of SharedMemory, a numpy array or a torch tensor, not {type(memory).__name__}"
        )
