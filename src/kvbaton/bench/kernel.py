"""The copy kernel alone, in one process: fused copy, gather and scatter, beside memcpy and numpy's fallback."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from kvbaton import SharedMemory
from kvbaton.bench.contenders.baton import layout_of
from kvbaton.bench.contenders.work import Work
from kvbaton.bench.report import Figure, at_least
from kvbaton.bench.transfer import size_words
from kvbaton.copy import NATIVE, SlowCopyWarning, copy_boxes, digest, fallback, gather, scatter
from kvbaton.errors import TransferFailed
from kvbaton.plan import Int64s, Pages, Transfer, assign, compile_pair

MOST_PIECES = 262_144
FALLBACK_PIECES = 16_384
"""The fallback is timed on fewer pieces; its cost is theirs."""


def run(pieces: Sequence[int], megabytes: int, runs: int) -> list[Figure]:
    """All figures, in GiB/s of bytes that are moved."""
    figures: list[Figure] = []
    for piece in pieces:
        work = Work.of(piece, min(megabytes << 20, MOST_PIECES * piece))
        bench = Bench(work)
        contenders: dict[tuple[str, int], Callable[[], None]] = {}
        for threads in (1, 2):
            contenders["memcpy", threads] = partial(bench.memcpy, threads)
            contenders["copy", threads] = partial(bench.copy, threads)
            contenders["gather", threads] = partial(bench.gather, threads)
            contenders["scatter", threads] = partial(bench.scatter, threads)
        seconds = in_turn(contenders, runs)
        bench.check()
        for threads in (1, 2):
            straight = work.nbytes / 2**30 / seconds["memcpy", threads]
            for kernel in ("copy", "gather", "scatter"):
                name = f"{kernel}, {size_words(piece)} pieces, {_threads(threads)}"
                rate = work.nbytes / 2**30 / seconds[kernel, threads]
                figures.append(at_least(name, rate, "GiB/s", f"memcpy, {_threads(threads)}", straight, None))
        figures.append(_against_fallback(piece, runs))
    return figures


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def in_turn(contenders: Mapping[tuple[str, int], Callable[[], None]], runs: int) -> dict[tuple[str, int], float]:
    """The median seconds of each, in turn; the first turn is not counted."""
    taken: dict[tuple[str, int], list[float]] = {name: [] for name in contenders}
    for _ in range(1 + runs):
        for name, work in contenders.items():
            started = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def _against_fallback(piece: int, runs: int) -> Figure:
    work = Work.of(piece, min(64 << 20, FALLBACK_PIECES * piece))
    bench = Bench(work)
    seconds = in_turn({("kernel", 1): partial(bench.copy, 1), ("numpy", 1): bench.fallback}, min(runs, 3))
    bench.check()
    rates = [work.nbytes / 2**30 / seconds[name, 1] for name in ("kernel", "numpy")]
    name = f"copy, {size_words(piece)} pieces, {work.nbytes / 2**20:.0f} MiB, 1 thread"
    return at_least(name, rates[0], "GiB/s", "numpy's fallback" if NATIVE else "itself", rates[1], None)


class Bench:
    """One transfer between two pools in shared memory, and the same bytes as contiguous buffers."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._source, self._destination = SharedMemory(work.pool_bytes), SharedMemory(work.pool_bytes)
        work.fill(self._source.array)
        self._destination.array[:] = 0
        layout = layout_of(work)
        (share,) = assign((layout,), layout)
        at, to = (Pages(work.chosen(role), 0) for role in ("source", "destination"))
        (self.transfer,) = _one(compile_pair(layout, layout, share).bind("kv", (0, work.pages), at, to))
        self._bases = (_base_of(self._source), _base_of(self._destination))
        self._numbers = np.arange(work.pages, dtype=np.int64)
        self._packed = np.zeros(work.nbytes, np.uint8)
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memcpy.restype = ctypes.c_void_p

    def memcpy(self, threads: int) -> None:
        """As many contiguous bytes, from pool to pool."""
        bounds = [self.work.nbytes * part // threads for part in range(threads + 1)]

        def copy(part: int) -> None:
            first, last = bounds[part : part + 2]
            self._memcpy(self._destination.address + first, self._source.address + first, last - first)

        others = [threading.Thread(target=copy, args=(part,)) for part in range(1, threads)]
        for thread in others:
            thread.start()
        copy(0)
        for thread in others:
            thread.join()

    def copy(self, threads: int) -> None:
        """Rows to rows."""
        copy_boxes(self.transfer, self._bases[0], self._bases[1], threads)

    def fallback(self) -> None:
        """The same by numpy."""
        boxes, at, to = self.transfer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowCopyWarning)
            fallback.copy(*boxes[:3], at, to, *self._bases, 0, self.transfer.nbytes, 1, boxes.cast)

    def gather(self, threads: int) -> None:
        """Rows to a packed buffer."""
        boxes = self.transfer.boxes
        gather(boxes.shape, boxes.source, self.transfer.source_units, self._bases[0], self._packed, threads=threads)

    def scatter(self, threads: int) -> None:
        """A packed buffer to rows."""
        boxes = self.transfer.boxes
        scatter(
            boxes.shape,
            boxes.destination,
            self.transfer.destination_units,
            self._bases[1],
            self._packed,
            threads=threads,
        )

    def digest(self, threads: int) -> None:
        """The digest of the source's rows."""
        boxes, units, _ = self.transfer
        digest(boxes.shape, boxes.source, units, self._numbers, self._bases[0], threads=threads)

    def check(self) -> None:
        """Empty the destination, copy once more, and compare. Raises `TransferFailed`."""
        self._destination.array[:] = 0
        self.copy(1)
        sums = [
            self.work.checksum(memory.array, role)
            for memory, role in ((self._source, "source"), (self._destination, "destination"))
        ]
        if sums[0] != sums[1]:
            raise TransferFailed(f"copy, {self.work.piece} B pieces: checksum {sums[1]}, not {sums[0]}")


def _base_of(memory: SharedMemory) -> Int64s:
    return np.array([memory.address], np.int64)


def _one(transfers: list[Transfer]) -> list[Transfer]:
    if len(transfers) != 1:
        raise TransferFailed(f"one kind of row binds to one transfer, not {len(transfers)}")
    return transfers
