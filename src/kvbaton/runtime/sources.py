"""The prefill ranks that a decode rank receives from: looks them up, greets them, and sees to it when they are gone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvbaton.errors import (
    AuthenticationError,
    DeadlineExceeded,
    HandshakeError,
    KVBatonError,
    PeerLost,
    TransferAborted,
    TransportError,
)
from kvbaton.protocol import Action, DecodeCore, Refused, Welcome
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.handshake import check_welcome, make_hello, refusal
from kvbaton.registry import RegistryClient
from kvbaton.runtime.context import Context
from kvbaton.runtime.fencing import Greeting, LostPeers
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.returning import Returning
from kvbaton.runtime.revisits import Revisits
from kvbaton.runtime.source import Link, LookedUp, Source, SourceKey, Wishes, look_up

logger = logging.getLogger(__name__)

LAST_WORDS_MILLISECONDS = 500
"""How long a connection that is closed may take to send what is queued."""


class SourceUser(Protocol):
    """What `Sources` tells of."""

    def source_ready(self, source: Source) -> None:
        """Every prefill rank has answered: the source's rooms can begin."""

    def source_failed(self, source: Source) -> None:
        """It will never be ready, and its rooms cannot begin; `Source.failure` says why."""

    def perform(self, actions: list[Action]) -> None:
        """Carry out what the core says to peers that join or leave."""


class Sources:
    """Rooms share a source as long as it lives: `use` it, `leave` it when the rows are released.

    A source of which one rank is lost is retired: it serves no new room, and the next one looks the ranks up again.
    Its other connections are closed with the last room.
    """

    def __init__(
        self,
        context: Context,
        core: DecodeCore,
        user: SourceUser,
        *,
        deployment: str,
        destination_index: int,
        destinations: int,
    ) -> None:
        self._context = context
        self._core = core
        self._user = user
        self._deployment = deployment
        settings = context.settings
        self._wishes = Wishes(
            context.layout, destination_index, destinations, settings.striped, settings.cast, settings.aux
        )
        self._current: dict[SourceKey, Source] = {}
        self._retired: set[Source] = set()
        self._source_of_peer: dict[str, Source] = {}
        self._aux_logged = False
        self._lost = LostPeers(context.settings.fence_retry_seconds)
        self._connections = itertools.count(1)
        self._returning: Returning[Source] = Returning()
        self._revisits = Revisits(context, self._lost, self._connections, self._let_go)

    def use(self, number: int, key: SourceKey, client: RegistryClient) -> Source:
        """The source of a room. It is ready, or its user will be told, or it has failed at once."""
        source = self.current(key, client)
        if source.failure is None:
            source.rooms.add(number)
        return source

    def current(self, key: SourceKey, client: RegistryClient) -> Source:
        """The source of this key, without using it: new if there is none, and then perhaps failed at once."""
        return self._current.get(key) or self._find(key, client)

    def peers(self) -> tuple[PeerRank, ...]:
        """The prefill ranks that are joined. On any thread."""
        sources = dict.fromkeys(list(self._source_of_peer.values()))
        return tuple(rank for source in sources for link in list(source.links.values()) if (rank := link.rank))

    @property
    def unfenced(self) -> int:
        """How many lost ranks may still write, as far as is proven."""
        return len(self._lost)

    def only_replica(self, registry: str) -> SourceKey | None:
        """The key of the source that serves every room of a registry, if that is known."""
        key = SourceKey(registry, 0)
        source = self._current.get(key)
        return key if source is not None and source.alone else None

    def forget_withdrawn(self, number: int) -> None:
        """The number is opened anew: nobody is told any more that an earlier room of it failed."""
        for source in (*self._current.values(), *self._retired):
            source.withdrawn = [each for each in source.withdrawn if each.room != number]

    def leave(self, number: int, source: Source) -> None:
        """A room needs its source no more."""
        source.rooms.discard(number)
        self._hang_up_if_idle(source)

    def on_answer(self, peer: str, message: Welcome | Refused) -> None:
        """A prefill rank answered our Hello, or gives the connection up."""
        if self._revisits.on_answer(peer, message):
            return
        source = self._source_of_peer.get(peer)
        link = source.links[peer] if source is not None else None
        if link is not None and link.joined and isinstance(message, Refused):
            # Rooms in flight fail, and the next one begins with a new handshake.
            self.cut_off(peer, message.reason)
            return
        if source is None or link is None or link.joined:
            self._core.unexpected["second answer to Hello"] += 1
            return
        if source.failure is not None:
            return
        try:
            if isinstance(message, Refused):
                raise refusal(link.hello, message)
            if source.mismatch is not None:
                raise source.mismatch
            if not self._join(source, link, message):
                return
        except KVBatonError as error:
            self._fail(source, error)
            return
        if all(each.joined for each in source.links.values()):
            source.ready = True
            self._user.source_ready(source)

    def on_malformed(self, peer: str, error: KVBatonError) -> None:
        """A frame came that could not be decoded: perhaps the answer to our Hello."""
        self._revisits.on_ended(peer)
        source = self._source_of_peer.get(peer)
        if source is not None:
            self._fail(source, error)

    def cut_off(self, peer: str, reason: str) -> None:
        """Close the connection of a prefill rank, as if it were gone."""
        self._context.hang_up(peer)
        self.on_disconnected(peer, reason)

    def on_refused(self, peer: str, reason: str) -> None:
        """A prefill rank does not share our secret."""
        source = self._source_of_peer.get(peer)
        if source is not None:
            registered = source.links[peer].part.registration
            where = f"prefill rank {registered.coords} at {registered.endpoint}"
            self._fail(source, AuthenticationError(f"{where} does not share our secret: {reason}"))
            self.on_disconnected(peer, reason)

    def on_disconnected(self, peer: str, reason: str) -> None:
        """A prefill rank is gone."""
        self._revisits.on_ended(peer)
        source = self._source_of_peer.pop(peer, None)
        if source is None:
            return
        link = source.links.pop(peer)
        registered = link.part.registration
        self._retire(source)
        if source.ready:
            logger.warning("decode: prefill rank %s was lost: %s", registered.coords, reason)
        if link.transport is not None:
            now = self._context.now()
            self._user.perform(self._core.peer_lost(peer, reason, now))
            self._context.observation.peer_lost(peer, reason)
            # Also where it has nothing of ours to write to: what transports keep of it goes with the fence.
            self._lost.add(peer, registered.instance, link.transport, Greeting(link.part.endpoint, link.hello))
            self._fence(now)
        where = f"prefill rank {registered.coords} at {registered.endpoint}"
        self._fail(source, PeerLost(f"{where} was lost during the handshake: {reason}"))

    def on_turn(self, now: float) -> float | None:
        """Fence who is lost, give up who does not answer; returns when the next turn is due at the latest."""
        self._fence(now)
        for source in self._returning.due(now):
            self._look_up(source)
        handshaking = [source for source in self._current.values() if not source.ready]
        for source in handshaking:
            if now >= source.give_up:
                silent = [link for link in source.links.values() if not link.joined]
                names = ", ".join(str(link.part.registration.coords) for link in silent) or "the registry"
                seconds = self._context.settings.handshake_seconds
                self._fail(source, DeadlineExceeded(f"no answer within {seconds:g} s from {names}"))
        asked = self._revisits.on_turn(now)
        waiting = [source.give_up for source in handshaking if source.failure is None]
        deadlines = [self._lost.next_try(), self._returning.next_try(), asked, *waiting]
        return min((when for when in deadlines if when is not None), default=None)

    # From look-up to readiness.

    def _find(self, key: SourceKey, client: RegistryClient) -> Source:
        context = self._context
        source = Source(key, client, context.now() + context.settings.handshake_seconds)
        self._current[key] = source
        self._look_up(source)
        return source

    def _look_up(self, source: Source) -> None:
        self._context.in_background(
            lambda: look_up(
                source.client,
                self._deployment,
                source.key.dp_rank,
                self._wishes,
                self._context.settings.connect_seconds,
            ),
            lambda found: self._greet(source, found),
            lambda error: self._not_looked_up(source, error),
        )

    def _not_looked_up(self, source: Source, error: Exception) -> None:
        if source.failure is not None:
            return
        if self._returning.failed(source, error, self._context.now(), source.give_up):
            logger.info("decode: prefill source %s is looked up again: %s", source.key.registry, error)
        else:
            self._fail(source, error)

    def _greet(self, source: Source, found: LookedUp) -> None:
        self._returning.forget(source)
        if source.failure is not None:
            return
        context, parts, wishes = self._context, found.parts, self._wishes
        source.mismatch = found.mismatch
        grid = tuple(part.registration.layout for part in parts)
        descriptors = self._describe()
        for index, part in enumerate(parts):
            if not self._lost.waits_for(part.registration.instance):
                # It may have been cut off before, and live: it greets us anew, and what it had stays cut off.
                for transport in context.transports.values():
                    transport.readmit(part.registration.instance)
            peer = context.control.dial(part.endpoint)
            hello = make_hello(
                instance=context.instance,
                model=context.model,
                **wishes._asdict(),
                sources=grid,
                source_index=index,
                transports=descriptors,
                connection=next(self._connections),
                lost=self._lost.connections(part.registration.instance),
            )
            self._say_hello(source, Link(peer, index, part, hello))

    def _describe(self) -> dict[str, bytes]:
        """Our descriptor of each transport that has one. Raises `TransportError` with all reasons if none has."""
        descriptors, failed = {}, []
        for name, transport in self._context.transports.items():
            try:
                descriptors[name] = transport.describe()
            except TransportError as error:
                failed.append(f"{name}: {error}")
                logger.warning("decode: transport %s is not offered: %s", name, error)
        if not descriptors:
            raise TransportError("; ".join(failed))
        return descriptors

    def _say_hello(self, source: Source, link: Link) -> None:
        source.links[link.peer] = link
        self._source_of_peer[link.peer] = source
        self._context.send(link.peer, link.hello)

    def _join(self, source: Source, link: Link, welcome: Welcome) -> bool:
        """Take a prefill rank in; False if its choice does not work here, and it was greeted again without that."""
        check_welcome(link.hello, welcome, source.sending)
        registered = link.part.registration
        if welcome.instance != registered.instance:
            raise PeerLost(
                f"prefill rank {registered.coords} at {registered.endpoint} was replaced: the registry names instance "
                f"{registered.instance}, {welcome.instance} answered; the next request looks it up again"
            )
        transport = self._context.transports[welcome.transport]
        try:
            transport.admit(welcome.descriptor)
        except TransportError as error:
            self._greet_without(source, link, welcome.transport, error)
            return False
        self._let_go(registered.instance, welcome.over)
        self._lost.forgive(registered.instance, self._core.may_write)
        name = link.part.name(link.index, len(link.hello.sources))
        self._user.perform(self._core.peer_joined(link.peer, link.index, welcome.parts, name))
        link.transport, link.aux, link.reason = transport, welcome.aux, welcome.reason
        if link.rank is not None:
            self._context.observation.peer_joined(link.peer, link.rank, link.part.plan)
        logger.info("decode: prefill rank %s writes by %s", registered.coords, welcome.reason or welcome.transport)
        if welcome.aux != link.hello.aux and not self._aux_logged:
            self._aux_logged = True
            logger.warning(
                "decode: aux data come over the control channel although %s was asked for: %s",
                link.hello.aux,
                welcome.reason,
            )
        return True

    def _greet_without(self, source: Source, link: Link, name: str, error: TransportError) -> None:
        """Begin anew with a prefill rank, on a new connection, without a transport that does not work here.

        Raises `TransportError` if that was the last one.
        """
        failed = {**link.failed, name: str(error)}
        left = {other: described for other, described in link.hello.transports.items() if other != name}
        if not left:
            raise TransportError("; ".join(f"{each}: {why}" for each, why in failed.items()))
        registered = link.part.registration
        logger.warning("decode: prefill rank %s cannot write by %s: %s", registered.coords, name, error)
        self._context.hang_up(link.peer)
        del source.links[link.peer], self._source_of_peer[link.peer]
        peer = self._context.control.dial(link.part.endpoint)
        hello = msgspec.structs.replace(link.hello, transports=left, connection=next(self._connections))
        self._say_hello(source, Link(peer, link.index, link.part, hello, failed=failed))

    # From failure or loss to the last connection's end.

    def _fail(self, source: Source, error: Exception) -> None:
        """End a source that was not ready; nothing happens to another."""
        if source.failure is not None or source.ready:
            return
        self._returning.forget(source)
        if not isinstance(error, KVBatonError):
            logger.error("decode: a source failed in an unforeseen way", exc_info=error)
        source.failure = source.mismatch or (error if isinstance(error, KVBatonError) else KVBatonError(str(error)))
        logger.warning("decode: prefill source %s: %s", source.key.registry, source.failure)
        if isinstance(source.failure, HandshakeError):
            self._context.observation.handshake_refused(type(source.failure).__name__, str(source.failure))
        self._tell_rooms(source)
        self._retire(source)
        self._user.source_failed(source)

    def _tell_rooms(self, source: Source) -> None:
        """Tell its ranks of the rooms that will never be offered: they would wait for them."""
        reason, kind = source.words()
        withdrawn = [(each.room, Failure(TransferAborted, each.reason)) for each in source.withdrawn]
        rooms = [*((number, Failure(kind, reason)) for number in source.rooms), *withdrawn]
        # No room has used these connections, so all epochs are free; a rank that has joined counts each once.
        for epoch, (number, failure) in enumerate(rooms, start=1):
            for peer in source.links:
                self._context.send(peer, failure.message(number, epoch))
        source.withdrawn.clear()

    def _retire(self, source: Source) -> None:
        """Let no new room use it: the next one looks its ranks up again."""
        if self._current.get(source.key) is source:
            del self._current[source.key]
            self._retired.add(source)
            self._hang_up_if_idle(source)

    def _hang_up_if_idle(self, source: Source) -> None:
        if source.rooms or source not in self._retired:
            return
        self._retired.discard(source)
        for peer, link in list(source.links.items()):
            # What was said last shall arrive.
            self._context.hang_up(peer, LAST_WORDS_MILLISECONDS)
            del self._source_of_peer[peer]
            if link.joined:
                reason = "its source was given up"
                self._user.perform(self._core.peer_lost(peer, reason, self._context.now()))
                self._context.observation.peer_lost(peer, reason)
        source.links.clear()

    def _fence(self, now: float) -> None:
        for fenced in self._lost.fence(now, but_not=self._revisits.instances()):
            self._user.perform(self._core.peer_fenced(fenced.peer, now))
            # What was proven holds for the whole instance: a newer connection of it cannot bring anything either.
            others = [
                link.peer
                for source in dict.fromkeys(self._source_of_peer.values())
                for link in source.links.values()
                if link.transport is fenced.transport and link.part.registration.instance == fenced.instance
            ]
            for peer in others:
                self.cut_off(peer, "another connection of its instance was cut off")

    def _let_go(self, instance: str, over: Sequence[int]) -> None:
        """A prefill rank that lives says which of its connections are over."""
        for peer in self._lost.let_go(instance, over):
            self._user.perform(self._core.peer_fenced(peer, self._context.now()))
