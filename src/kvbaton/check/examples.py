"""Checks many examples: Hypothesis draws them, and makes the first one that fails as small as it can."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.check.batches import run_batches
from kvbaton.check.coverage import FEATURES, covered
from kvbaton.check.explain import Problem
from kvbaton.check.grids import grid
from kvbaton.check.layouts import Report, check_pair
from kvbaton.check.models import World
from kvbaton.check.worlds import WORLD_BYTES, to_choices, to_name, with_component, world_of
from kvbaton.errors import ConfigurationError

BATCH = 250
"""Examples that are drawn from one seed; a batch is the same in whichever process it runs."""
MOST_DESTINATIONS = 2
"""Destination ranks that are checked in one example."""


@dataclass
class Failure:
    """The smallest example found that fails: its text, its name, and the seed of its batch."""

    example: str
    name: str
    problems: list[Problem]
    seed: int
    device: str = ""

    def text(self) -> str:
        """All of it, for a person to read, with the commands that repeat it."""
        wrong = "\n".join(f"  {problem.where}: {problem.what}" for problem in self.problems)
        return f"{self.example}\n\nwrong:\n{wrong}\n\nrepeat this example alone:\n  {self.command}\n"

    @property
    def command(self) -> str:
        """The command that checks the smallest example by itself."""
        return f"kvbaton check layouts --example {self.name}" + (f" --device {self.device}" if self.device else "")


@dataclass
class Outcome:
    """What was checked: ``examples`` that passed, what they covered and moved; and the failure, if there was one."""

    examples: int = 0
    pairs: int = 0
    pieces: int = 0
    nbytes: int = 0
    covered: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FEATURES, 0)))
    failure: Failure | None = None

    def add(self, other: Outcome) -> None:
        """Count what ``other`` counted too."""
        self.examples += other.examples
        self.pairs += other.pairs
        self.pieces += other.pieces
        self.nbytes += other.nbytes
        self.covered.update(other.covered)
        self.failure = self.failure or other.failure


class _Failed(Exception):
    """An example that failed, on its way through Hypothesis."""


def check_world(world: World, device: str = "") -> Report:
    """Check one example; an error of any kind is a problem."""
    try:
        return check_pair(
            grid(world, world.source),
            grid(world, world.destination),
            tokens=world.tokens,
            prefix=world.prefix,
            cuts=world.cuts,
            seed=world.seed,
            striped=world.striped,
            cast=bool(world.casts),
            most_destinations=MOST_DESTINATIONS,
            device=device,
        )
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno}, in {last.name})"
        return Report([Problem("planner", what)])


def check_layouts(
    examples: int,
    seed: int,
    *,
    processes: int = 1,
    device: str = "",
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Check ``examples`` examples. The same number and ``seed`` give the same ones, whatever ``processes`` is.

    ``progress`` is called with all that has been counted after each batch. It ends after the first batch that fails.
    Raises `ConfigurationError` where Hypothesis is not installed.
    """
    need_hypothesis()
    outcome = Outcome()
    for done in run_batches(run_batch, [(*batch, device) for batch in _batches(examples, seed)], processes):
        outcome.add(done)
        progress(outcome)
        if outcome.failure:
            break
    return outcome


def run_batch(seed: int, examples: int, device: str = "") -> Outcome:
    """Check the examples of one seed with Hypothesis, and shrink the first that fails."""
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    outcome = Outcome()

    def check(choices: bytes) -> None:
        world = world_of(choices)
        report = check_world(world, device)
        if not report.ok:
            outcome.failure = _failure(choices, report, seed, device)
            raise _Failed
        if outcome.failure is None:
            outcome.examples += 1
            outcome.pairs += report.pairs
            outcome.pieces += report.pieces
            outcome.nbytes += report.nbytes
            outcome.covered.update(covered(world))

    quiet = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    with contextlib.suppress(_Failed):
        # Hypothesis repeats the smallest example that fails once more at the end: that one is kept.
        seeded(seed)(quiet(given(st.binary(min_size=WORLD_BYTES, max_size=WORLD_BYTES))(check)))()
    if outcome.failure:
        outcome.failure = _one_component(outcome.failure, device)
    return outcome


def _failure(choices: bytes, report: Report, seed: int, device: str) -> Failure:
    return Failure(world_of(choices).text(), to_name(choices), report.problems, seed, device)


def _one_component(failure: Failure, device: str) -> Failure:
    """The same failure with one component alone, if that fails too: Hypothesis cannot leave out the first."""
    choices = to_choices(failure.name)
    for number in range(1, len(world_of(choices).model)):
        alone = with_component(choices, number)
        report = check_world(world_of(alone), device)
        if not report.ok:
            return _failure(alone, report, failure.seed, device)
    return failure


def need_hypothesis() -> None:
    """Raise `ConfigurationError` where Hypothesis is not installed."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"checks need the extra 'check': pip install 'kvbaton[check]' ({error})") from None


def _batches(examples: int, seed: int) -> list[tuple[int, int]]:
    """Seed and number of examples of each batch; the first has ``seed`` itself."""
    counts = [min(BATCH, examples - start) for start in range(0, examples, BATCH)]
    return [(seed if not number else _mixed(seed, number), count) for number, count in enumerate(counts)]


def _mixed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=7).digest(), "little")
