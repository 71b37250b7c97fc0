"""What copies for a mapped transport: the small interface, and how its copies are cut.

`NativeWorkers` are threads of the native kernel, `PythonWorkers` do the same where it is missing.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.base import Completion, RemotePeer

CHUNK = 8 << 20
"""Bytes that a worker copies between two looks at whether the peer is still there."""
LEAST_CHUNK = 1 << 20
"""Smaller chunks cost more to hand out than other workers save by taking them."""
AT_ONCE = 1 << 16
"""Bytes that are copied in less time than it takes to wake a worker."""
MOST_WORKERS = 4
"""More threads than this copy no faster: a few fill the memory bus."""


def worker_count() -> int:
    """Give the number of threads that copy fastest here."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, processors)


class MappedPeer(RemotePeer):
    """A peer whose regions are addressed directly."""

    descriptor = -1
    """A descriptor (a pidfd) that is readable once the peer's process has ended, for workers that cannot call `enter`;
    -1 if there is none."""

    def __init__(self, instance: str, bases: Int64s, nbytes: Int64s) -> None:
        self.instance = instance
        self.bases = bases
        self.nbytes = nbytes
        self.handle: Any = None
        """What the workers know about it."""

    def enter(self) -> str:
        """Before each chunk: empty if the peer's memory may be touched until `leave`, otherwise why not."""
        return ""

    def leave(self) -> None:
        """After each chunk that `enter` allowed."""

    def release(self) -> None:
        """Let go of the mappings, once; no chunk is in progress any more."""


class Workers(abc.ABC):
    """Threads that copy transfers to peers and report their tickets. Every method may be called from any thread."""

    @abc.abstractmethod
    def attach(self, peer: MappedPeer) -> None:
        """Learn of a peer, before anything is submitted for it."""

    @abc.abstractmethod
    def submit(self, peer: MappedPeer, transfers: Sequence[Transfer], ticket: int, bases: Int64s) -> None:
        """Start copying transfers that were checked, from the regions at ``bases``; `drain` reports the ticket once.

        Their arrays are not read any more when it returns. Raises `TransportError` if the ticket is outstanding, the
        peer was forgotten, or the workers are closed.
        """

    @abc.abstractmethod
    def drain(self) -> list[Completion]:
        """The tickets that ended since the last call. Never blocks."""

    @abc.abstractmethod
    def set_waker(self, wake: Callable[[], None]) -> None:
        """As `Transport.set_waker`."""

    @abc.abstractmethod
    def forget(self, peer: MappedPeer, reason: str) -> None:
        """End the peer's tickets with an error, take no more, and return when no copy to it is in progress."""

    @abc.abstractmethod
    def refuse(self) -> None:
        """Take no more from anybody."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the threads, after `refuse` and after all peers were forgotten; `drain` still works. May be repeated."""
