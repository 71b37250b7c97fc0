"""What the processes of a doctor find, and print as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec


class Attempt(msgspec.Struct, frozen=True):
    """What a transport did when it was asked to."""

    name: str
    state: Literal["works", "missing", "fails"]
    reason: str = ""
    """Why it is missing, or how it failed."""
    mapped: bool = False
    cross_host: bool = False
    cross_process: bool = False
    memory_kinds: tuple[str, ...] = ()


class Measured(msgspec.Struct):
    """One transport on the way to the peer. Figures are 0 where it does not work."""

    name: str
    state: Literal["works", "missing", "fails"]
    reason: str = ""
    """Why it is missing on one of the sides, or how it failed."""
    round_trip_seconds: float = 0.0
    """From the start of a write of 4 KiB to the news that it is in place; the median."""
    bytes_per_second: float = 0.0
    """Of writes of 128 MiB, in rows of 64 KiB, one after the other."""


class PeerReport(msgspec.Struct):
    """What was found on the way to the peer."""

    address: str
    error: str = ""
    """Why the peer could not be measured (any further)."""
    host: str = ""
    libraries: dict[str, str] = {}
    round_trip_seconds: float = 0.0
    """Of a message over TCP; the median."""
    transports: list[Measured] = []
    trying: str = ""
    """The transport that is being measured."""

    @property
    def works(self) -> bool:
        """Whether any transport works."""
        return any(each.state == "works" for each in self.transports)
