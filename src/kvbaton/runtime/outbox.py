"""Messages on their way out: those of one turn to one peer travel together."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol import Message, bundle, encode


class Outbox:
    """Keeps frames until `flush`, which passes them to ``carry(peer, frame)``. On the control thread."""

    def __init__(self, carry: Callable[[str, bytes], None]) -> None:
        self._carry = carry
        self._waiting: dict[str, list[bytes]] = {}

    def add(self, peer: str, message: Message) -> None:
        """Send ``message`` to ``peer`` with the next flush. Raises `ProtocolError` if it is too long for a frame."""
        self._waiting.setdefault(peer, []).append(encode(message))

    def flush(self) -> None:
        """Send everything, in the order in which it was added."""
        waiting, self._waiting = self._waiting, {}
        for peer, frames in waiting.items():
            for frame in bundle(frames):
                self._carry(peer, frame)
