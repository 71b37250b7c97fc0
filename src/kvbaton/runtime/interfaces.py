"""What the logic of a rank needs of the world around it: messages, threads for what may block, announcements.

The real ones are `ControlPlane`, `Threads` and `AnnouncerThread`. Together with the clock, the executor, the transports
and the registry's client they are all that `PrefillSide` and `DecodeSide` touch, so that a simulation can take their
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ControlHandler(Protocol):
    """What the control thread calls. None of it may block."""

    def on_frame(self, peer: str, frame: bytes) -> None:
        """A frame came from ``peer``."""

    def on_disconnected(self, peer: str, reason: str) -> None:
        """The connection of ``peer`` is gone; its key is never used again."""

    def on_refused(self, peer: str, reason: str) -> None:
        """``peer``, which we dialled, does not share our secret: told instead of `on_disconnected`."""

    def on_turn(self, now: float) -> float | None:
        """Called at least once per turn of the loop; returns when it wants the next turn at the latest (seconds)."""


class Control(Protocol):
    """The control thread and its connections."""

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the control thread, after everything posted before. From any thread; never blocks."""

    def dial(self, endpoint: str) -> str:
        """Open a connection to a peer's control endpoint and return the peer's key. On the control thread.

        Raises `AddressError` for a text that is no ``tcp://host:port``.
        """

    def hang_up(self, peer: str, linger_milliseconds: int = 0) -> None:
        """Close the connection of a peer that we dialled; nothing is reported. On the control thread."""


class LongWork(Protocol):
    """Threads for requests that may last long, one for each."""

    def start(self, work: Callable[[], None], name: str) -> None:
        """Run ``work`` on a thread of this name."""


class Announcements(Protocol):
    """Tells the registry which rooms this replica has open. From any thread; never blocks."""

    def opened(self, room: int) -> None:
        """The engine opened a room."""

    def closed(self, room: int, *, early: bool = False) -> None:
        """The engine closed a room; ``early``: before it had ended well."""

    def start_over(self) -> None:
        """Announce every open room again: the registry has forgotten them."""

    def __len__(self) -> int:
        """How many rooms are announced, or will be."""
