"""The simulated control thread of a process: turns, posted commands, frames in the order in which they arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Union

from kvbaton.check.faults.network import Network, Node
from kvbaton.runtime.interfaces import ControlHandler

COMMANDS_PER_TURN = 16


class Frame:
    """A frame of a peer."""

    __slots__ = ("content", "key")

    def __init__(self, key: str, content: bytes) -> None:
        self.key = key
        self.content = content


class Gone:
    """The end of a connection."""

    __slots__ = ("key", "reason")

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason


Event = Union[Frame, Gone]  # noqa: UP007


class SimulatedControl:
    """As `ControlPlane`, on the network of a world. ``wake`` asks for a turn."""

    def __init__(self, network: Network, node: Node, wake: Callable[[], None]) -> None:
        self._network = network
        self._node = node
        self._wake = wake
        self._commands: deque[Callable[[], None]] = deque()
        self._inbox: deque[Event] = deque()
        self.connected: dict[str, None] = {}
        """Keys of connections that are neither hung up nor reported as lost."""
        self.news = 0
        """Frames and ends that were passed on."""
        self._closed = False

    def post(self, command: Callable[[], None]) -> None:
        """As `ControlPlane.post`."""
        if self._closed:
            return
        self._commands.append(command)
        self._wake()

    def dial(self, endpoint: str) -> str:
        """As `ControlPlane.dial`."""
        key = self._network.dial(self._node, endpoint)
        self.connected[key] = None
        return key

    def send(self, peer: str, frame: bytes) -> None:
        """As `ControlPlane.send`."""
        self._network.send(self._node, peer, frame)

    def hang_up(self, peer: str, linger_milliseconds: int = 0) -> None:
        """As `ControlPlane.hang_up`."""
        if self.connected.pop(peer, "none") is None:
            self._network.hang_up(self._node, peer, linger_milliseconds > 0)

    def close(self) -> None:
        """As `ControlPlane.close`, once what was posted is done: what was said arrives, if the network lets it."""
        self._closed = True
        self.connected.clear()
        self._inbox.clear()
        for end in self._network.ends_of(self._node):
            self._network.hang_up(self._node, end.key, linger=True)

    def arrived(self, event: Event) -> None:
        """Something came from the network."""
        if self._closed:
            return
        if isinstance(event, Frame) and event.key.startswith("in:"):
            self.connected.setdefault(event.key)
        self._inbox.append(event)
        self._wake()

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a turn."""
        return not self._commands and not self._inbox

    def turn(self, handler: ControlHandler, now: float) -> float | None:
        """One turn of the loop, in the order of the real one. Returns when the next is due at the latest."""
        for _ in range(min(len(self._commands), COMMANDS_PER_TURN)):
            self._commands.popleft()()
        for _ in range(len(self._inbox)):
            event = self._inbox.popleft()
            if event.key not in self.connected:
                continue
            self.news += 1
            if isinstance(event, Frame):
                handler.on_frame(event.key, event.content)
            else:
                del self.connected[event.key]
                handler.on_disconnected(event.key, event.reason)
        return handler.on_turn(now)
