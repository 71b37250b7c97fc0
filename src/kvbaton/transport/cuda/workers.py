"""Gives copies to a device, and sees when they are done: one thread for all peers, a stream for each.

The thread also launches, so that what comes before a first launch (compiling kernels) holds up nobody but copies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbaton.cuda.base import Driver, Mark, Stream
from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.base import Completion
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.workers import MappedPeer, Workers

logger = logging.getLogger(__name__)

POLL_SECONDS = 20e-6
"""How often streams are asked while there is work on them."""


@dataclass(eq=False)
class _Job:
    """One ticket. Its tables are read by the device until ``mark`` has ended."""

    ticket: int
    peer: MappedPeer
    transfers: list[Transfer]
    bases: Int64s
    error: str = ""
    mark: Mark | None = None


@dataclass(eq=False)
class _Lane:
    """The work for one peer."""

    stream: Stream
    launched: deque[_Job] = field(default_factory=deque)
    jobs: set[_Job] = field(default_factory=set)
    """Those that have not ended."""
    forgotten: bool = False


class CudaWorkers(Workers):
    """Copies on the device that `use` names, before the first peer is attached."""

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._device = 0
        self._tickets = Tickets()
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._lanes: set[_Lane] = set()
        self._thread: threading.Thread | None = None
        self._closing = False

    def use(self, driver: Driver, device: int) -> None:
        """Copy on ``device`` of ``driver``."""
        self._driver, self._device = driver, device

    def _started(self) -> Driver:
        if self._driver is None:
            raise TransportError("nothing is registered yet; register the regions before connecting")
        return self._driver

    def attach(self, peer: MappedPeer) -> None:
        """As `Workers.attach`."""
        peer.handle = _Lane(self._started().stream(self._device))

    def submit(self, peer: MappedPeer, transfers: Sequence[Transfer], ticket: int, bases: Int64s) -> None:
        """As `Workers.submit`."""
        kept = [Transfer(boxes.pick(), source.copy(), destination.copy()) for boxes, source, destination in transfers]
        job = _Job(ticket, peer, kept, bases)
        lane: _Lane = peer.handle
        with self._changed:
            if lane.forgotten:
                raise TransportError(f"peer {peer.instance} is disconnected; connect again")
            self._tickets.open(ticket)
            if kept:
                lane.jobs.add(job)
                self._lanes.add(lane)
                self._queue.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvbaton-cuda", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                return
        self._tickets.end(ticket)

    def drain(self) -> list[Completion]:
        """As `Workers.drain`."""
        return self._tickets.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Workers.set_waker`."""
        self._tickets.set_waker(wake)

    def forget(self, peer: MappedPeer, reason: str) -> None:
        """As `Workers.forget`: what the device has begun goes on to its end."""
        lane: _Lane = peer.handle
        with self._changed:
            first, lane.forgotten = not lane.forgotten, True
            for job in lane.jobs:
                job.error = job.error or reason
            self._changed.notify_all()
            self._changed.wait_for(lambda: not lane.jobs)
        if first:
            try:
                lane.stream.wait()
                lane.stream.close()
            except TransportError as error:
                logger.warning("cuda: the stream of peer %s could not be closed: %s", peer.instance, error)

    def refuse(self) -> None:
        """As `Workers.refuse`."""
        self._tickets.close()

    def close(self) -> None:
        """As `Workers.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._lanes or self._closing)
                if not self._queue and not self._lanes:
                    return
                queued = [*self._queue]
                self._queue.clear()
                lanes = [*self._lanes]
            for job in queued:
                self._launch(job)
            over = [job for lane in lanes for job in _ended(lane)]
            if over:
                self._end(over)
            elif not queued:
                time.sleep(POLL_SECONDS)

    def _launch(self, job: _Job) -> None:
        lane: _Lane = job.peer.handle
        try:
            # Whoever is let go of, or dead, is not written to.
            job.error = job.error or job.peer.enter()
            if not job.error:
                kernels = self._started().kernels
                for transfer in job.transfers:
                    kernels.copy_boxes(transfer, job.bases, job.peer.bases, lane.stream, 0, transfer.nbytes)
        except Exception as error:  # a thread that dies would leave its tickets open for ever
            job.error = job.error or f"the copy could not be launched: {type(error).__name__}: {error}"
        try:
            # Also after an error: some of it may have been launched.
            job.mark = lane.stream.mark()
        except TransportError as error:
            job.error = job.error or str(error)
        lane.launched.append(job)

    def _end(self, over: list[_Job]) -> None:
        with self._changed:
            for job in over:
                lane: _Lane = job.peer.handle
                lane.jobs.discard(job)
                if not lane.jobs:
                    self._lanes.discard(lane)
                self._tickets.end(job.ticket, job.error)
            self._changed.notify_all()


def _ended(lane: _Lane) -> list[_Job]:
    """The jobs of a lane that are over, in their order."""
    over = []
    while lane.launched:
        job = lane.launched[0]
        try:
            if job.mark is not None and not job.mark.ended():
                break
        except TransportError as error:
            job.error = job.error or str(error)
        over.append(lane.launched.popleft())
    return over
