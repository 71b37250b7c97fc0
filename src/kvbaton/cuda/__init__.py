"""CUDA, as far as kvbaton needs it: `driver` gives the one of this process.

`base` is the interface, `library` the driver's own library, `fake` a strict stand-in on host memory, for tests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvbaton.cuda.base import Allocation, Driver, Kernels, Mark, Stream

__all__ = ["Allocation", "Driver", "Kernels", "Mark", "Stream", "driver", "require", "use"]

_lock = threading.Lock()
_driver: Driver | None = None


def driver() -> Driver:
    """The driver of this process, loaded at the first call.

    Raises `TransportUnavailable` where the library is missing, or has no device.
    """
    global _driver
    with _lock:
        if _driver is None:
            from kvbaton.cuda.library import LibraryDriver

            _driver = LibraryDriver()
        return _driver


def require() -> None:
    """Raise `TransportUnavailable` where the library is missing. It is not started: that costs time, and forks."""
    if _driver is None:
        from kvbaton.cuda.library import load

        load()


@contextlib.contextmanager
def use(stand_in: Driver) -> Iterator[Driver]:
    """Have `driver` give ``stand_in`` meanwhile, in all threads: for tests without a device."""
    global _driver
    with _lock:
        before, _driver = _driver, stand_in
    try:
        yield stand_in
    finally:
        with _lock:
            _driver = before
