"""The writing end of one peer: its tickets, the slabs that it granted, and the side channel. Driven by the pump."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvbaton.errors import TransportError
from kvbaton.plan.boxes import Int64s
from kvbaton.transport.base import RemotePeer
from kvbaton.transport.fabric import side
from kvbaton.transport.fabric.area import Area, Flags, one_write
from kvbaton.transport.fabric.base import FabricPeer, Writes
from kvbaton.transport.fabric.loads import Load, announce, pack
from kvbaton.transport.fabric.pump import Pump, keep_alive
from kvbaton.transport.table import RegionTable
from kvbaton.transport.tickets import Tickets

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 1.0
"""How long a disconnect waits for what is under way, and then for the peer to close its end."""
LET_GO_SECONDS = 5.0
"""How long the library may need to get done with a peer that is let go of."""
RETRY_SECONDS = 5e-3
"""How long until it is asked again, and a side channel that takes no more."""
STOP_SECONDS = 60.0
"""How long `Link.stop` waits for the pump, which a library may hold up."""
DIRECT_POSTS = 8
"""Direct posts to one peer that are under way at a time: so many are quickly taken back."""
RECEIVE_BYTES = 1 << 16

OPEN, DRAINING, LETTING_GO, LEAVING, OVER = range(5)
"""A link drains what is under way, has the library let go of the peer, says goodbye, and is over."""


class Remote(NamedTuple):
    """What a peer is, and what it lets this process write into."""

    instance: str
    connection: int
    """The number that this process gave the connection."""
    fabric: FabricPeer
    regions: Int64s
    """Lengths of its regions."""
    numbers: Int64s
    """The fabric's number of each."""
    host: Flags
    """Which of them are host memory."""
    exposed: bool
    """Whether the fabric may write into them."""
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


class Link(RemotePeer):
    """A connected peer of a fabric transport. All but `submit`, `stop` and `alive` belong to the pump's thread."""

    def __init__(
        self,
        pump: Pump,
        sock: socket.socket,
        remote: Remote,
        area: Area,
        table: RegionTable,
        tickets: Tickets,
        over: deque[int],
    ) -> None:
        self.instance = remote.instance
        self.remote = remote
        self._pump = pump
        self._sock = sock
        self._peer = remote.fabric
        self._area = area
        self._table = table
        self._tickets = tickets
        self._over = over
        """Where connections are noted for which the library does nothing any more."""
        self._credits = deque(remote.slabs)
        self._announced: dict[int, Write] = {}
        """By slab: what the peer has not acknowledged."""
        self._queue: deque[Write] = deque()
        self._outstanding: dict[int, Write] = {}
        self._direct_posts = 0
        self._out = bytearray()
        self._in = bytearray()
        self._state = OPEN
        self._deadline: float | None = None
        self._reason = ""
        self._hung_up = False
        """Whether the peer sends nothing more."""
        self._ended = threading.Event()
        sock.setblocking(False)
        pump.call(self._begin)

    @property
    def alive(self) -> bool:
        """Whether writes can still be submitted."""
        return not self._reason

    def submit(self, ticket: int, direct: Iterator[Writes], loads: Iterator[Load]) -> None:
        """Queue a write. Raises `TransportError` if the peer is gone."""
        write = Write(ticket, direct, loads)
        if self._reason:
            raise TransportError(f"{self._reason}; connect again")
        self._tickets.open(ticket)
        if not self._pump.call(lambda: self._take(write)):
            self._tickets.end(ticket, "the transport was closed before the write was over")

    def stop(self, reason: str) -> None:
        """Let go of the peer; returns when nothing here reads or writes memory for it any more."""
        if self._pump.call(lambda: self._drain(reason)) and not self._ended.wait(STOP_SECONDS):
            keep_alive((self._table, self._area))
            logger.error("peer %s: the library does not come back; the memory that it reads is kept", self.instance)

    def ask_to_stop(self, reason: str) -> None:
        """Begin what `stop` waits for."""
        self._pump.call(lambda: self._drain(reason))

    # From here on: the pump's thread.

    def advance(self) -> bool:
        """As `Driven.advance`."""
        while self._queue and self._state == OPEN:
            write = self._queue[0]
            write.look()
            if write.handed_out:
                self._queue.popleft()
                self._end_if_over(write)
                continue
            return self._post_next(write)
        return False

    def tick(self, now: float) -> float | None:
        """As `Driven.tick`."""
        if self._state == DRAINING and (not self._outstanding or self._due(now)):
            self._let_go()
        elif self._state == LETTING_GO:
            self._try_to_leave(given_up=self._due(now))
        elif self._state == LEAVING and (self._hung_up or self._due(now)):
            self._say_goodbye(given_up=self._due(now))
        elif self._state == OPEN and not self._peer.alive:
            self.broke(f"the connection to peer {self.instance} broke")
        if self._state == LETTING_GO or (self._state == LEAVING and self._hung_up):
            return now + RETRY_SECONDS
        return self._deadline

    def readable(self) -> None:
        """As `Driven.readable`."""
        try:
            received = self._sock.recv(RECEIVE_BYTES)
            self._in += received
            for ack in side.take_acks(self._in):
                self._acknowledged(ack)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._lost(f"the connection to peer {self.instance} broke: {error}")
            return
        if not received:
            self._lost(f"peer {self.instance} closed the connection")

    def writable(self) -> None:
        """As `Driven.writable`."""
        try:
            while self._out:
                sent = self._sock.send(memoryview(self._out)[:RECEIVE_BYTES])
                del self._out[:sent]
        except BlockingIOError:
            if not self._hung_up:
                self._pump.listen(self._sock, self, writing=True)
            return
        except OSError as error:
            self._lost(f"the connection to peer {self.instance} broke: {error}")
            return
        if self._state == LEAVING:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            if self._hung_up:
                self._finish()
                return
        if not self._hung_up:
            self._pump.listen(self._sock, self)

    def broke(self, reason: str) -> None:
        """As `Driven.broke`: the fabric gave up, but the side channel may live."""
        if self._state in (OPEN, DRAINING):
            self._reason = self._reason or reason
            self._let_go()
        elif self._state == LETTING_GO:
            self._try_to_leave(given_up=True)

    def _begin(self) -> None:
        self._pump.links[self] = None
        self._pump.listen(self._sock, self)

    def _take(self, write: Write) -> None:
        if self._state != OPEN:
            self._tickets.end(write.ticket, self._reason)
            return
        self._outstanding[write.ticket] = write
        self._queue.append(write)

    def _post_next(self, write: Write) -> bool:
        """Post something of a write that has something left; False if there is no room for it now."""
        if not self._pump.takes(self):
            return False
        if write.posts is not None and self._direct_posts < DIRECT_POSTS:
            self._post_direct(write, write.posts)
            return True
        if write.load is None or not self._credits:
            return False
        staging = self._pump.staging.take(self)
        if staging is None:
            return False
        self._post_load(write, write.load, staging)
        return True

    def _post_direct(self, write: Write, posts: Writes) -> None:
        write.posts = None
        write.under_way += 1
        self._direct_posts += 1

        def ended(error: str) -> None:
            self._direct_posts -= 1
            self._post_ended(write, error)

        self._post(posts, ended)

    def _post_load(self, write: Write, load: Load, staging: int) -> None:
        write.load = None
        write.under_way += 1
        slab = self._credits.popleft()

        def ended(error: str) -> None:
            self._pump.staging.give(self, staging)
            if error or write.error or self._state != OPEN:
                self._credits.append(slab)
                self._post_ended(write, error or write.error or self._reason)
                return
            self._announced[slab] = write
            self._say(announce(load, write.ticket, slab))

        begin = self._area.staging(staging)
        view = self._area.view[begin : begin + self._area.options.slab_bytes]
        try:
            nbytes = pack(load, self._table.bases, view)
        except Exception as error:
            ended(f"packing failed: {type(error).__name__}: {error}")
            return
        self._post(one_write(begin, slab * self.remote.slab_bytes, nbytes), ended)

    def _post(self, writes: Writes, ended: Callable[[str], None]) -> None:
        try:
            self._pump.post(self, self._peer, writes, ended)
        except TransportError as error:
            ended(f"the write to peer {self.instance} was refused: {error}")

    def _post_ended(self, write: Write, error: str) -> None:
        write.under_way -= 1
        if error:
            write.fail(error)
        self._end_if_over(write)
        if error and not self._peer.alive and self._state in (OPEN, DRAINING):
            self.broke(f"the connection to peer {self.instance} broke: {error}")

    def _acknowledged(self, ack: side.Ack) -> None:
        write = self._announced.pop(ack.slab, None)
        if write is None or write.ticket != ack.ticket:
            raise ValueError(f"an acknowledgement of slab {ack.slab} and ticket {ack.ticket}, which was not announced")
        self._credits.append(ack.slab)
        write.under_way -= 1
        if ack.error:
            write.fail(f"peer {self.instance} refused the write: {ack.error}")
        self._end_if_over(write)

    def _say(self, message: bytes) -> None:
        self._out += message
        self.writable()

    def _end_if_over(self, write: Write) -> None:
        if write.under_way:
            return
        write.look()
        if write.handed_out and self._outstanding.pop(write.ticket, None) is not None:
            self._tickets.end(write.ticket, write.error)

    def _drain(self, reason: str) -> None:
        """The caller wants no more of this peer: what is under way may end, within a second."""
        if self._state == OPEN:
            self._reason = self._reason or reason
            self._state, self._deadline = DRAINING, time.monotonic() + DRAIN_SECONDS
            for write in list(self._queue):
                write.fail(self._reason)
                self._end_if_over(write)
            self._queue.clear()

    def _lost(self, reason: str) -> None:
        """The side channel ended, or the peer's half of it."""
        self._reason = self._reason or reason
        self._hung_up = True
        self._pump.forget(self._sock)
        if self._state in (OPEN, DRAINING):
            self._let_go()
        elif self._state == LEAVING:
            self._finish()

    def _let_go(self) -> None:
        """Take the library off the peer."""
        self._state, self._deadline = LETTING_GO, time.monotonic() + LET_GO_SECONDS
        for write in list(self._outstanding.values()):
            write.fail(self._reason)
            self._end_if_over(write)
        self._queue.clear()
        self._try_to_leave(given_up=False)

    def _try_to_leave(self, *, given_up: bool) -> None:
        """Go on if the library is done with the peer, or was waited for long enough."""
        over = False
        try:
            over = self._pump.let_go(self, self._peer)
        except Exception:
            logger.exception("disconnecting peer %s failed", self.instance)
            given_up = True
        if self._state != LETTING_GO or not (over or given_up):
            return
        self._state, self._deadline = LEAVING, time.monotonic() + DRAIN_SECONDS
        if over:
            self._out += side.FAREWELL
            self._over.append(self.remote.connection)
        else:
            self._pump.give_up(self, self._peer, (self._table, self._area))
        for write in list(self._outstanding.values()):
            self._end_if_over(write)
        self._say_goodbye(given_up=False)

    def _say_goodbye(self, *, given_up: bool) -> None:
        """Send what is left to say; the peer's end of the connection, or ``given_up``, is the end."""
        self.writable()
        if given_up:
            self._finish()

    def _finish(self) -> None:
        """The last of it."""
        if self._state == OVER:
            return
        self._state, self._deadline = OVER, None
        self._pump.forget(self._sock)
        self._pump.links.pop(self, None)
        self._sock.close()
        left, self._outstanding = sorted(self._outstanding), {}
        for ticket in left:
            self._tickets.end(ticket, self._reason)
        self._ended.set()

    def _due(self, now: float) -> bool:
        return self._deadline is not None and now >= self._deadline
