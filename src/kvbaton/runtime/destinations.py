"""The decode ranks that a prefill rank writes to, from their Hello to the end of their connection."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from kvbaton.errors import HandshakeError, KVBatonError
from kvbaton.plan import PairPlan
from kvbaton.protocol import Action, Hello, PrefillCore, Refused, Welcome
from kvbaton.protocol.handshake import Accepted, answer_hello, refuse
from kvbaton.protocol.messages import short_reason
from kvbaton.runtime.context import Context
from kvbaton.runtime.reach import PeerRank, reach
from kvbaton.transport.base import RemotePeer, Transport

logger = logging.getLogger(__name__)

AT_ONCE = 48
"""Handshakes that are answered at a time. Most of them wait for a peer that does not answer, or need no time."""
CHECKS_AT_ONCE = 2
"""Handshakes that are checked at a time: that is work for a core, and large layouts are some."""
MOST_WAITING = 1024
MOST_WAITING_BYTES = 256 << 20
"""Handshakes that may wait for their turn, and the bytes of their layouts."""


class Connection(NamedTuple):
    """A connection as the decode rank named it."""

    instance: str
    number: int


@dataclass(frozen=True)
class Destination:
    """A decode rank that this rank writes to."""

    plan: PairPlan
    transport: Transport
    remote: RemotePeer
    rank: PeerRank
    index: int
    """Which decode rank of its replica it is."""
    connection: Connection


class Destinations:
    """Answers handshakes, and tells ``core`` who joined and who left; ``perform`` carries out what it says to that.

    Whoever can reach the control port may begin a handshake, and name hosts that do not answer. So each connection gets
    one handshake, so many are answered at a time, as many may wait for that, and the rest are refused.
    """

    def __init__(self, context: Context, core: PrefillCore, perform: Callable[[list[Action]], None]) -> None:
        self._context = context
        self._core = core
        self._perform = perform
        self._joined: dict[str, Destination] = {}
        self._handshakes: dict[str, Hello] = {}
        """What waits, or is being answered in the background; not for peers that left meanwhile."""
        self._waiting: deque[str] = deque()
        self._waiting_bytes = 0
        self._answering: set[str] = set()
        self._checks = threading.BoundedSemaphore(CHECKS_AT_ONCE)
        self._leaving: set[Connection] = set()
        """Connections whose data transport is being let go of."""
        self._kept: set[Connection] = set()
        """Those for which that failed."""
        self._refused: dict[str, int | None] = {}
        """The index of each decode rank that was refused, as it said itself; None of those that said no Hello."""

    def get(self, peer: str) -> Destination | None:
        """The decode rank that joined as ``peer``."""
        return self._joined.get(peer)

    def peers(self) -> tuple[PeerRank, ...]:
        """The decode ranks that are joined. On any thread."""
        return tuple(destination.rank for destination in list(self._joined.values()))

    def outside(self, peer: str) -> int | None:
        """The index of a decode rank that said Hello and has not joined: it was refused, or will soon know."""
        hello = self._handshakes.get(peer)
        return self._refused.get(peer) if hello is None else hello.destination_index

    def on_hello(self, peer: str, hello: Hello) -> None:
        """Check it and connect, in the background; then answer Welcome or Refused."""
        if peer in self._joined or peer in self._handshakes or peer in self._refused:
            self._core.unexpected["second Hello"] += 1
            return
        self._handshakes[peer] = hello
        nbytes = _nbytes(hello)
        if len(self._waiting) >= MOST_WAITING or self._waiting_bytes + nbytes > MOST_WAITING_BYTES:
            busy = f"{len(self._waiting)} other handshakes wait for their turn ({self._waiting_bytes} bytes); try again"
            self._refuse(peer, hello, HandshakeError(busy))
            return
        lost = {Connection(hello.instance, number) for number in hello.lost}
        for earlier, destination in list(self._joined.items()):
            if destination.connection in lost:
                self.on_disconnected(earlier, "the decode rank lost its control connection")
        self._waiting.append(peer)
        self._waiting_bytes += nbytes
        self._answer_next()

    def on_malformed(self, peer: str, error: KVBatonError) -> None:
        """Perhaps it was a Hello of another release: better refused now than waited for. Once."""
        if peer not in self._joined and peer not in self._handshakes and peer not in self._refused:
            self._refused[peer] = None
            self._context.send(peer, refuse(self._context.instance, error))

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A decode rank, or a stranger, is gone."""
        self._handshakes_over(peer)
        self._refused.pop(peer, None)
        destination = self._joined.pop(peer, None)
        self._perform(self._core.peer_lost(peer, reason, self._context.now()))
        self._context.observation.peer_lost(peer, reason)
        if destination is not None:
            self._disconnect(destination)

    def give_up_if_dead(self, peer: str, error: str) -> None:
        """Part from a decode rank whose control connection lives while its data connection does not.

        To be called before anything else is said of its rooms: it shall begin its next one with a new handshake.
        """
        destination = self._joined.get(peer)
        if destination is None or destination.remote.alive:
            return
        reason = short_reason(f"the data connection ended: {error}")
        self._context.send(peer, Refused(self._context.instance, reason))
        self.on_disconnected(peer, error)

    def _answer_next(self) -> None:
        """Begin with those that wait, as far as there is room, and no connection that they ask about is still there."""
        held_back: list[str] = []
        while self._waiting and len(self._answering) < AT_ONCE:
            peer = self._waiting.popleft()
            hello = self._handshakes[peer]
            lost = {Connection(hello.instance, number) for number in hello.lost}
            if lost & self._leaving:
                held_back.append(peer)
                continue
            self._waiting_bytes -= _nbytes(hello)
            self._answering.add(peer)
            over = tuple(connection.number for connection in lost - self._kept)
            self._context.in_background(
                partial(self._answer, hello, over),
                partial(self._answered, peer, hello),
                partial(self._not_answered, peer, hello),
            )
        self._waiting.extendleft(reversed(held_back))

    def _answered(self, peer: str, hello: Hello, result: tuple[Accepted, Destination, Welcome]) -> None:
        self._answering.discard(peer)
        self._join(peer, hello, *result)
        self._answer_next()

    def _not_answered(self, peer: str, hello: Hello, error: Exception) -> None:
        self._answering.discard(peer)
        self._refuse(peer, hello, error)
        self._answer_next()

    def _handshakes_over(self, peer: str) -> None:
        hello = self._handshakes.pop(peer, None)
        if hello is not None and peer not in self._answering:
            self._waiting.remove(peer)
            self._waiting_bytes -= _nbytes(hello)

    def _answer(self, hello: Hello, over: tuple[int, ...]) -> tuple[Accepted, Destination, Welcome]:
        """The part of a handshake that may block: not on the control thread."""
        context = self._context
        with self._checks:
            accepted = answer_hello(
                hello,
                instance=context.instance,
                model=context.model,
                layout=context.layout,
                transports=tuple(context.transports),
            )
        # Only now is a host dialled that the peer names.
        transport, remote, aux, reason = reach(context, hello, accepted)
        try:
            welcome = accepted.welcome(context.instance, transport.name, transport.describe(), aux=aux, reason=reason)
        except BaseException:
            transport.disconnect(remote)
            raise
        rank = PeerRank(hello.instance, accepted.layout.coords, transport.name, aux, reason)
        welcome = msgspec.structs.replace(welcome, over=over)
        connection = Connection(hello.instance, hello.connection)
        destination = Destination(accepted.plan, transport, remote, rank, hello.destination_index, connection)
        return accepted, destination, welcome

    def _join(self, peer: str, hello: Hello, accepted: Accepted, destination: Destination, welcome: Welcome) -> None:
        if self._handshakes.get(peer) is not hello:
            self._disconnect(destination)
            return
        self._joined[peer] = destination
        self._refused.pop(peer, None)
        self._context.observation.peer_joined(peer, destination.rank, destination.plan)
        self._perform(self._core.peer_joined(peer, accepted.share_with(destination.rank.aux)))
        self._context.send(peer, welcome)
        self._handshakes.pop(peer, None)

    def _refuse(self, peer: str, hello: Hello, error: Exception) -> None:
        if self._handshakes.get(peer) is not hello:
            return
        del self._handshakes[peer]
        self._refused[peer] = hello.destination_index
        if not isinstance(error, KVBatonError):
            logger.error("prefill: a handshake failed in an unforeseen way", exc_info=error)
        logger.warning("prefill: %s was refused: %s", peer, error)
        self._context.observation.handshake_refused(type(error).__name__, str(error))
        self._context.send(peer, refuse(self._context.instance, error))

    def _disconnect(self, destination: Destination) -> None:
        # It may wait for copies that are under way.
        self._leaving.add(destination.connection)
        self._context.in_background(
            lambda: destination.transport.disconnect(destination.remote),
            lambda result: self._has_left(destination.connection),
            lambda error: self._is_kept(destination.connection, error),
        )

    def _is_kept(self, connection: Connection, error: Exception) -> None:
        logger.debug("prefill: disconnecting from %s: %s", connection.instance, error)
        self._kept.add(connection)
        self._has_left(connection)

    def _has_left(self, connection: Connection) -> None:
        self._leaving.discard(connection)
        self._answer_next()


def _nbytes(hello: Hello) -> int:
    return len(hello.layout) + sum(map(len, hello.sources))
