"""What a decoder to fuzz is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Feed = Callable[[bytes], object]


@dataclass(frozen=True)
class Decoder:
    """A function of bytes that come from outside.

    ``make`` gives it; one that keeps something between inputs is made anew now and then. ``refusals`` are the errors
    that it may raise. Where ``values`` names a format, also single values in the ``examples`` are changed, which begin
    after ``head`` bytes; ``wrap`` puts something like those before them. ``weight`` is its part of all inputs.
    """

    name: str
    make: Callable[[], Feed]
    examples: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]
    values: Literal["", "msgpack", "json"] = ""
    head: int = 0
    wrap: Callable[[bytes], bytes] = bytes
    weight: float = 1.0
    patience: float = 1.0
    """CPU seconds that one input may take."""


def pure(feed: Feed) -> Callable[[], Feed]:
    """The ``make`` of a function that keeps nothing."""
    return lambda: feed
