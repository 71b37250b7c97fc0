"""Which transport is better, by what it can do: the order in which a pair of ranks tries those that both have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvbaton.transport.base import Capabilities, Transport


class Preference(NamedTuple):
    """A place in the order, lower is better, and what earns it."""

    order: int
    reason: str


def preference(capabilities: Capabilities) -> Preference:
    """The place of a transport with ``capabilities``. Names count for nothing."""
    if capabilities.mapped:
        return Preference(0, "the peer's memory is addressed directly")
    if capabilities.hardware:
        return Preference(1, "network cards carry the bytes")
    return Preference(2, "sockets of the operating system carry the bytes")


def best_first(transports: Iterable[Transport]) -> list[Transport]:
    """In order of preference; equals stay in the order that they have."""
    return sorted(transports, key=lambda transport: preference(transport.capabilities).order)
