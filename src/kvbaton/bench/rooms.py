"""Many rooms at once against few, memory over very many, and head slices against contiguous bytes."""

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
    """Throughput and fairness of many rooms, and memory.

    ``many`` rooms are handed over at once in two ways: against few rooms as large as each of them, and against few that
    hold as many bytes together. The first shows what a crowd costs, the second what a room costs.
    """
    figures: list[Figure] = []
    token_bytes = Case(tokens=1).nbytes
    few = max(1, FEW * many // MANY)
    small = max(1, (megabytes << 20) // token_bytes // many)
    for name in transports:
        for tokens, of_few in ((4 * small, 4 * small), (small, small * many // few)):
            cases = [Case(tokens=tokens, requests=many), Case(tokens=of_few, requests=few)]
            figures += _crowd(name, cases, runs)
    if flat:
        figures += [_memory(name, flat) for name in transports]
    return figures


def _crowd(transport: str, cases: Sequence[Case], runs: int) -> list[Figure]:
    """The first of the two cases, which has more rooms, against the other."""
    timed = _in_turn(cases, transport, runs)
    rates = [
        case.nbytes / 2**30 / statistics.median(run.last for run in each)
        for case, each in zip(cases, timed, strict=True)
    ]
    sizes = [f"{case.requests:,} rooms of {_size(case.nbytes // case.requests)}" for case in cases]
    what = f"{sizes[0]} at once, {transport}"
    median = statistics.median(run.median / run.last for run in timed[0])
    fair = "half of the whole time, the fair share"
    return [
        at_least(what, rates[0], "GiB/s", sizes[1], rates[1], MANY_TARGET),
        at_most(f"{what}, p50 of the rooms", median, "of the whole", fair, 0.5, SHARE_TARGET),
    ]


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


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
