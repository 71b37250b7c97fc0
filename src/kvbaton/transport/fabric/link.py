"""The writing end of one peer: its tickets, the slabs that it granted, and the side channel. Driven by the pump."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvbaton.errors import TransportError
from kvbaton.transport.base import RemotePeer
from kvbaton.transport.fabric import side
from kvbaton.transport.fabric.area import Area
from kvbaton.transport.fabric.base import Writes
from kvbaton.transport.fabric.loads import Load
from kvbaton.transport.fabric.outgoing import Outgoing, Remote, Write
from kvbaton.transport.fabric.pump import Pump, keep_alive
from kvbaton.transport.table import RegionTable
from kvbaton.transport.tickets import Tickets
from kvbaton.transport.wire import take_acks

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0
"""How long a disconnect takes: all of it, and with all peers of a transport together."""
RETRY_SECONDS = 5e-3
"""How long until it is asked again, and a side channel that takes no more."""
STOP_SECONDS = 10.0
"""How long the pump is waited for, which a library that does not return may hold up."""
RECEIVE_BYTES = 1 << 16

OPEN, DRAINING, LETTING_GO, LEAVING, OVER = range(5)
"""A link drains what is under way, has the library let go of the peer, says goodbye, and is over."""


class Patience(NamedTuple):
    """How long a state lasts at most."""

    seconds: float
    """By itself: a library may need four seconds to find out that its network is down."""
    part: float
    """Where a disconnect waits: up to which part of `LEAVE_SECONDS`."""


PATIENCE = {DRAINING: Patience(1.0, 0.5), LETTING_GO: Patience(5.0, 0.75), LEAVING: Patience(1.0, 1.0)}


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
        self._memory = table, area
        self._tickets = tickets
        self._over = over
        """Where connections are noted for which the library does nothing any more."""
        self._writes = Outgoing(pump, self, remote, area, table, tickets, self._say, self._gone)
        self._out = bytearray()
        self._in = bytearray()
        self._state = OPEN
        self._deadline: float | None = None
        self._asked: float | None = None
        """When a disconnect began to wait."""
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
        if not self._pump.call(lambda: self._writes.take(write)):
            self._tickets.end(ticket, "the transport was closed before the write was over")

    def stop(self, reason: str, seconds: float = STOP_SECONDS) -> None:
        """Let go of the peer; returns when nothing here reads or writes memory for it any more.

        Takes `LEAVE_SECONDS`, and up to ``seconds`` where the library does not return from a call.
        """
        if self._pump.call(lambda: self._drain(reason)) and not self._ended.wait(seconds):
            keep_alive(self._memory)
            logger.error("peer %s: the library does not come back; the memory that it reads is kept", self.instance)

    def ask_to_stop(self, reason: str) -> None:
        """Begin what `stop` waits for."""
        self._pump.call(lambda: self._drain(reason))

    # From here on: the pump's thread.

    def advance(self) -> bool:
        """As `Driven.advance`."""
        return self._state == OPEN and self._writes.post_next()

    def tick(self, now: float) -> float | None:
        """As `Driven.tick`."""
        if self._state == DRAINING and (self._writes.idle or self._due(now)):
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
            for ack in take_acks(self._in):
                self._writes.acknowledged(ack)
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

    def _gone(self, reason: str) -> None:
        """The library gave the peer up: that ends what was begun, and no letting go that is under way."""
        if self._state in (OPEN, DRAINING):
            self.broke(reason)

    def _begin(self) -> None:
        self._pump.links[self] = None
        self._pump.listen(self._sock, self)

    def _say(self, message: bytes) -> None:
        self._out += message
        self.writable()

    def _drain(self, reason: str) -> None:
        """The caller wants no more of this peer, and waits: what is under way may end, within half of its time."""
        if self._asked is None:
            self._asked = time.monotonic()
        if self._state == OPEN:
            self._reason = self._reason or reason
            self._writes.stop(self._reason)
            self._enter(DRAINING)
        else:
            self._hurry()

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
        self._enter(LETTING_GO)
        self._writes.stop(self._reason)
        self._writes.fail_all()
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
        self._enter(LEAVING)
        if over:
            self._out += side.FAREWELL
            self._note_over()
        else:
            self._pump.give_up(self, self._peer, self._memory, self._note_over)
        self._writes.fail_all()
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
        self._writes.end_all()
        self._ended.set()

    def _note_over(self) -> None:
        """The library does nothing more for this connection."""
        self._over.append(self.remote.connection)

    def _enter(self, state: int) -> None:
        """Go on to ``state``, which ends by itself or at its deadline."""
        self._state, self._deadline = state, time.monotonic() + PATIENCE[state].seconds
        self._hurry()

    def _hurry(self) -> None:
        """Have the deadline of this state fit that of a disconnect that waits."""
        if self._asked is not None and self._deadline is not None:
            self._deadline = min(self._deadline, self._asked + PATIENCE[self._state].part * LEAVE_SECONDS)

    def _due(self, now: float) -> bool:
        return self._deadline is not None and now >= self._deadline
