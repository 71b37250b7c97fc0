"""How long a small hand-over takes, and how long a large one keeps the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbaton.bench.contenders.work import Work
from kvbaton.bench.pairs import Contender, Pair
from kvbaton.bench.report import Figure, at_most

SMALL = Work(256, 1)
"""16 KiB: one token, 256 bytes in each of 64 tensors."""
LARGE_PAGES = 4096
ROUND_TRIP = "bare ZeroMQ round trip"
ROUND_TRIP_TARGET = 5.0
SEND_TARGET = 100.0
"""Microseconds of the engine's thread."""


def run(transports: Sequence[str], rooms: int, pages: int = LARGE_PAGES) -> list[Figure]:
    """All figures, in microseconds."""
    figures: list[Figure] = []
    for name in transports:
        small = _measure(name, SMALL, rooms)
        trip = small["round trip"]
        for percent in (50, 99):
            target = ROUND_TRIP_TARGET if (name, percent) == ("shm", 50) else None
            of_peer = _percentile(trip, percent)
            what = f"hand-over of 16 KiB, {name}, p{percent}"
            figures.append(at_most(what, _percentile(small["visible"], percent), "us", ROUND_TRIP, of_peer, target))
        figures += [
            Figure(f"{ROUND_TRIP} beside {name}, p{percent}", _percentile(trip, percent), "us") for percent in (50, 99)
        ]
    for name in transports:
        large = _measure(name, Work(256, pages), max(20, rooms // 4))
        for call in ("send", "finish"):
            for percent in (50, 99):
                value = _percentile(large[call], percent)
                target = SEND_TARGET if (call, percent) == ("send", 99) else None
                met = None if target is None else value < target
                what = f"{call}() in the engine's thread, {pages:,} pages, {name}, p{percent}"
                figures.append(Figure(what, value, "us", target=target, met=met, target_unit="us"))
    return figures


def _measure(transport: str, work: Work, rooms: int) -> dict[str, list[float]]:
    with Pair(Contender(f"kvbaton over {transport}", "latency", (transport,)), work._asdict()) as pair:
        # Once for warmth, and once that counts.
        for count in (max(10, rooms // 10), rooms):
            for process in (pair.destination, pair.source):
                process.ask("hand_over", count=count)
            times: dict[str, list[float]] = pair.source.answer()
            pair.destination.answer()
    return times


def _percentile(seconds: Sequence[float], percent: int) -> float:
    return float(np.percentile(seconds, percent)) * 1e6
