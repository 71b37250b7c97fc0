"""What an adapter over a vendor's library promises: contiguous writes from registered memory into a peer's.

An adapter knows addresses and lengths, and nothing of boxes, units, tickets, slabs or rooms: `FabricTransport` turns
those into writes. It has no threads of its own beyond those that the library starts.

Promises, the same for every library:

* **Completion.** A handle that ends without error has all its bytes where the peer's CPU (or device) sees them.
* **Once.** Each handle that `Fabric.post` took is reported once by `Fabric.poll`, also when the peer dies. The library
  touches no memory for it any more. What it cannot take back from a peer that was let go of is reported when it is
  over, if ever.
* **No order.** Neither of handles, nor of the bytes of one.
* **Refusals are errors.** What the library would answer with an abort of the process, an endless wait or a silent
  loss is found out before it is asked: `post` raises `TransportError`.

Who calls what: `post`, `poll`, `wait` and `disconnect` are called by one thread at a time, `connect` and `revoke` by
any thread beside them. `register` is called once, before everything but the constructor, and `describe` right after
it; `close` is the last call.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvbaton.errors import TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.base import Costs

if TYPE_CHECKING:
    from kvbaton.devices.choose import Choice


class Writes(NamedTuple):
    """Contiguous writes from one local region into one region of the peer: ``n`` of each, int64, in bytes.

    Regions count as in `Fabric.register`, on either side.
    """

    local_region: int
    remote_region: int
    local_offsets: Int64s
    remote_offsets: Int64s
    lengths: Int64s

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return int(self.lengths.sum())


class Ended(NamedTuple):
    """The end of one handle: ``error`` is empty if every byte is visible at the peer."""

    handle: int
    error: str = ""


class FabricPeer:
    """A connected peer. Adapters derive their own; hashable by identity."""

    def __init__(self, name: str) -> None:
        self.name = name
        """What it is called in messages: its instance id."""

    @property
    def alive(self) -> bool:
        """Whether the library still believes that it can be written to; once False, only a new `connect` helps."""
        return True


class FabricLimits(NamedTuple):
    """What one `Fabric.post` takes. The caller cuts to it; the limits are the library's, not a wish."""

    writes: int = 1 << 20
    """Writes of one post."""
    write_bytes: int = 1 << 31
    """Bytes of one write."""
    posts: int = 1 << 20
    """Handles that may be under way at a time, to all peers."""


class Fabric(abc.ABC):
    """One process's end of a library. Made with the instance id that peers know the process by.

    An adapter's class in `kvbaton.transport.fabric.FABRICS` is called with that id and the keywords ``options`` (its
    own ones, text to text), ``bind`` and ``advertise`` (as for `kvbaton.transport.create`).

    Its constructor raises `TransportUnavailable`, with the reason and what to change, where the library, a device or a
    permission is missing, and `ConfigurationError` for options that it does not know.
    """

    name: str
    """The transport's name: "nixl"."""
    OPTIONS: ClassVar[Mapping[str, str]] = {}
    """Its own options, and what each is for, in words."""
    costs: Costs = Costs()
    """What its two ways of writing cost. Those of the class are what `kvbaton plan` shows; an adapter says how it has
    measured them."""
    memory_kinds: frozenset[str]
    """Kinds of memory that this library reaches on this machine: "host", "cuda"."""
    cross_host: bool
    """Whether it works between hosts, as it is set up here."""
    hardware: bool = False
    """Whether network cards carry the bytes, as it is set up here, and not sockets or the like."""
    kept_sockets: int = 0
    """Sockets that the library may keep, until it is closed, of each process that it ever met, as it is set up here."""
    limits: FabricLimits = FabricLimits()

    @abc.abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make ``regions`` readable and writable. Raises `TransportUnavailable`, naming the region, if that fails."""

    @abc.abstractmethod
    def describe(self) -> bytes:
        """What a peer's `connect` needs, the registered regions included; at most 48 KiB."""

    @abc.abstractmethod
    def connect(self, descriptor: bytes, name: str) -> FabricPeer:
        """Connect to the peer whose `describe` gave ``descriptor``; ``name`` is its instance id. May block for seconds.

        The descriptor comes from another machine. Raises `TransportError` if it cannot be understood, and
        `TransportUnavailable` if the peer cannot be reached this way.
        """

    @abc.abstractmethod
    def post(self, peer: FabricPeer, writes: Writes, handle: int) -> None:
        """Start ``writes``; `poll` reports ``handle`` when they are over. ``handle`` is never used twice.

        The caller has checked offsets against both sides' regions and `limits`. May block as long as the library's
        queues are full, but not on the peer. Raises `TransportError` if nothing was started.
        """

    @abc.abstractmethod
    def poll(self) -> list[Ended]:
        """The handles that ended since the last call, and whatever progress the library needs from its caller."""

    def wait(self, seconds: float) -> None:
        """Block until `poll` may have something, at most ``seconds``. Called only while handles are under way."""
        time.sleep(min(seconds, 50e-6))

    @abc.abstractmethod
    def disconnect(self, peer: FabricPeer) -> bool:
        """Let go of a peer, for which nothing is posted any more; returns at once, and may be called again.

        Takes back what the library can take back: that ends with an error. Whether all handles of the peer are over,
        and reported by the next `poll` at the latest. False: the library may still read this process's memory for it.
        """

    def revoke(self, name: str) -> bool:
        """Whether writes by the peer of that name are proven to land no more, by the library's own means.

        False where the library has none, which is the rule: see each adapter.
        """
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of all peers, of registered memory, and of the library. Safe to call twice."""

    def _require_kinds(self, regions: Sequence[Region]) -> None:
        """For adapters: raise `TransportUnavailable` for memory that is of none of the `memory_kinds`."""
        for number, region in enumerate(regions):
            if region.kind not in self.memory_kinds:
                raise TransportUnavailable(
                    f"region {number} is {region.kind} memory; {self.name} reaches "
                    f"{', '.join(sorted(self.memory_kinds))} memory here"
                )

    @staticmethod
    def devices_option(options: Mapping[str, str], near: Callable[[], Choice]) -> str:
        """The option ``devices`` for the network devices that ``near()`` finds.

        Empty where ``options``, or a variable of the library, leave it nothing to be told.
        """
        return ""

    def found(self) -> list[str]:
        """Devices that the library sees on this machine, for `kvbaton doctor`: a line for each."""
        return []
