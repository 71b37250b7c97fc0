"""The decode ranks that a prefill rank writes to, from their Hello to the end of their connection."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvbaton.errors import KVBatonError
from kvbaton.plan import PairPlan
from kvbaton.protocol import Action, Hello, PrefillCore, Refused, Welcome
from kvbaton.protocol.handshake import Accepted, answer_hello, refuse
from kvbaton.protocol.messages import short_reason
from kvbaton.runtime.context import Context
from kvbaton.runtime.reach import PeerRank, reach
from kvbaton.transport.base import RemotePeer, Transport

logger = logging.getLogger(__name__)


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
    connection: Connection


class Destinations:
    """Answers handshakes, and tells ``core`` who joined and who left; ``perform`` carries out what it says to that."""

    def __init__(self, context: Context, core: PrefillCore, perform: Callable[[list[Action]], None]) -> None:
        self._context = context
        self._core = core
        self._perform = perform
        self._joined: dict[str, Destination] = {}
        self._handshakes: dict[str, Hello] = {}
        """What is being answered in the background, or waits; not for peers that left meanwhile."""
        self._leaving: set[Connection] = set()
        """Connections whose data transport is being let go of."""
        self._kept: set[Connection] = set()
        """Those for which that failed."""
        self._waiting: dict[str, Hello] = {}
        """Handshakes that begin when connections that they ask about are let go of."""
        self._refused: set[str] = set()

    def get(self, peer: str) -> Destination | None:
        """The decode rank that joined as ``peer``."""
        return self._joined.get(peer)

    def peers(self) -> tuple[PeerRank, ...]:
        """The decode ranks that are joined. On any thread."""
        return tuple(destination.rank for destination in list(self._joined.values()))

    def is_outside(self, peer: str) -> bool:
        """Whether it said Hello and has not joined: it was refused, or will soon know."""
        return peer in self._refused or peer in self._handshakes

    def on_hello(self, peer: str, hello: Hello) -> None:
        """Check it and connect, in the background; then answer Welcome or Refused."""
        if peer in self._joined or peer in self._handshakes:
            self._core.unexpected["second Hello"] += 1
            return
        self._handshakes[peer] = hello
        lost = {Connection(hello.instance, number) for number in hello.lost}
        for earlier, destination in list(self._joined.items()):
            if destination.connection in lost:
                self.on_disconnected(earlier, "the decode rank lost its control connection")
        self._begin(peer, hello)

    def _begin(self, peer: str, hello: Hello) -> None:
        """Answer a Hello, as soon as the connections that it asks about are let go of."""
        if any(Connection(hello.instance, number) in self._leaving for number in hello.lost):
            self._waiting[peer] = hello
            return
        over = tuple(number for number in hello.lost if Connection(hello.instance, number) not in self._kept)
        self._context.in_background(
            lambda: self._answer(hello, over),
            lambda result: self._join(peer, hello, *result),
            lambda error: self._refuse(peer, hello, error),
        )

    def on_malformed(self, peer: str, error: KVBatonError) -> None:
        """Perhaps it was a Hello of another release: better refused now than waited for."""
        if peer not in self._joined and peer not in self._handshakes:
            self._context.send(peer, refuse(self._context.instance, error))

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A decode rank, or a stranger, is gone."""
        self._handshakes.pop(peer, None)
        self._waiting.pop(peer, None)
        self._refused.discard(peer)
        destination = self._joined.pop(peer, None)
        self._perform(self._core.peer_lost(peer, reason, self._context.now()))
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

    def _answer(self, hello: Hello, over: tuple[int, ...]) -> tuple[Accepted, Destination, Welcome]:
        """The part of a handshake that may block: not on the control thread."""
        context = self._context
        accepted = answer_hello(
            hello,
            instance=context.instance,
            model=context.model,
            layout=context.layout,
            transports=tuple(context.transports),
        )
        transport, remote, aux, reason = reach(context, hello, accepted)
        try:
            welcome = accepted.welcome(context.instance, transport.name, transport.describe(), aux=aux, reason=reason)
        except BaseException:
            transport.disconnect(remote)
            raise
        rank = PeerRank(hello.instance, hello.layout.coords, transport.name, aux, reason)
        welcome = msgspec.structs.replace(welcome, over=over)
        connection = Connection(hello.instance, hello.connection)
        return accepted, Destination(accepted.plan, transport, remote, rank, connection), welcome

    def _join(self, peer: str, hello: Hello, accepted: Accepted, destination: Destination, welcome: Welcome) -> None:
        if self._handshakes.get(peer) is not hello:
            self._disconnect(destination)
            return
        self._joined[peer] = destination
        self._refused.discard(peer)
        self._perform(self._core.peer_joined(peer, accepted.share_with(destination.rank.aux)))
        self._context.send(peer, welcome)
        self._handshakes.pop(peer, None)

    def _refuse(self, peer: str, hello: Hello, error: Exception) -> None:
        if self._handshakes.get(peer) is not hello:
            return
        del self._handshakes[peer]
        self._refused.add(peer)
        if not isinstance(error, KVBatonError):
            logger.error("prefill: a handshake failed in an unforeseen way", exc_info=error)
        logger.warning("prefill: %s was refused: %s", peer, error)
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
        waiting, self._waiting = self._waiting, {}
        for peer, hello in waiting.items():
            if self._handshakes.get(peer) is hello:
                self._begin(peer, hello)
