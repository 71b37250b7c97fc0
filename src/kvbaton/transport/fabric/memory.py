"""A fabric within one process: the strict reference of `kvbaton.transport.fabric.base`, for tests and for authors.

It copies when it is polled, in an order that is random, a few pieces at a time; so a user that looks too early, or
counts on an order, is found out. Whoever calls it otherwise than the contract says gets a `FabricMisuse`. Tests make it
slow, broken or dead: see `Faults`.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from kvbaton.copy import copy_boxes
from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Boxes, Int64s, Transfer
from kvbaton.transport.fabric.base import Ended, Fabric, FabricLimits, FabricPeer, Writes
from kvbaton.transport.gate import Gate

PIECES = 4096
"""Pieces that one poll copies at most, and..."""
PIECE_BYTES = 1 << 20
"""... bytes, about: what is longer is copied in parts of so many bytes."""
Number = Annotated[int, msgspec.Meta(ge=0)]


class FabricMisuse(AssertionError):
    """A caller broke the contract of `Fabric`; a library would have crashed, hung, or lost data."""


@dataclass
class Faults:
    """What goes wrong at one end; may be set at any time."""

    fail: Callable[[int], str] | None = None
    """The error of a handle that ends now; empty: none."""
    refuse: Callable[[int], str] | None = None
    """Why a handle is not taken by `Fabric.post`; empty: it is."""
    stuck: bool = False
    """Nothing that was posted goes on or ends."""
    stopped: bool = False
    """This end stands still: what peers write to it does not go on or end."""
    stubborn: bool = False
    """A disconnect cannot take back what is stuck."""
    dead: bool = False
    """This end takes no write any more: writers see errors, and lose the peer."""
    revokes: bool = False
    """Whether `revoke` has a proof."""


class _Descriptor(msgspec.Struct, frozen=True, array_like=True, tag="memory1"):
    hub: str
    instance: str
    life: str
    regions: tuple[tuple[Number, Number], ...]


class Hub:
    """The ends that can find each other, by instance id."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.ends: weakref.WeakValueDictionary[str, MemoryFabric] = weakref.WeakValueDictionary()


DEFAULT_HUB = Hub()
"""The hub of those that name none."""


class MemoryPeer(FabricPeer):
    """Another end in this process."""

    def __init__(self, name: str, end: MemoryFabric, regions: tuple[tuple[int, int], ...], refusals: int) -> None:
        super().__init__(name)
        self.end = end
        self.bases: Int64s = np.array([address for address, _ in regions], dtype=np.int64)
        self.nbytes: Int64s = np.array([nbytes for _, nbytes in regions], dtype=np.int64)
        self.refusals = refusals
        self.lost = False

    @property
    def alive(self) -> bool:
        """As `FabricPeer.alive`."""
        return not self.lost


class _Post:
    """A handle under way: its writes as boxes, in a random order, and how far they are."""

    def __init__(self, handle: int, peer: MemoryPeer, writes: Writes, random: np.random.Generator) -> None:
        self.handle = handle
        self.peer = peer
        parts = np.maximum(1, -(-writes.lengths // PIECE_BYTES))
        which = np.repeat(np.arange(len(parts)), parts)
        skipped = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * PIECE_BYTES
        order = random.permutation(len(which))
        which, skipped = which[order], skipped[order]
        self.lengths = np.minimum(writes.lengths[which] - skipped, PIECE_BYTES)
        self.local = _places(writes.local_region, writes.local_offsets[which] + skipped)
        self.remote = _places(writes.remote_region, writes.remote_offsets[which] + skipped)
        self.done = 0

    def some(self) -> Transfer:
        """The next pieces to copy."""
        reach = np.cumsum(self.lengths[self.done : self.done + PIECES])
        some = slice(self.done, self.done + max(1, int(np.searchsorted(reach, PIECE_BYTES, side="right"))))
        self.done = min(some.stop, len(self.lengths))
        ones = np.ones_like(self.lengths[some])
        shape = np.ascontiguousarray(np.stack([ones, ones, self.lengths[some]], axis=1))
        unit = np.zeros(1, dtype=np.int64)
        return Transfer(Boxes(shape, self.local[some], self.remote[some]), unit, unit)

    @property
    def over(self) -> bool:
        """Whether all is copied."""
        return self.done == len(self.lengths)


class MemoryFabric(Fabric):
    """One end. ``limits`` may be as narrow as a test likes; `Faults` are in ``faults``."""

    name = "memory"
    memory_kinds = frozenset({"host"})
    cross_host = False

    def __init__(
        self,
        instance: str,
        options: Mapping[str, str] | None = None,
        bind: str = "",
        advertise: str = "",
        *,
        hub: Hub = DEFAULT_HUB,
        limits: FabricLimits | None = None,
        seed: int = 0,
    ) -> None:
        if options:
            raise ConfigurationError(f"memory has no option {', '.join(sorted(options))}; there are none")
        if instance in hub.ends:
            raise TransportUnavailable(f"instance {instance} has an end of the memory fabric already")
        self.limits = limits or FabricLimits(writes=10_000, write_bytes=1 << 31, posts=64)
        self.faults = Faults()
        self.polls = 0
        self.misuses: list[str] = []
        self.gate = Gate()
        self._instance = instance
        self._life = secrets.token_hex(8)
        self._hub = hub
        self._random = np.random.default_rng(seed)
        self._regions: tuple[Region, ...] | None = None
        self._bases: Int64s = np.zeros(0, dtype=np.int64)
        self._posts: dict[int, _Post] = {}
        self._used = -1
        self._ended: list[Ended] = []
        self._caller = threading.Lock()
        self._closed = False
        hub.ends[instance] = self

    def register(self, regions: Sequence[Region]) -> None:
        """As `Fabric.register`."""
        self._require(self._regions is None, "register was called twice")
        for number, region in enumerate(regions):
            self._require(region.nbytes > 0, f"region {number} is empty")
        self._require_kinds(regions)
        self._regions = tuple(regions)
        self._bases = np.array([region.address for region in regions], dtype=np.int64)

    def describe(self) -> bytes:
        """As `Fabric.describe`."""
        self._require(self._regions is not None, "describe was called before register")
        places = tuple((region.address, region.nbytes) for region in self._regions or ())
        return msgspec.msgpack.encode(_Descriptor(self._hub.token, self._instance, self._life, places))

    def connect(self, descriptor: bytes, name: str) -> FabricPeer:
        """As `Fabric.connect`."""
        self._require(self._regions is not None, "connect was called before register")
        try:
            described = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"this is not a descriptor of the memory fabric: {error}") from error
        end = self._hub.ends.get(described.instance) if described.hub == self._hub.token else None
        if end is None or end._life != described.life or end.faults.dead or end._closed:
            raise TransportUnavailable(f"peer {name} is not in this process, or has ended")
        return MemoryPeer(name, end, described.regions, end.gate.refusals(self._instance))

    def post(self, peer: FabricPeer, writes: Writes, handle: int) -> None:
        """As `Fabric.post`."""
        with self._called_alone():
            self._require(isinstance(peer, MemoryPeer), "the peer is another fabric's")
            assert isinstance(peer, MemoryPeer)
            self._require(handle > self._used, f"handle {handle} was used before")
            self._used = handle
            self._require(len(self._posts) < self.limits.posts, f"more than {self.limits.posts} handles are under way")
            self._check(peer, writes)
            why = self.faults.refuse(handle) if self.faults.refuse else ""
            if why:
                raise TransportError(why)
            if peer.lost:
                raise TransportError(f"peer {peer.name} is gone")
            self._posts[handle] = _Post(handle, peer, writes, self._random)

    def poll(self) -> list[Ended]:
        """As `Fabric.poll`: copies a little of what is under way, of any handle."""
        with self._called_alone():
            self.polls += 1
            posts = [] if self.faults.stuck else self._posts.values()
            waiting = [post for post in posts if not post.peer.end.faults.stopped]
            for index in self._random.permutation(len(waiting))[:4]:
                self._copy(waiting[index])
            ended, self._ended = self._ended, []
            return ended

    def disconnect(self, peer: FabricPeer) -> bool:
        """As `Fabric.disconnect`."""
        with self._called_alone():
            assert isinstance(peer, MemoryPeer)
            peer.lost = True
            mine = [post for post in self._posts.values() if post.peer is peer]
            if self.faults.stubborn and mine:
                return False
            for post in mine:
                self._end(post, f"disconnected from peer {peer.name}")
            return True

    def revoke(self, name: str) -> bool:
        """As `Fabric.revoke`, where `Faults.revokes` says so."""
        if not self.faults.revokes:
            return False
        self.gate.refuse(name)
        return self.gate.wait_quiet(name, 1.0)

    def close(self) -> None:
        """As `Fabric.close`."""
        self._closed = True
        if self._hub.ends.get(self._instance) is self:
            del self._hub.ends[self._instance]
        self.gate.shut()
        self.gate.wait_quiet(None, 60.0)
        self._posts.clear()
        self._regions = ()

    def found(self) -> list[str]:
        """As `Fabric.found`."""
        return ["the memory of this process"]

    def _copy(self, post: _Post) -> None:
        peer = post.peer
        if peer.end.faults.dead or not peer.end.gate.enter(self._instance, peer.refusals):
            peer.lost = True
            self._end(post, f"peer {peer.name} is gone, or takes nothing more from here")
            return
        try:
            copy_boxes(post.some(), self._bases, peer.bases)
        finally:
            peer.end.gate.leave(self._instance)
        if post.over:
            self._end(post, self.faults.fail(post.handle) if self.faults.fail else "")

    def _end(self, post: _Post, error: str) -> None:
        del self._posts[post.handle]
        self._ended.append(Ended(post.handle, error))

    def _check(self, peer: MemoryPeer, writes: Writes) -> None:
        regions = self._regions or ()
        count = len(writes.lengths)
        self._require(0 < count <= self.limits.writes, f"{count} writes in a post")
        self._require(0 <= writes.local_region < len(regions), f"local region {writes.local_region}")
        self._require(0 <= writes.remote_region < len(peer.nbytes), f"remote region {writes.remote_region}")
        sides = (
            ("local", writes.local_offsets, regions[writes.local_region].nbytes),
            ("remote", writes.remote_offsets, int(peer.nbytes[writes.remote_region])),
        )
        self._require(writes.lengths.dtype == np.int64 and writes.lengths.ndim == 1, "lengths are no int64s")
        self._require(bool((writes.lengths > 0).all()), "a write of no bytes")
        self._require(int(writes.lengths.max()) <= self.limits.write_bytes, f"a write of {writes.lengths.max()} bytes")
        for side, offsets, nbytes in sides:
            self._require(offsets.dtype == np.int64 and offsets.shape == writes.lengths.shape, f"{side} offsets")
            inside = int(offsets.min()) >= 0 and int((offsets + writes.lengths).max()) <= nbytes
            self._require(inside, f"a write outside the {side} region of {nbytes} bytes")

    def _called_alone(self) -> _Alone:
        self._require(not self._closed, "called after close")
        return _Alone(self)

    def _require(self, kept: bool, what: str) -> None:
        if not kept:
            self.misuses.append(what)
            raise FabricMisuse(what)


class _Alone:
    """Finds out callers that come while another thread is inside."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric

    def __enter__(self) -> None:
        self._fabric._require(self._fabric._caller.acquire(blocking=False), "two threads called at a time")

    def __exit__(self, *raised: object) -> None:
        self._fabric._caller.release()


def _places(region: int, offsets: Int64s) -> Int64s:
    """A side of boxes: one place for each offset."""
    places = np.zeros((len(offsets), 7), dtype=np.int64)
    places[:, 0], places[:, 1], places[:, 3] = region, offsets, 1
    return places
