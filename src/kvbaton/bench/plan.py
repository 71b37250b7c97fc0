"""Times the planner: binding a million pieces, grouping rows, compiling pairs of ranks, assigning whole grids."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvbaton.bench.plan_cases import bind_cases, grid, pair_cases, piece_count, shuffled
from kvbaton.bench.plan_lists import group_in_lists, pieces_of_rows
from kvbaton.bench.report import Figure
from kvbaton.layout import RankLayout
from kvbaton.plan import Int64s, assign, group_rows

BIND_TARGET = 20.0
"""Milliseconds for 1,000,000 pieces."""
GROUP_TARGET = 5.0
"""Milliseconds for 100,000 rows."""
PAIR_TARGET = 20.0
"""Milliseconds for a pair of ranks of 64 layers."""


def milliseconds(work: Callable[[], object], runs: int) -> float:
    """Time ``work``: the median of ``runs``, after one that is not counted, without the garbage collector.

    Counted is the processor time of this thread, which does all the work: on an idle core that is the time that passes,
    and on a busy machine the neighbours are left out.
    """
    taken: list[float] = []
    work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(runs):
            started = time.thread_time()
            made = work()
            taken.append(time.thread_time() - started)
            del made
    finally:
        gc.enable()
    return statistics.median(taken) * 1e3


def run(pieces: int, runs: int) -> list[Figure]:
    """All figures, in milliseconds of one core."""
    return [*_bind(pieces, runs), *_group(pieces // 10, runs), *_pairs(runs), *_grids(runs)]


def _bind(pieces: int, runs: int) -> list[Figure]:
    figures = []
    for case in bind_cases(pieces):
        moved = piece_count(case.bind())
        value, lists = milliseconds(case.bind, runs), milliseconds(case.lists, max(1, runs // 3))
        figures.append(_figure(f"bind {moved:,} pieces: {case.name}", value, _lists(lists), value / lists, BIND_TARGET))
    return figures


def _group(rows: int, runs: int) -> list[Figure]:
    figures = []
    length = rows // 100
    in_runs = (shuffled(100, 1)[:, None] * length + np.arange(length)).reshape(-1)
    for name, at, to in (
        ("in 100 runs", in_runs, np.arange(rows, dtype=np.int64)),
        ("each by itself", shuffled(rows, 1), shuffled(rows, 2)),
    ):
        value, lists = _group_one(at, to, runs)
        figures.append(_figure(f"group {rows:,} pages {name}", value, _lists(lists), value / lists, GROUP_TARGET))
    return figures


def _group_one(at: Int64s, to: Int64s, runs: int) -> tuple[float, float]:
    at_list, to_list = at.tolist(), to.tolist()
    return (
        milliseconds(lambda: group_rows(at, to), runs),
        milliseconds(lambda: group_in_lists(at_list, to_list), max(1, runs // 3)),
    )


def _pairs(runs: int) -> list[Figure]:
    figures = []
    for case in pair_cases():
        pairs = case.shares()
        value = milliseconds(case.compile, runs) / len(pairs)
        lists = milliseconds(partial(pieces_of_rows, pairs[0][0], case.destination), max(1, runs // 3))
        each = f" (each of {len(pairs)} pairs)" if len(pairs) > 1 else ""
        peer = f"pieces of one row, {_lists(lists)}"
        figures.append(_figure(f"compile {case.name}{each}", value, peer, value / lists, PAIR_TARGET))
    return figures


def _grids(runs: int) -> list[Figure]:
    figures = []
    for tp, pp in ((8, 1), (32, 1), (8, 8), (32, 8)):
        ranks = grid(tp, pp)
        value = milliseconds(partial(_assign_all, ranks), max(1, runs // 3)) / len(ranks)
        name = f"assign {len(ranks)} sources to each of {len(ranks)} destinations, tp {tp} pp {pp}"
        figures.append(_figure(name, value, "", None, PAIR_TARGET))
    return figures


def _assign_all(ranks: list[RankLayout]) -> None:
    for number, rank in enumerate(ranks):
        assign(ranks, rank, destination_index=number)


def _lists(value: float) -> str:
    return f"lists {value:.4g} ms"


def _figure(name: str, value: float, peer: str, ratio: float | None, target: float) -> Figure:
    return Figure(name, value, "ms", peer, ratio, target, value < target, "ms")
