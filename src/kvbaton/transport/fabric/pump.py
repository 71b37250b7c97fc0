"""The one thread of a fabric transport that posts, polls and speaks over the side channels."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvbaton.transport.fabric.base import Fabric, FabricPeer, Writes
from kvbaton.transport.fabric.shares import Shares, Staging

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1e-3
"""How long the library may be waited for before commands and side channels are looked at again."""
ORPHAN_SECONDS = 0.05
"""How often the library is asked for writes that it could not take back, while nothing else is under way."""
FAILED_SECONDS = 10.0
"""The same, for a library that raised when it was asked."""

_KEPT: list[object] = []


def keep_alive(memory: object) -> None:
    """Never free ``memory``: a library may still read it."""
    _KEPT.append(memory)


class Driven(Protocol):
    """What the pump drives: one connected peer."""

    def advance(self) -> bool:
        """Post something, if there is anything and room for it; whether something was posted."""

    def readable(self) -> None:
        """The side channel has something, or ended."""

    def writable(self) -> None:
        """The side channel takes more."""

    def tick(self, now: float) -> float | None:
        """Do what is due; when to come again."""

    def broke(self, reason: str) -> None:
        """Something failed that concerns this peer alone."""


class Posted:
    """A handle under way: who waits for it, and what is called with its error (empty: done) when it ends."""

    def __init__(self, owner: Driven, ended: Callable[[str], None]) -> None:
        self.owner = owner
        self.ended = ended


class Pump:
    """Calls the fabric, from one thread. It sleeps when nothing is under way.

    Methods are for that thread, but for `call`, `start` and `stop`. The thread starts with the first `call`.
    """

    def __init__(self, fabric: Fabric, instance: str, staging: int) -> None:
        self.fabric = fabric
        self.staging = Staging(staging)
        self.links: dict[Driven, None] = {}
        """The one that did not post for the longest time comes first, so what is scarce goes around."""
        self._posts = Shares(fabric.limits.posts)
        self._handles: dict[int, Posted] = {}
        self._orphans: dict[int, Posted] = {}
        """Handles that a library could not take back from a peer that is gone."""
        self._given_up: dict[Driven, tuple[FabricPeer, Callable[[], None]]] = {}
        """Peers that it could not let go of, and what is called when it can."""
        self._ask_again = 0.0
        self._numbers = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wake)
        self._rung = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{fabric.name}-pump-{instance}", daemon=True)

    def call(self, command: Callable[[], None]) -> bool:
        """Have the pump run ``command``; False if it has stopped. From any thread."""
        with self._lock:
            if self._stopping:
                return False
            self._commands.append(command)
            if not self._thread.ident:
                self._thread.start()
            self._ring()
        return True

    def stop(self, seconds: float) -> bool:
        """End the thread; there are no links any more. From any other thread, once or more.

        Whether it has ended: False if the library does not come back within ``seconds``.
        """
        with self._lock:
            self._stopping = True
            self._ring()
        if self._thread.ident:
            self._thread.join(seconds)
        if self._thread.is_alive():
            keep_alive(self)
            logger.error(
                "%s does not come back: its thread, and all that it uses, are left as they are", self.fabric.name
            )
            return False
        self._selector.close()
        self._wake.close()
        self._woken.close()
        return True

    def takes(self, owner: Driven) -> bool:
        """Whether the library takes another handle of this link now."""
        return self._posts.allows(owner)

    def post(self, owner: Driven, peer: FabricPeer, writes: Writes, ended: Callable[[str], None]) -> None:
        """Post; ``ended`` is called once, with the error. Raises `TransportError` if nothing was started."""
        handle = next(self._numbers)
        self.fabric.post(peer, writes, handle)
        self._posts.take(owner)
        self._handles[handle] = Posted(owner, ended)

    def let_go(self, owner: Driven, peer: FabricPeer) -> bool:
        """Take the library off a peer; whether it is, and all handles of ``owner`` are over. Does not wait: ask again.

        Raises what the library raises.
        """
        over = self.fabric.disconnect(peer)
        self.poll()
        return over and not self._handles_of(owner)

    def give_up(self, owner: Driven, peer: FabricPeer, keep: object, over: Callable[[], None]) -> None:
        """Wait no more for what the library could not take back. ``keep``, which it may read, is kept alive for ever.

        The handles still end if the library gets done with them, and ``over`` is called if it lets go of the peer.
        """
        self._given_up[owner] = peer, over
        left = self._handles_of(owner)
        self._orphans.update((handle, self._handles.pop(handle)) for handle in left)
        keep_alive((self.fabric, keep))
        logger.error(
            "%s could not take back %d writes to peer %s: the memory that they read stays allocated as long as this "
            "process lives; restart it if that happens often",
            self.fabric.name,
            len(left),
            peer.name,
        )

    def listen(self, sock: socket.socket, link: Driven, *, writing: bool = False) -> None:
        """Watch a side channel, or change what it is watched for."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        try:
            self._selector.modify(sock, events, link)
        except KeyError:
            self._selector.register(sock, events, link)

    def forget(self, sock: socket.socket) -> None:
        """Watch a side channel no more."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def poll(self) -> bool:
        """Take what ended from the library; whether there was anything."""
        ended = self.fabric.poll()
        # Taken out first: what is called below may poll again.
        over = [
            (handle, error, self._handles.pop(handle, None) or self._orphans.pop(handle, None))
            for handle, error in ended
        ]
        for handle, error, posted in over:
            if posted is None:
                logger.error("%s reported handle %d, which was not under way", self.fabric.name, handle)
            else:
                self._posts.give(posted.owner)
                posted.ended(error)
        return bool(ended)

    def _let_go_of_rest(self) -> None:
        """Ask the library again for the peers that it could not let go of."""
        busy = {posted.owner for posted in self._orphans.values()}
        for owner, (peer, over) in list(self._given_up.items()):
            if owner in busy:
                continue
            try:
                gone = self.fabric.disconnect(peer)
            except Exception:
                logger.exception("%s: disconnecting peer %s failed again", self.fabric.name, peer.name)
                del self._given_up[owner]
                continue
            if gone:
                del self._given_up[owner]
                over()

    def _handles_of(self, owner: Driven) -> list[int]:
        return [handle for handle, posted in self._handles.items() if posted.owner is owner]

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    def _drain_wake(self) -> None:
        with contextlib.suppress(OSError):
            self._woken.recv(64)

    def _run(self) -> None:
        while True:
            with self._lock:
                commands, self._commands = self._commands, deque()
                self._rung = False
                stopping = self._stopping
            if stopping and not commands:
                return
            try:
                for command in commands:
                    command()
                if not self._turn(bool(commands)) and self._handles:
                    self.fabric.wait(WAIT_SECONDS)
            except Exception as error:
                # A thread that dies would leave every ticket open for ever.
                logger.exception("%s: the pump failed", self.fabric.name)
                self._break_all(f"{self.fabric.name} failed: {type(error).__name__}: {error}")

    def _turn(self, busy: bool) -> bool:
        """One look at everything; whether something happened. Sleeps if nothing is under way."""
        due: float | None = None
        for link in list(self.links):
            try:
                if link.advance():
                    busy = True
                    if link in self.links:
                        self.links[link] = self.links.pop(link)
                when = link.tick(time.monotonic())
            except Exception as error:
                logger.exception("%s: writing failed", self.fabric.name)
                link.broke(f"writing failed: {type(error).__name__}: {error}")
                busy, when = True, None
            if when is not None:
                due = when if due is None else min(due, when)
        if self._given_up:
            due = self._ask_again if due is None else min(due, self._ask_again)
        again = bool(self._given_up) and time.monotonic() >= self._ask_again
        if self._handles or again:
            # A library that raises is not asked for what it keeps all the time.
            self._ask_again = time.monotonic() + FAILED_SECONDS
            busy |= self.poll()
            if again:
                self._let_go_of_rest()
            self._ask_again = time.monotonic() + ORPHAN_SECONDS
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for key, events in self._selector.select(0 if busy or self._handles else timeout):
            busy = True
            link = key.data
            if link == self._drain_wake:
                self._drain_wake()
                continue
            if events & selectors.EVENT_WRITE:
                link.writable()
            if events & selectors.EVENT_READ and link in self.links:
                link.readable()
        return busy

    def _break_all(self, reason: str) -> None:
        for link in list(self.links):
            with contextlib.suppress(Exception):
                link.broke(reason)
