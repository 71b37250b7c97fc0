"""Workers that are Python threads: where the native kernel is missing, and where a gate of Python's must be passed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvbaton.copy import copy_boxes
from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.base import Completion
from kvbaton.transport.chunks import chunks
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.workers import CHUNK, LEAST_CHUNK, MappedPeer, Workers


class Job:
    """One ticket: the transfers that are left to hand out, in chunks for ``workers`` workers."""

    def __init__(
        self, ticket: int, peer: MappedPeer, transfers: Sequence[Transfer], bases: Int64s, workers: int
    ) -> None:
        self.ticket = ticket
        self.peer = peer
        self.bases = bases
        self.error = ""
        self.running = 0
        self.started = False
        self.nbytes = sum(transfer.nbytes for transfer in transfers)
        self._chunks = chunks(transfers, max(LEAST_CHUNK, min(CHUNK, self.nbytes // workers)))
        self._next = next(self._chunks, None)

    def next_chunk(self) -> tuple[Transfer, int, int]:
        """The next byte range to copy, and of which transfer."""
        chunk = self._next
        if chunk is None:
            raise RuntimeError("every chunk of this job was handed out")
        self._next = next(self._chunks, None)
        return chunk

    @property
    def handed_out(self) -> bool:
        """Whether no chunk is left to hand out."""
        return bool(self.error) or self._next is None


class _PeerJobs:
    """What the workers know about a peer."""

    def __init__(self) -> None:
        self.jobs: set[Job] = set()
        self.forgotten = False


class PythonWorkers(Workers):
    """``count`` threads with names that begin with ``name``, started when there is something to do.

    Writes of up to ``at_once`` bytes are copied by `submit` itself. ``prepare`` is called once by a worker, before the
    first chunk of a job; the error that it gives ends the job.
    """

    def __init__(self, name: str, count: int, at_once: int, prepare: Callable[[Job], str] | None = None) -> None:
        self._name = name
        self._count = count
        self._at_once = at_once
        self._prepare = prepare
        self._tickets = Tickets()
        self._queue: deque[Job] = deque()
        lock = threading.RLock()
        self._work_left = threading.Condition(lock)
        """A job was queued."""
        self._changed = threading.Condition(lock)
        """A job is over."""
        self._threads: list[threading.Thread] = []
        self._closing = False

    def attach(self, peer: MappedPeer) -> None:
        """As `Workers.attach`."""
        peer.handle = _PeerJobs()

    def submit(self, peer: MappedPeer, transfers: Sequence[Transfer], ticket: int, bases: Int64s) -> None:
        """As `Workers.submit`."""
        kept = [Transfer(boxes.pick(), source.copy(), destination.copy()) for boxes, source, destination in transfers]
        job = Job(ticket, peer, kept, bases, self._count)
        with self._changed:
            if peer.handle.forgotten:
                raise TransportError(f"peer {peer.instance} is disconnected; connect again")
            self._tickets.open(ticket)
            taken = []
            if kept:
                peer.handle.jobs.add(job)
            if job.nbytes <= self._at_once:
                while not job.handed_out:
                    taken.append(self._take(job))
            elif kept:
                self._queue.append(job)
                self._start_threads()
                self._work_left.notify(1 + job.nbytes // CHUNK)
        for chunk in taken:
            self._run(job, *chunk)
        if not kept:
            self._tickets.end(ticket)

    def drain(self) -> list[Completion]:
        """As `Workers.drain`."""
        return self._tickets.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Workers.set_waker`."""
        self._tickets.set_waker(wake)

    def wait(self, job: Job, seconds: float) -> None:
        """Wait in a worker, but no longer than the job has a future."""
        with self._changed:
            self._changed.wait_for(lambda: bool(job.error) or self._closing, seconds)

    def forget(self, peer: MappedPeer, reason: str) -> None:
        """As `Workers.forget`."""
        with self._changed:
            peer.handle.forgotten = True
            for job in list(peer.handle.jobs):
                self._fail(job, reason)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not peer.handle.jobs)

    def refuse(self) -> None:
        """As `Workers.refuse`."""
        self._tickets.close()
        with self._changed:
            self._closing = True

    def close(self) -> None:
        """As `Workers.close`."""
        with self._changed:
            self._work_left.notify_all()
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _start_threads(self) -> None:
        while len(self._threads) < self._count:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._work_left:
                self._work_left.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job = self._queue[0]
                chunk = self._take(job)
                if job.handed_out:
                    self._queue.popleft()
            self._run(job, *chunk)

    def _take(self, job: Job) -> tuple[bool, Transfer, int, int]:
        """Whether it is the job's first chunk, and the chunk. The lock is held; `_run` must follow."""
        first, job.started = not job.started, True
        job.running += 1
        return first, *job.next_chunk()

    def _run(self, job: Job, first: bool, transfer: Transfer, begin: int, end: int) -> None:
        """Copy a chunk that was taken. Without the lock."""
        try:
            error = self._prepare(job) if first and self._prepare is not None else ""
            error = error or job.error or _copy(job, transfer, begin, end)
        except Exception as raised:  # a worker that dies would leave its ticket open for ever
            error = f"the copy failed: {type(raised).__name__}: {raised}"
        with self._changed:
            job.running -= 1
            if error:
                self._fail(job, error)
            else:
                self._end_if_over(job)

    def _fail(self, job: Job, error: str) -> None:
        job.error = job.error or error
        if job in self._queue:
            self._queue.remove(job)
        self._end_if_over(job)

    def _end_if_over(self, job: Job) -> None:
        """End the ticket when no worker is inside it and none will be. The lock is held."""
        jobs = job.peer.handle.jobs
        if job.handed_out and not job.running and job in jobs:
            jobs.discard(job)
            self._tickets.end(job.ticket, job.error)
            self._changed.notify_all()


def _copy(job: Job, transfer: Transfer, begin: int, end: int) -> str:
    error = job.peer.enter()
    if error:
        return error
    try:
        copy_boxes(transfer, job.bases, job.peer.bases, begin=begin, end=end)
    finally:
        job.peer.leave()
    return ""
