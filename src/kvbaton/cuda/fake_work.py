"""The work of devices that are none: streams, marks and kernels; see `kvbaton.cuda.fake`."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from kvbaton.copy import check_bounds, copy_boxes, gather, scatter
from kvbaton.cuda.base import Mark, Stream
from kvbaton.cuda.fake_machine import ELSEWHERE, DriverMisuse, FakeMachine, Mapping, on_host
from kvbaton.errors import RowsError, TransportError
from kvbaton.plan.boxes import Boxes, Cast, Int64s, Transfer


class FakeStream(Stream):
    """A thread that does the work of a stream, started with the first of it."""

    def __init__(self, machine: FakeMachine, device: int) -> None:
        self.device = device
        self.handle = id(self)
        self.machine = machine
        self._changed = threading.Condition()
        self._work: deque[tuple[list[Mapping], Callable[[], object]]] = deque()
        self.given = 0
        self.done = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def give(self, addresses: Iterable[int], work: Callable[[], object]) -> None:
        """Do ``work``, on what is mapped at ``addresses``, when all before is done."""
        self._check()
        held = self.machine.hold(addresses)
        with self._changed:
            self.machine.require(not self._closed, "work was given to a stream that is closed")
            self._work.append((held, work))
            self.given += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fake-cuda-stream", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def mark(self) -> Mark:
        """As `Stream.mark`."""
        self._check()
        return FakeMark(self)

    def wait(self) -> None:
        """As `Stream.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self.done == self.given)
        self._check()

    def close(self) -> None:
        """As `Stream.close`."""
        with self._changed:
            self.machine.require(self.done == self.given, "a stream was closed while work was under way")
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def failed(self) -> str:
        """Why the device takes no more work."""
        return self.machine.failure

    def _check(self) -> None:
        if self.failed():
            raise TransportError(f"the device failed: {self.failed()}")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closed)
                if not self._work:
                    return
                held, work = self._work.popleft()
                if self.machine.delay:
                    self._changed.wait(self.machine.delay)
            try:
                if not self.failed():
                    work()
            except Exception as error:
                self.machine.failure = f"{type(error).__name__}: {error}"
            self.machine.let_go(held)
            with self._changed:
                self.done += 1
                self._changed.notify_all()


class FakeMark(Mark):
    """As `Mark`."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._at = stream.given

    def ended(self) -> bool:
        """As `Mark.ended`."""
        if self._stream.done < self._at:
            return False
        self._stream._check()
        return True


class FakeKernels:
    """As `kvbaton.cuda.base.Kernels`: the CPU's kernels, late, on memory that is mapped."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def copy_boxes(
        self, transfer: Transfer, source_bases: Int64s, destination_bases: Int64s, stream: Stream, begin: int, end: int
    ) -> None:
        """As `Kernels.copy_boxes`."""
        boxes = transfer.boxes

        def work() -> None:
            self._check(boxes.source_shape, boxes.source, transfer.source_units, source_bases)
            self._check(boxes.shape, boxes.destination, transfer.destination_units, destination_bases)
            copy_boxes(transfer, on_host(source_bases), on_host(destination_bases), begin=begin, end=end)

        sides = (boxes.source, source_bases), (boxes.destination, destination_bases)
        give(stream, [address for side, bases in sides for address in _used(side, bases)], work)

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

        def work() -> None:
            self._check(Boxes(shape, side, side, cast).source_shape, side, units, bases)
            gather(shape, side, units, on_host(bases), self._packed(packed, nbytes), begin=begin, cast=cast)

        give(stream, [*_used(side, bases), packed], work)

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

        def work() -> None:
            self._check(shape, side, units, bases)
            scatter(shape, side, units, on_host(bases), self._packed(packed, nbytes), begin=begin)

        give(stream, [*_used(side, bases), packed], work)

    def _check(self, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s) -> None:
        rooms = np.array([self._machine.room(int(base)) for base in bases], dtype=np.int64)
        try:
            check_bounds("destination", shape, side, units, rooms)
        except RowsError as error:
            self._machine.require(False, f"an illegal memory access: {error}")

    def _packed(self, address: int, nbytes: int) -> memoryview:
        self._machine.require(nbytes <= self._machine.room(address), f"{nbytes} bytes are not mapped at {address:#x}")
        return memoryview((ctypes.c_uint8 * nbytes).from_address(address ^ ELSEWHERE)).cast("B")


def give(stream: Stream, addresses: Iterable[int], work: Callable[[], object]) -> None:
    """Give ``work`` to a stream of a fake device. Raises `DriverMisuse` for another one."""
    if not isinstance(stream, FakeStream):
        raise DriverMisuse(f"a fake device was given a stream of {type(stream).__name__}")
    stream.give(addresses, work)


def _used(side: Int64s, bases: Int64s) -> list[int]:
    """The bases of the regions that a side uses."""
    return [int(bases[region]) for region in np.unique(side[:, 0]).tolist()]
