"""Runs contenders in turn: one run of each, then the next of each, so that all see the same machine."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvbaton.bench.pairs import Contender, ContenderFailed, Pair, Timing

LEAST_RUNS = 3


class Outcome(NamedTuple):
    """What became of a contender: its counted runs, or why there are none."""

    contender: Contender
    timings: tuple[Timing, ...]
    missing: str = ""

    @property
    def seconds(self) -> float:
        """The median run."""
        return statistics.median(timing.seconds for timing in self.timings)

    @property
    def source_processor(self) -> float:
        """Processor seconds of the source's process in a run: the median."""
        return statistics.median(timing.source_processor for timing in self.timings)


def take_turns(
    contenders: Sequence[Contender], work: Mapping[str, Any], runs: int, seconds: float
) -> dict[str, Outcome]:
    """Run each contender ``runs`` times, after one run that is not counted; by name.

    One that is so slow that it would take longer than ``seconds`` runs less often, but `LEAST_RUNS` times. One that is
    not here, or that fails, has no timings and says why. A contender's bytes that differ are a failure too.
    """
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        planned: dict[str, int] = {}
        timings: dict[str, list[Timing]] = {}
        for contender in contenders:
            missing = contender.missing()
            if not missing:
                try:
                    pair = stack.enter_context(Pair(contender, work))
                    first = pair.run()
                    # The first run pays for page faults and connections: the second says how long one takes.
                    second = pair.run() if first.seconds * LEAST_RUNS > seconds / 2 else first
                except ContenderFailed as error:
                    missing = str(error)
                else:
                    pair.rest()
                    pairs[contender.name], timings[contender.name] = pair, []
                    most = int(seconds / max(second.seconds, 1e-9))
                    planned[contender.name] = min(runs, max(LEAST_RUNS, most))
            outcomes[contender.name] = Outcome(contender, (), missing)
        for turn in range(runs):
            for name in [name for name in pairs if turn < planned[name]]:
                try:
                    timings[name].append(pairs[name].run_alone())
                except ContenderFailed as error:
                    outcomes[name] = Outcome(outcomes[name].contender, (), str(error))
                    pairs.pop(name).close()
    for name in pairs:
        outcomes[name] = Outcome(outcomes[name].contender, tuple(timings[name]))
    return outcomes
