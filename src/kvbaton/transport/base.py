"""What a transport promises.

A transport moves bytes from this process's registered regions into a peer's. It knows nothing of rooms, layouts or
engines. The writer is always the side that holds the data (prefill); a process may be both.

Promises, all checked by `kvbaton.transport.conformance`:

* **Visibility.** A ticket completes without error only when all of its bytes are visible to the peer's CPU.
* **No order.** Tickets may complete in any order; bytes of one ticket may land in any order.
* **Final.** A completed ticket (either way) touches no memory any more, on either side. Each ticket completes exactly
  once, also when the peer dies or `close` is called.
* **Bounds.** A write outside the regions that the peer registered is refused (by the writer or by the peer) with
  `TransportError`; it never lands and harms no other ticket.
* **Fence.** After `fence(peer)` returned True, no write from or to that peer, past or future, can touch this process's
  memory, until `readmit` lets it make new connections. False: it cannot be proven yet; call again.
* **Threads.** Every method may be called from any thread. `write` and `poll` do not block on the wire.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbaton.memory import Region
from kvbaton.plan.boxes import Transfer


class Costs(NamedTuple):
    """What a one-sided transport pays for the two ways that it has; for `choose_executor`."""

    piece_seconds: float = 13e-6
    """For each piece that is written by itself: from 256 B pieces at 0.02 GB/s, and 128 KiB pieces at 9.8 GB/s."""
    copy_bytes_per_second: float = 7e9
    """What gathering or scattering copies: the native kernel on two cores, 2 KiB pieces."""
    packed_seconds: float = 0.0
    """For each write that is packed, however small: the way over the side channel and back."""


class Capabilities(NamedTuple):
    """What a transport can do."""

    mapped: bool
    """The peer's memory is addressed directly: a copy is one pass from source rows to destination rows."""
    cross_host: bool
    """Works between hosts."""
    memory_kinds: frozenset[str]
    """Kinds of memory it can read and write: "host", "cuda"."""
    needs_shared_memory: bool
    """The destination region must be a `SharedMemory`."""
    one_sided: bool = False
    """It can write each piece by itself, without the peer's help, at a cost for each."""
    costs: Costs = Costs()
    """What its two ways cost, where it is one-sided."""
    hardware: bool = False
    """Network cards carry the bytes, not sockets or whatever else a library has."""
    cross_process: bool = True
    """Works between processes."""
    lets_go: bool = False
    """When `Transport.disconnect` has returned at a writer, nothing of it touches the peer's memory any more, whatever
    the peer did meanwhile: its word is as good as a fence."""
    kept_sockets: int = 0
    """Sockets that it may keep, until it is closed, of each process that it ever met. Everything else that it has of a
    peer goes with the peer."""


class Completion(NamedTuple):
    """The end of one ticket: ``error`` is empty if every byte is visible at the peer."""

    ticket: int
    error: str = ""


class RemotePeer(abc.ABC):
    """A connected peer, made by `Transport.connect`. Opaque to callers; hashable by identity."""

    instance: str
    """The peer's instance id."""

    @property
    def alive(self) -> bool:
        """Whether it can still be written to; once False, only a new `Transport.connect` helps."""
        return True

    def reaches(self, region: int) -> bool:
        """Whether writes can go into that region of the peer: it may be registered, and of a kind that cannot be."""
        return True


class Transport(abc.ABC):
    """Moves bytes between registered regions of two processes."""

    name: str
    instance: str
    """The instance id that peers know this process by, and `fence` it by."""
    capabilities: Capabilities

    @abc.abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make ``regions`` readable by writes of this process and writable by peers. Called once, before `describe`.

        Raises `TransportUnavailable` if the memory is of a kind that this transport cannot reach.
        """

    @abc.abstractmethod
    def describe(self) -> bytes:
        """The descriptor that a peer needs to `connect`; opaque, bounded to 64 KiB, holds the registered regions."""

    @abc.abstractmethod
    def connect(self, descriptor: bytes) -> RemotePeer:
        """Connect to the peer whose `describe` gave ``descriptor``. May block up to a few seconds.

        Raises `TransportUnavailable` if the peer cannot be reached this way (another host, no permission), and
        `TransportError` if the descriptor cannot be understood.
        """

    @abc.abstractmethod
    def admit(self, descriptor: bytes) -> None:
        """Learn who may write here: the `describe` of a peer that connected to us. Some transports need it to `fence`.

        Raises `TransportError` if the descriptor cannot be understood.
        """

    @abc.abstractmethod
    def write(self, peer: RemotePeer, transfers: Sequence[Transfer], ticket: int) -> None:
        """Start copying ``transfers`` into the peer's regions; `poll` reports ``ticket`` once, when it is over.

        ``ticket`` is chosen by the caller and is unique for this transport's life. Raises `RowsError` for a box or unit
        outside the local regions, before anything moved. A transfer list that moves no byte completes as success.
        """

    @abc.abstractmethod
    def poll(self) -> list[Completion]:
        """The tickets that ended since the last call; empty if none. Never blocks."""

    @abc.abstractmethod
    def set_waker(self, wake: Callable[[], None]) -> None:
        """Call ``wake()`` (thread-safe, cheap) whenever `poll` has something new; once may do for several tickets.

        Where it has a ``descriptor`` (an eventfd), writing 8 bytes to that, or to a copy of it, does the same.
        """

    @abc.abstractmethod
    def disconnect(self, peer: RemotePeer) -> None:
        """Let go of a peer (as a writer to it): its outstanding tickets end with an error, its mappings are closed."""

    @abc.abstractmethod
    def fence(self, instance: str) -> bool:
        """Whether writes *by* the peer with that instance id can no longer reach this process's memory.

        Refuses further writes from it (closes its connections, where there are any). True when that is proven.
        """

    def readmit(self, instance: str) -> None:
        """Let a fenced instance connect and write again; the connections that it had when it was fenced stay out.

        Called before a new handshake with a process that was cut off but lives on. Nothing to do where a fence is the
        proof of a process's end.
        """
        return

    @abc.abstractmethod
    def close(self) -> None:
        """End all tickets, threads and sockets. Safe to call twice."""
