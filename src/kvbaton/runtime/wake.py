"""A descriptor that any thread can make readable, to end another thread's poll."""

from __future__ import annotations

import contextlib
import os
import threading


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
            if self.descriptor < 0:
                return
            # A full counter means that it is readable anyway.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make it unreadable, until it is set again. By the thread that polls."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back. By the thread that polls, once."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1
