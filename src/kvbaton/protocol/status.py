"""The states of a room, as an engine sees them."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """Where a room stands. SUCCESS and FAILED are absorbing: no later event changes them."""

    WAITING = "waiting"
    """Nothing moves yet: the other side, or this one, has not said where the data belong."""
    TRANSFERRING = "transferring"
    """Both ends are known; data may be moving."""
    SUCCESS = "success"
    """Every byte of every part is in place."""
    FAILED = "failed"
    """The room ended without its data; its reason says why."""

    terminal: bool
    """Whether the room has ended."""

    def __init__(self, value: str) -> None:
        # Engines ask each of their rooms in each step: an attribute is several times faster than a property.
        self.terminal = value in ("success", "failed")
