"""Runs worlds: one scenario, or many seeds in several processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvbaton.check.batches import run_batches
from kvbaton.check.faults.plans import remembered_plans
from kvbaton.check.faults.scenario import Scenario, draw
from kvbaton.check.faults.world import Result, World
from kvbaton.errors import KVBatonError

BATCH = 20
"""Seeds that one process takes at a time."""


@dataclass
class Totals:
    """What many worlds came to."""

    seeds: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count one world."""
        self.seeds += 1
        self.steps += result.steps
        self.faults += result.faults
        self.seen += result.seen
        self.outcomes += result.outcomes
        if result.violations:
            self.failed.append(result)

    def join(self, other: Totals) -> None:
        """Count many."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.faults += other.faults
        self.seen += other.seen
        self.outcomes += other.outcomes
        self.failed += other.failed


class _Errors(logging.Handler):
    """Errors that nobody foresaw are written to the log, and the room that they belong to fails: here they count."""

    def __init__(self, violate: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._violate = violate

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the log."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, KVBatonError):
            self._violate(record.name, f"an unforeseen error: {error!r} ({record.getMessage()})")


@contextmanager
def _quiet(violate: Callable[[str, str], None]) -> Iterator[None]:
    """Keep what worlds log from the log, and look through it."""
    logger, handler = logging.getLogger("kvbaton"), _Errors(violate)
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def simulate(scenario: Scenario, log: list[str] | None = None) -> Result:
    """Run one scenario; ``log`` is filled with what happens, a line each."""
    with remembered_plans():
        world = World(scenario, log)
        with _quiet(world.violate):
            return world.run()


def run_batch(first: int, seeds: int, size: int) -> Totals:
    """Run the worlds of some seeds, up to the first that fails."""
    totals = Totals()
    for seed in range(first, first + seeds):
        totals.add(simulate(draw(seed, size)))
        if totals.failed:
            break
    return totals


def run_seeds(
    first: int,
    seeds: int,
    *,
    size: int = 1,
    processes: int = 1,
    progress: Callable[[Totals], None] = lambda totals: None,
) -> Totals:
    """Run the worlds of ``seeds`` seeds from ``first`` on. It ends soon after the first that fails.

    ``size`` is how many times more happens than in a small world. ``progress`` is called with all that was counted.
    """
    totals = Totals()
    batches = [(at, min(BATCH, first + seeds - at), size) for at in range(first, first + seeds, BATCH)]
    for done in run_batches(run_batch, batches, processes):
        totals.join(done)
        progress(totals)
        if totals.failed:
            break
    totals.failed.sort(key=lambda result: result.seed)
    return totals
