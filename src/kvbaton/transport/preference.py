"""Which transport is better, by what it can do: the order in which a pair of ranks tries those that both have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvbaton.transport.base import Capabilities, Transport

SOCKETS = 2
"""The last place: measured, a fabric without a network card is no faster than the sockets of kvbaton's own tcp."""


class Preference(NamedTuple):
    """A place in the order, lower is better, and what earns it."""

    order: int
    reason: str

    @property
    def better_than_sockets(self) -> bool:
        """Whether it is to be tried before kvbaton's own sockets."""
        return self.order < SOCKETS


def preference(capabilities: Capabilities) -> Preference:
    """The place of a transport with ``capabilities``. Names count for nothing."""
    if capabilities.mapped:
        return Preference(0, "the peer's memory is addressed directly")
    if capabilities.hardware:
        return Preference(1, "network cards carry the bytes")
    return Preference(SOCKETS, "no network card carries the bytes, but sockets or the like do")


def best_first(transports: Iterable[Transport]) -> list[Transport]:
    """In order of preference; equals stay in the order that they have."""
    return sorted(transports, key=lambda transport: preference(transport.capabilities).order)
