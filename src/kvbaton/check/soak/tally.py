"""What a soak counts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_IDENTITY = re.compile(r"\b[0-9a-f]{32}\b")
_ENDPOINT = re.compile(r"tcp://[^\s,;]+|https?://[^\s,;]+")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def normalised(reason: str) -> str:
    """A reason without what is another one each time: numbers, addresses, names of processes."""
    text = _ENDPOINT.sub("<address>", _IDENTITY.sub("<instance>", reason))
    return _NUMBER.sub("N", text)[:240]


@dataclass
class Tally:
    """The figures of a run. All must be zero, or empty, that says what never happens: see `broken`."""

    rooms: int = 0
    succeeded: int = 0
    failed: int = 0
    lost_with_their_process: int = 0
    """Rooms of which no decode process was left to say how they ended."""
    unnamed: int = 0
    """Rooms that failed without a reason."""
    faults: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of rooms that failed, by normalised reason, as decode saw it (prefill, where decode did not)."""
    prefill_reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Rows with wrong content."""
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Processes that ended by themselves."""
    not_recovered: list[str] = field(default_factory=list)
    """Rooms that failed when all faults were over."""
    growth: list[str] = field(default_factory=list)
    """Processes whose memory grew."""
    logged: Counter[str] = field(default_factory=Counter)
    """Errors that kvbaton logged, normalised: each is worth a look."""

    def broken(self) -> list[str]:
        """Every promise that was broken."""
        found = {
            "wrong bytes": self.wrong,
            "hang": self.hangs,
            "leak": self.leaks,
            "ended by itself": self.ended,
            "not recovered": self.not_recovered,
            "memory grew": self.growth,
        }
        said = [f"{name}: {what}" for name, all_of_it in found.items() for what in all_of_it]
        if self.unnamed:
            said.append(f"{self.unnamed} rooms failed without a reason")
        return said
