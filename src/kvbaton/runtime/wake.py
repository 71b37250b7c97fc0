"""A descriptor that any thread can make readable, to end another thread's poll."""

from __future__ import annotations

import ctypes
import os
import threading

# `os.eventfd_write` lets go of the interpreter's lock, and the thread that it wakes then keeps it for a whole switch
# interval (5 ms): the engine's call would last as long. These, a few hundred nanoseconds long, keep the lock.
_library = ctypes.PyDLL(None)
_eventfd_write = _library.eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_eventfd_read = _library.eventfd_read
_eventfd_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))


class Wake:
    """An eventfd that may be set at any time, also while and after it is closed."""

    def __init__(self) -> None:
        # It keeps the descriptor from being closed, and its number from being used again, while it is used.
        self._lock = threading.Lock()
        self._is_set = False
        self._value = ctypes.c_uint64()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """To poll for reading; -1 once it is closed."""

    def set(self) -> None:
        """Make it readable. From any thread; cheap."""
        with self._lock:
            if self.descriptor >= 0 and not self._is_set:
                self._is_set = True
                _eventfd_write(self.descriptor, 1)

    def __call__(self) -> None:
        """As `set`: it is a waker for transports, and those whose threads are not Python's use its descriptor."""
        self.set()

    def clear(self) -> None:
        """Make it unreadable, until it is set again. By the thread that polls."""
        with self._lock:
            self._is_set = False
            # It fails if nothing was written.
            _eventfd_read(self.descriptor, self._value)

    def close(self) -> None:
        """Give the descriptor back. By the thread that polls, once."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1
