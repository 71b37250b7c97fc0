"""The simulated network: connections that are ordered and reliable, each way by itself, until they break.

A cut way holds its frames back, as TCP does: they come late, in order, when it heals, or never, when an end gives up
before. Who hears nothing for as long as the heartbeats allow gives up, and its end is told to the other when the way
back works. A dead process's host tells at once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from kvbaton.check.faults.timeline import Timeline
from kvbaton.runtime.settings import Settings

CLOSED = "its control connection closed"


class Node(Protocol):
    """A process, as the network knows it."""

    slot: int
    """Its place: what is cut is cut between places."""
    alive: bool
    stopped: bool

    def arrived(self, key: str, frame: bytes) -> None:
        """A frame came."""

    def lost(self, key: str, reason: str) -> None:
        """The connection is gone."""


@dataclass(eq=False)
class End:
    """One end of a connection, and the way from it to the other."""

    node: Node
    key: str
    chance: Random
    peer: End | None = None
    """None until it is connected."""
    open: bool = True
    held: list[bytes | None] = field(default_factory=list)
    """What waits for the connection, or for the way to heal; None is its end."""
    newest: float = 0.0
    """When the last thing that was sent arrives."""
    dropping: bool = False
    """Whether frames that have not arrived never will."""
    silent_since: float | None = None
    farewell: str = CLOSED


Tamper = Callable[[Node, bytes], list[tuple[bytes, float | None]]]
"""What becomes of a frame: itself or others, each with seconds of delay out of its turn (None: in its turn)."""


class Network:
    """Carries frames between the ends of connections."""

    def __init__(self, timeline: Timeline, settings: Settings, stream: Callable[..., Random]) -> None:
        self._timeline = timeline
        self._settings = settings
        self._stream = stream
        self._numbers = itertools.count(1)
        self._ends: dict[tuple[int, str], End] = {}
        """By the identity of the node, and the key."""
        self._cuts: Counter[tuple[int, int]] = Counter()
        self._slow: dict[tuple[int, int], float] = {}
        self.listening: dict[str, Node] = {}
        """Who is at an address."""
        self.tamper: Tamper = lambda node, frame: [(frame, None)]

    # What processes do.

    def dial(self, node: Node, endpoint: str) -> str:
        """Open a connection; it is established a little later, or lost."""
        number = next(self._numbers)
        end = End(node, f"out:{endpoint}#{number}", self._stream("connection", number))
        self._ends[id(node), end.key] = end
        give_up = self._timeline.now + self._settings.connect_seconds
        self._timeline.after(end.chance.uniform(0.001, 0.02), lambda: self._attempt(end, endpoint, number, give_up))
        return end.key

    def send(self, node: Node, key: str, frame: bytes) -> None:
        """Send a frame, if the connection is still there."""
        end = self._ends.get((id(node), key))
        if end is None or not end.open:
            return
        for each, delay in self.tamper(node, frame):
            if delay is None:
                self._transmit(end, each)
            else:
                self._timeline.after(delay, lambda each=each: self._arrive(end, each))  # type: ignore[misc]

    def hang_up(self, node: Node, key: str, linger: bool) -> None:
        """Close a connection; what was sent may arrive, and does with ``linger`` if the way is not cut."""
        end = self._ends.get((id(node), key))
        if end is not None and end.open:
            end.dropping = not linger and end.chance.random() < 0.5
            self._close(end)

    def break_off(self, end: End, reason: str) -> None:
        """An end gives up: its process is told, and the other one if the way works."""
        if end.open:
            end.node.lost(end.key, reason)
            end.dropping = end.chance.random() < 0.5
            self._close(end)

    def died(self, node: Node) -> None:
        """A process is gone: its host closes its connections."""
        for end in self.ends_of(node):
            end.dropping = end.chance.random() < 0.5
            self._close(end)

    def ends_of(self, node: Node) -> list[End]:
        """The open ends of a process."""
        return [end for end in self._ends.values() if end.node is node and end.open]

    def between(self, source: int, destination: int) -> list[End]:
        """The open ends at one place of connections to another."""
        return [end for end in self._established() if _way(end) == (source, destination)]

    # What befalls it.

    def cut(self, source: int, destination: int) -> None:
        """Nothing gets from one place to another from now on."""
        self._cuts[source, destination] += 1
        for end in self._established():
            if _way(end) == (source, destination):
                self.watch_silence(end)

    def heal(self, source: int, destination: int) -> None:
        """Undo one `cut`."""
        self._cuts[source, destination] -= 1
        if self.is_cut(source, destination):
            return
        for end in self._established(also_closed=True):
            if _way(end) == (source, destination):
                if not end.node.stopped:
                    end.silent_since = None
                held, end.held = end.held, []
                for item in held:
                    self._transmit(end, item)

    def is_cut(self, source: int, destination: int) -> bool:
        """Whether nothing gets from one place to another."""
        return self._cuts[source, destination] > 0

    def slow_down(self, source: int, destination: int, seconds: float) -> None:
        """Whatever is sent from one place to another takes so much longer; 0 ends it."""
        self._slow[source, destination] = seconds

    def stopped(self, node: Node) -> None:
        """A process stands still: nothing more comes from it."""
        for end in self.ends_of(node):
            if end.peer is not None:
                self.watch_silence(end)

    def resumed(self, node: Node) -> None:
        """A process goes on."""
        for end in self.ends_of(node):
            if end.peer is not None and not self.is_cut(*_way(end)):
                end.silent_since = None

    def watch_silence(self, end: End) -> None:
        """Nothing comes from ``end`` any more: in a while the other one gives up."""
        since = end.silent_since = self._timeline.now if end.silent_since is None else end.silent_since
        patience = self._settings.peer_timeout_seconds + end.chance.uniform(0.0, 1.0)

        def give_up() -> None:
            peer = end.peer
            if end.silent_since != since or peer is None or not peer.open:
                return
            if peer.node.stopped:
                self._timeline.after(0.5, give_up)
            else:
                self.break_off(peer, "nothing was heard of it")

        self._timeline.at(since + patience, give_up)

    # Below: how it is done.

    def _established(self, *, also_closed: bool = False) -> list[End]:
        return [end for end in self._ends.values() if end.peer is not None and (end.open or also_closed)]

    def _attempt(self, end: End, endpoint: str, number: int, give_up: float) -> None:
        if not end.open:
            return
        server = self.listening.get(endpoint)
        ways = server is not None and not (
            self.is_cut(end.node.slot, server.slot) or self.is_cut(server.slot, end.node.slot)
        )
        if server is None or not server.alive or not ways:
            if self._timeline.now < give_up:
                again = end.chance.uniform(0.05, 0.2)
                self._timeline.after(again, lambda: self._attempt(end, endpoint, number, give_up))
            else:
                end.node.lost(end.key, f"nothing answers at its control endpoint {endpoint}")
                self._close(end)
            return
        other = End(server, f"in:{number:08x}", self._stream("answers", number), end)
        end.peer = other
        self._ends[id(server), other.key] = other
        held, end.held = end.held, []
        for item in held:
            self._transmit(end, item)

    def _close(self, end: End) -> None:
        end.open = False
        if end.peer is None:
            self._forget(end)
        else:
            self._transmit(end, None)

    def _transmit(self, end: End, item: bytes | None) -> None:
        if end.peer is None or self.is_cut(*_way(end)):
            end.held.append(item)
            return
        latency = end.chance.uniform(0.001, 0.03) + self._slow.get(_way(end), 0.0)
        end.newest = max(end.newest, self._timeline.now + latency)
        self._timeline.at(end.newest, lambda: self._arrive(end, item))

    def _arrive(self, end: End, item: bytes | None) -> None:
        peer = end.peer
        if peer is None or (end.dropping and item is not None):
            return
        if self.is_cut(*_way(end)):
            end.held.append(item)
            return
        if item is None:
            self._forget(end)
            if peer.open:
                peer.open = False
                peer.node.lost(peer.key, end.farewell)
                self._forget(peer)
        elif peer.open:
            peer.node.arrived(peer.key, item)

    def _forget(self, end: End) -> None:
        self._ends.pop((id(end.node), end.key), None)


def _way(end: End) -> tuple[int, int]:
    assert end.peer is not None
    return end.node.slot, end.peer.node.slot
