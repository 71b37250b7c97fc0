"""A copy on a device, before anything depends on it: what is missing is found out early, and kernels are compiled."""

from __future__ import annotations

import numpy as np

from kvbaton.cuda.base import Driver, Stream
from kvbaton.errors import TransportUnavailable
from kvbaton.memory import Bytes
from kvbaton.plan.boxes import Boxes, Int64s, Transfer

NBYTES = 4096


def _transfer(shape: tuple[int, ...], side: tuple[int, ...]) -> Transfer:
    one = np.zeros(1, dtype=np.int64)
    sides = np.array([side], dtype=np.int64)
    return Transfer(Boxes(np.array([shape], dtype=np.int64), sides, sides), one, one)


# Whole rows, and pieces of rows: the kernels of most layouts.
_TRANSFERS = (
    _transfer((1, 1, 1024), (0, 0, 1024, 1, 0, 0, 0)),
    _transfer((2, 2, 128), (0, 1024, 512, 2, 256, 512, 128)),
)


def try_out(driver: Driver, device: int) -> None:
    """Copy a few bytes. Raises `TransportUnavailable`, with the reason, if the device cannot."""
    try:
        memory = driver.allocate(2 * NBYTES, device)
        stream = driver.stream(device)
    except Exception as error:
        raise TransportUnavailable(f"device {device} cannot be used: {error}") from error
    try:
        content = np.arange(NBYTES, dtype=np.int64).astype(np.uint8)
        found = np.zeros(NBYTES, np.uint8)
        _copy(driver, stream, memory, content, found)
    except Exception as error:
        # Whatever a library of others raises: nothing was promised to anybody yet.
        raise TransportUnavailable(f"device {device} cannot copy: {type(error).__name__}: {error}") from error
    finally:
        driver.free(memory, device)
    stream.close()
    moved = [*range(1024), *range(1024, 1280), *range(1536, 1792)]
    if not np.array_equal(found[moved], content[moved]):
        raise TransportUnavailable(f"device {device} cannot copy: what came is not what was sent")


def _copy(driver: Driver, stream: Stream, memory: int, content: Bytes, found: Bytes) -> None:
    bases: tuple[Int64s, Int64s] = np.array([memory]), np.array([memory + NBYTES])
    try:
        driver.to_device(memory, content.ctypes.data, NBYTES, stream)
        for transfer in _TRANSFERS:
            driver.kernels.copy_boxes(transfer, *bases, stream, 0, transfer.nbytes)
        driver.to_host(found.ctypes.data, memory + NBYTES, NBYTES, stream)
    finally:
        stream.wait()
