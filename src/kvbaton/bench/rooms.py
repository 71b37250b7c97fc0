"""Many rooms at once against few of the same bytes, memory over very many, and head slices against contiguous bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kvbaton.bench.contenders.cases import Case
from kvbaton.bench.report import Figure, at_least, at_most
from kvbaton.bench.world import HandOver, World

MANY, FEW = 1024, 16
MANY_TARGET = 0.85
"""Throughput of many rooms as a part of that of few."""
SHARE_TARGET = 1.15
"""The median room, against the half of the whole time that it has to wait where rooms are served fairly in turn."""
SLICE_TARGET = 0.75
FLAT_ROOMS = 10_000
FLAT_TARGET = 4.0
"""MiB that the two processes may grow over `FLAT_ROOMS` rooms, after a first thousand."""
WINDOW = 64
"""Rooms that are open at once while memory is watched."""


def run_rooms(transports: Sequence[str], megabytes: int, runs: int, many: int, flat: int) -> list[Figure]:
    """Throughput and fairness of many rooms, and memory."""
    figures: list[Figure] = []
    token_bytes = Case(tokens=1).nbytes
    each = max(1, (megabytes << 20) // token_bytes // many)
    few = max(1, FEW * many // MANY)
    for name in transports:
        cases = [Case(tokens=each, requests=many), Case(tokens=each * many // few, requests=few)]
        by_many, by_few = _in_turn(cases, name, runs)
        gibibytes = cases[0].nbytes / 2**30
        rates = [gibibytes / statistics.median(run.last for run in each) for each in (by_many, by_few)]
        what = f"{many:,} rooms at once, {name}"
        figures.append(at_least(what, rates[0], "GiB/s", f"{few} rooms of the same bytes", rates[1], MANY_TARGET))
        median = statistics.median(run.median / run.last for run in by_many)
        peer = "half of the whole time, the fair share"
        figures.append(at_most(f"{what}, p50 of the rooms", median, "of the whole", peer, 0.5, SHARE_TARGET))
    if flat:
        figures += [_memory(name, flat) for name in transports]
    return figures


def run_slices(transports: Sequence[str], megabytes: int, runs: int) -> list[Figure]:
    """TP 2 to 1 with pages of 16 tokens: head slices of each token, against slices that are contiguous in a page."""
    figures: list[Figure] = []
    tokens = max(16, (megabytes << 20) // Case(tokens=1).nbytes // 16 * 16)
    for name in transports:
        cases = [Case(page_size=16, tokens=tokens, prefill_tp=2, order=order) for order in ("NHD", "HND")]
        timed = _in_turn(cases, name, runs)
        rates = [cases[0].nbytes / 2**30 / statistics.median(run.last for run in each) for each in timed]
        what = f"head slices (TP 2 to 1, page 16, NHD), {name}"
        figures.append(at_least(what, rates[0], "GiB/s", "the same bytes contiguous (HND)", rates[1], SLICE_TARGET))
    return figures


def _in_turn(cases: Sequence[Case], transport: str, runs: int) -> list[list[HandOver]]:
    """Run each case in turn; the first run of each is not counted."""
    with World(cases[0], transport) as one, World(cases[1], transport) as other:
        timed: list[list[HandOver]] = [[], []]
        for _ in range(1 + runs):
            for world, times in zip((one, other), timed, strict=True):
                times.append(world.run())
    return [times[1:] for times in timed]


def _memory(transport: str, rooms: int) -> Figure:
    """How much both processes grow over ``rooms`` rooms."""
    case = Case(layers=2, tokens=1, requests=WINDOW)
    grown = 0.0
    with World(case, transport) as world:
        for number, count in enumerate((max(1, rooms // 10 // WINDOW), -(-rooms // WINDOW))):
            before = sum(process.call("resident_bytes") for process in world.everyone)
            for _ in range(count):
                world.run(check=False)
            grown = sum(process.call("resident_bytes") for process in world.everyone) - before
            if not number:
                world.check()
        world.check()
    name = f"memory over {rooms:,} rooms, {transport}"
    value = grown / 2**20
    return Figure(name, value, "MiB more", target=FLAT_TARGET, met=value <= FLAT_TARGET, target_unit="MiB")
