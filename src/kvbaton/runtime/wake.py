"""A descriptor that any thread can make readable, to end another thread's poll."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

# `os.eventfd_write` lets go of the interpreter's lock, and the thread that it wakes then keeps it for a whole switch
# interval (5 ms): the engine's call would last as long. This one, a few hundred nanoseconds long, keeps the lock.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Wake:
    """An eventfd that may be set at any time, also while and after it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """To poll for reading; -1 once it is closed."""

    def set(self) -> None:
        """Make it readable. From any thread; cheap."""
        # The lock keeps the descriptor from being closed, and its number from being used again, in between.
        with self._lock:
            if self.descriptor >= 0:
                # It fails if the counter is full; then it is readable anyway.
                _eventfd_write(self.descriptor, 1)

    def __call__(self) -> None:
        """As `set`: it is a waker for transports, and those whose threads are not Python's use its descriptor."""
        self.set()

    def clear(self) -> None:
        """Make it unreadable, until it is set again. By the thread that polls."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back. By the thread that polls, once."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1
