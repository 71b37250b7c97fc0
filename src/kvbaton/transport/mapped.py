"""What transports share that address the peer's memory directly: workers that copy rows to rows in one pass."""

from __future__ import annotations

import abc
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvbaton.copy import copy_boxes
from kvbaton.errors import TransportError
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.base import Completion, RemotePeer, Transport
from kvbaton.transport.chunks import chunks
from kvbaton.transport.table import RegionTable, check_write
from kvbaton.transport.tickets import Tickets

CHUNK = 8 << 20
"""Bytes that a worker copies between two looks at whether the peer is still there."""
LEAST_CHUNK = 1 << 20
"""Smaller chunks cost more to hand out than other workers save by taking them."""
AT_ONCE = 1 << 16
"""Bytes that are copied in less time than it takes to wake a worker."""

MOST_WORKERS = 4
"""More threads than this copy no faster: a few fill the memory bus."""


def _processors() -> int:
    """Give the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class MappedPeer(RemotePeer):
    """A peer whose regions are addressed directly."""

    def __init__(self, instance: str, bases: Int64s, nbytes: Int64s) -> None:
        self.instance = instance
        self.bases = bases
        self.nbytes = nbytes
        self.jobs: set[Job] = set()
        self.released = False

    def reaches(self, region: int) -> bool:
        """As `RemotePeer.reaches`: not where it could not be mapped."""
        return region < len(self.nbytes) and bool(self.nbytes[region])

    def enter(self) -> str:
        """Before each chunk: empty if the peer's memory may be touched until `leave`, otherwise why not."""
        return ""

    def leave(self) -> None:
        """After each chunk that `enter` allowed."""

    def release(self) -> None:
        """Let go of the mappings; no chunk is in progress any more."""


class Job:
    """One ticket: the transfers that are left to hand out, in chunks for ``workers`` workers."""

    def __init__(self, ticket: int, peer: MappedPeer, transfers: list[Transfer], workers: int) -> None:
        self.ticket = ticket
        self.peer = peer
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


class MappedTransport(Transport):
    """A transport with ``workers`` threads that copy. Subclasses connect."""

    at_once = 0
    """Writes of so many bytes are copied by `write` itself."""

    def __init__(self, instance: str, workers: int = 0) -> None:
        self.instance = instance
        self.table = RegionTable()
        self._workers = workers or min(MOST_WORKERS, _processors())
        self._tickets = Tickets()
        self._peers: set[MappedPeer] = set()
        self._queue: deque[Job] = deque()
        lock = threading.RLock()
        self._work_left = threading.Condition(lock)
        """A job was queued."""
        self._changed = threading.Condition(lock)
        """A job is over."""
        self._threads: list[threading.Thread] = []
        self._closing = False

    def register(self, regions: Sequence[Region]) -> None:
        """As `Transport.register`."""
        self.table = RegionTable.of_kinds(regions, self.capabilities.memory_kinds, self.name)

    def connect(self, descriptor: bytes) -> RemotePeer:
        """As `Transport.connect`."""
        peer = self._attach(descriptor)
        with self._changed:
            if not self._closing:
                self._peers.add(peer)
                return peer
        peer.release()
        raise TransportError("the transport is closed; nothing can be connected any more")

    @abc.abstractmethod
    def _attach(self, descriptor: bytes) -> MappedPeer:
        """Map the peer's regions."""

    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """As `Transport.write`."""
        if not isinstance(peer, MappedPeer):
            raise TransportError(f"{peer!r} was not connected by the {self.name} transport")
        checked = check_write(transfers, self.table.nbytes, peer.nbytes, peer.instance)
        job = Job(ticket, peer, checked, self._workers)
        with self._changed:
            if peer not in self._peers:
                raise TransportError(f"peer {peer.instance} is disconnected; connect again")
            self._tickets.open(ticket)
            taken = []
            if checked:
                peer.jobs.add(job)
            if job.nbytes <= self.at_once:
                while not job.handed_out:
                    taken.append(self._take(job))
            elif checked:
                self._queue.append(job)
                self._start_threads()
                self._work_left.notify(1 + job.nbytes // CHUNK)
        for chunk in taken:
            self._run(job, *chunk)
        if not checked:
            self._tickets.end(ticket)

    def poll(self) -> list[Completion]:
        """As `Transport.poll`."""
        return self._tickets.drain()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Transport.set_waker`."""
        self._tickets.set_waker(wake)

    def disconnect(self, peer: RemotePeer) -> None:
        """As `Transport.disconnect`; returns when no copy to the peer is in progress."""
        if isinstance(peer, MappedPeer):
            self._drop(peer, f"disconnected from peer {peer.instance} before the write was over")

    def close(self) -> None:
        """As `Transport.close`."""
        with self._changed:
            self._closing = True
            peers = list(self._peers)
        self._tickets.close()
        for peer in peers:
            self._drop(peer, "the transport was closed before the write was over")
        with self._changed:
            self._work_left.notify_all()
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _drop(self, peer: MappedPeer, reason: str) -> None:
        with self._changed:
            self._peers.discard(peer)
            for job in list(peer.jobs):
                self._fail(job, reason)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not peer.jobs)
            if peer.released:
                return
            peer.released = True
        peer.release()

    def _start_threads(self) -> None:
        while len(self._threads) < self._workers:
            name = f"kvbaton-{self.name}-copy-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _prepare(self, job: Job) -> str:
        """Called once by a worker, before the first chunk of a job; an error ends the job."""
        return ""

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
            error = (self._prepare(job) if first else "") or job.error
            error = error or self._copy(job.peer, transfer, begin, end)
        except Exception as raised:  # a worker that dies would leave its ticket open for ever
            error = f"the copy failed: {type(raised).__name__}: {raised}"
        with self._changed:
            job.running -= 1
            if error:
                self._fail(job, error)
            else:
                self._end_if_over(job)

    def _copy(self, peer: MappedPeer, transfer: Transfer, begin: int, end: int) -> str:
        error = peer.enter()
        if error:
            return error
        try:
            copy_boxes(transfer, self.table.bases, peer.bases, begin=begin, end=end)
        finally:
            peer.leave()
        return ""

    def _fail(self, job: Job, error: str) -> None:
        job.error = job.error or error
        if job in self._queue:
            self._queue.remove(job)
        self._end_if_over(job)

    def _end_if_over(self, job: Job) -> None:
        """End the ticket when no worker is inside it and none will be. The lock is held."""
        if job.handed_out and not job.running and job in job.peer.jobs:
            job.peer.jobs.discard(job)
            self._tickets.end(job.ticket, job.error)
            self._changed.notify_all()
