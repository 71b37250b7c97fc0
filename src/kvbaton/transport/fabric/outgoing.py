"""The writes to one peer that are not over: what is posted next and where, what is yet to be confirmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.fabric.area import Area, Flags, one_write
from kvbaton.transport.fabric.base import FabricPeer, Writes
from kvbaton.transport.fabric.loads import LEAST_LOAD, MOST_LOADS, Load, Packed, announce, load_size, pack
from kvbaton.transport.fabric.pump import Driven, Pump
from kvbaton.transport.table import RegionTable
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.wire import Ack

DIRECT_POSTS = 8
"""Direct posts to one peer that are under way at a time: so many are quickly taken back."""


class Remote(NamedTuple):
    """What a peer is, and what it lets this process write into."""

    instance: str
    connection: int
    """The number that this process gave the connection."""
    fabric: FabricPeer
    regions: Int64s
    """Lengths of its regions."""
    numbers: Int64s
    """The fabric's number of each; -1 for those that it may not, or cannot, write into."""
    packed: Flags
    """Into which of them the peer puts what lies in a slab."""
    slabs: tuple[int, ...]
    """The slabs that it granted, by number."""
    slab_bytes: int
    """Bytes of each of them."""


class Write:
    """One ticket: what is left to post, and what is not over yet."""

    def __init__(self, ticket: int, direct: Iterator[Writes], loads: Iterator[Load]) -> None:
        self.ticket = ticket
        self._direct = direct
        self._loads = loads
        self.posts: Writes | None = None
        self.load: Load | None = None
        self.error = ""
        self.under_way = 0
        """Posts that did not end, and loads that were not acknowledged."""

    def look(self) -> None:
        """Have the next post and the next load at hand, if there are any."""
        if self.posts is None:
            self.posts = next(self._direct, None)
        if self.load is None:
            self.load = next(self._loads, None)

    @property
    def handed_out(self) -> bool:
        """Whether nothing is left to post."""
        return bool(self.error) or (self.posts is None and self.load is None)

    def fail(self, error: str) -> None:
        """Note the first error; nothing more is posted."""
        self.error = self.error or error


class Outgoing:
    """Posts the writes of one peer in the order in which they came, and ends their tickets. For the pump's thread.

    Small loads of several writes share a slab, a post and an acknowledgement; a load that the peer refuses fails the
    ticket that it is of. ``say`` sends over the side channel; ``lost`` is called with the reason when the library gave
    the peer up.
    """

    def __init__(
        self,
        pump: Pump,
        owner: Driven,
        remote: Remote,
        area: Area,
        table: RegionTable,
        tickets: Tickets,
        say: Callable[[bytes], None],
        lost: Callable[[str], None],
    ) -> None:
        self._pump = pump
        self._owner = owner
        self._remote = remote
        self._area = area
        self._table = table
        self._tickets = tickets
        self._say = say
        self._lost = lost
        self._slab_bytes = min(area.options.slab_bytes, remote.slab_bytes)
        self._credits = deque(remote.slabs)
        self._announced: dict[int, list[Write]] = {}
        """By slab: the writes whose loads the peer has not acknowledged."""
        self._queue: deque[Write] = deque()
        self._outstanding: dict[int, Write] = {}
        self._direct_posts = 0
        self._stopped = ""
        """Why nothing more is posted or announced."""

    def take(self, write: Write) -> None:
        """Queue a write, whose ticket is open."""
        if self._stopped:
            self._tickets.end(write.ticket, self._stopped)
            return
        self._outstanding[write.ticket] = write
        self._queue.append(write)

    def post_next(self) -> bool:
        """Post something, if there is anything and room for it; whether something was posted."""
        while self._queue:
            write = self._queue[0]
            write.look()
            if not write.handed_out:
                return self._post(write)
            self._queue.popleft()
            self._end_if_over(write)
        return False

    def acknowledged(self, ack: Ack) -> None:
        """Take what the peer told: a ticket that it refuses, or a slab that it is done with.

        Raises ``ValueError`` for what it was not told of.
        """
        if ack.error:
            write = self._outstanding.get(ack.number)
            if write is None or not any(write in writes for writes in self._announced.values()):
                raise ValueError(f"an acknowledgement of ticket {ack.number}, which was not announced")
            write.fail(f"peer {self._remote.instance} refused the write: {ack.error}")
            return
        writes = self._announced.pop(ack.number, None)
        if writes is None:
            raise ValueError(f"an acknowledgement of slab {ack.number}, which was not announced")
        self._credits.append(ack.number)
        for write in writes:
            self._over(write)

    def stop(self, reason: str) -> None:
        """Post nothing more; what was handed out goes on."""
        self._stopped = self._stopped or reason
        self._fail(list(self._queue))

    def fail_all(self) -> None:
        """After `stop`: fail what was handed out, too. Tickets end when library and peer are done with them."""
        self._fail(list(self._outstanding.values()))

    def end_all(self) -> None:
        """After `stop`: end all tickets that are left, whatever is under way."""
        left, self._outstanding = sorted(self._outstanding), {}
        for ticket in left:
            self._tickets.end(ticket, self._stopped)

    @property
    def idle(self) -> bool:
        """Whether all tickets have ended."""
        return not self._outstanding

    def _fail(self, writes: list[Write]) -> None:
        self._queue.clear()
        for write in writes:
            write.fail(self._stopped)
            self._end_if_over(write)

    def _post(self, write: Write) -> bool:
        """Post something of what is queued, beginning with ``write``; False if there is no room for it now."""
        if not self._pump.takes(self._owner):
            return False
        if write.posts is not None and self._direct_posts < DIRECT_POSTS:
            self._post_direct(write, write.posts)
            return True
        if write.load is None or not self._credits:
            return False
        staging = self._pump.staging.take(self._owner)
        if staging is None:
            return False
        self._post_slab(staging)
        return True

    def _post_direct(self, write: Write, posts: Writes) -> None:
        write.posts = None
        write.under_way += 1
        self._direct_posts += 1

        def ended(error: str) -> None:
            self._direct_posts -= 1
            self._over(write, error)
            self._look_after_peer(error)

        self._start(posts, ended)

    def _post_slab(self, staging: int) -> None:
        """Fill a slab with the loads at hand and write it to the peer."""
        slab = self._credits.popleft()
        begin = self._area.staging(staging)
        packed = self._area.packed(begin, self._slab_bytes)
        loaded: list[tuple[Write, Load, int]] = []
        end = 0
        for write, load in self._next_loads():
            try:
                nbytes = pack(load, self._table, packed.part(end, self._slab_bytes - end))
            except Exception as error:
                self._over(write, f"packing failed: {type(error).__name__}: {error}")
                continue
            loaded.append((write, load, end))
            end += nbytes

        def ended(error: str) -> None:
            self._pump.staging.give(self._owner, staging)
            self._written(slab, loaded, error)
            self._look_after_peer(error)

        if loaded:
            self._start(one_write(begin, slab * self._remote.slab_bytes, end), ended)
        else:
            ended("")

    def _next_loads(self) -> list[tuple[Write, Load]]:
        """The loads for one slab: one of each write that waits, in their order, as long as they are small.

        A load that is larger has a slab of its own, so that packing, the wire and unpacking overlap.
        """
        loads: list[tuple[Write, Load]] = []
        left: list[Write] = []
        room = 0
        while self._queue and len(loads) < MOST_LOADS:
            write = self._queue[0]
            write.look()
            if not write.handed_out:
                if write.load is None:
                    break
                nbytes = load_size(write.load)
                if not loads:
                    room = max(nbytes, min(LEAST_LOAD, self._slab_bytes))
                if nbytes > room:
                    break
                room -= nbytes
                loads.append((write, write.load))
                write.load = None
                write.under_way += 1
                left.append(write)
            self._queue.popleft()
            self._end_if_over(write)
        self._queue.extendleft(reversed(left))
        return loads

    def _written(self, slab: int, loaded: list[tuple[Write, Load, int]], error: str) -> None:
        """The library is done with a slab: tell the peer what lies in it, of those that did not fail meanwhile."""
        told = []
        for write, load, at in loaded:
            failed = error or write.error or self._stopped
            if failed:
                self._over(write, failed)
            else:
                told.append((write, Packed(write.ticket, load, at)))
        if not told:
            self._credits.append(slab)
            return
        self._announced[slab] = [write for write, _ in told]
        self._say(announce([packed for _, packed in told], slab))

    def _start(self, writes: Writes, ended: Callable[[str], None]) -> None:
        try:
            self._pump.post(self._owner, self._remote.fabric, writes, ended)
        except TransportError as error:
            ended(f"the write to peer {self._remote.instance} was refused: {error}")

    def _over(self, write: Write, error: str = "") -> None:
        """One thing that was under way is over."""
        write.under_way -= 1
        if error:
            write.fail(error)
        self._end_if_over(write)

    def _end_if_over(self, write: Write) -> None:
        if write.under_way:
            return
        write.look()
        if write.handed_out and self._outstanding.pop(write.ticket, None) is not None:
            self._tickets.end(write.ticket, write.error)

    def _look_after_peer(self, error: str) -> None:
        if error and not self._remote.fabric.alive:
            self._lost(f"the connection to peer {self._remote.instance} broke: {error}")
