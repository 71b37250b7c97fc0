"""What a run of checks says: progress, a table of what was covered, the failure, and all of it as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvbaton.check.examples import Failure, Outcome, check_layouts, check_world
from kvbaton.check.on_device import check_device
from kvbaton.check.worlds import to_choices, world_of
from kvbaton.errors import ConfigurationError


def check_examples(examples: int, seed: int, *, processes: int = 1, json_to: str = "", device: str = "") -> bool:
    """Check ``examples`` examples of ``seed`` and say what came out; whether all passed.

    ``device`` is "cuda" where the GPU's kernels shall move the bytes, each process with the first GPU.
    ``json_to`` is the file that the figures are written to, or ``-`` for standard output and nothing else there. Raises
    `ConfigurationError` where Hypothesis is not installed, and where the file cannot be written.
    """
    check_target(json_to)
    check_device(device)
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("examples", total=examples, rate="")

        def progress(outcome: Outcome) -> None:
            rate = outcome.examples / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=outcome.examples, rate=f"{rate:.0f}/s")

        outcome = check_layouts(examples, seed, processes=processes, device=device, progress=progress)
    figures = as_json(outcome, examples, seed, time.monotonic() - started)
    write_json(figures, json_to)
    if json_to != "-":
        _show(outcome, figures)
    return outcome.failure is None


def check_example(name: str, *, json_to: str = "", device: str = "") -> bool:
    """Check the one example of that name, and say what came out; whether it passed.

    Raises `ConfigurationError` where ``name`` names none, and where the file cannot be written.
    """
    check_target(json_to)
    check_device(device)
    world = world_of(to_choices(name))
    started = time.monotonic()
    report = check_world(world, device)
    failure = None if report.ok else Failure(world.text(), name, report.problems, 0, device)
    outcome = Outcome(int(report.ok), report.pairs, report.pieces, report.nbytes, failure=failure)
    write_json(as_json(outcome, 1, None, time.monotonic() - started), json_to)
    if json_to != "-":
        print(failure.text() if failure else f"{world.text()}\n\nnothing is wrong")
    return report.ok


def as_json(outcome: Outcome, examples: int, seed: int | None, seconds: float) -> dict[str, Any]:
    """The figures of a run. ``examples`` were asked for; ``passed`` is how many passed."""
    failure = outcome.failure
    return {
        "ok": failure is None,
        "examples": examples,
        "passed": outcome.examples,
        "seed": seed,
        "seconds": round(seconds, 3),
        "examples_per_second": round(outcome.examples / max(seconds, 1e-9), 1),
        "pairs": outcome.pairs,
        "pieces": outcome.pieces,
        "bytes": outcome.nbytes,
        "covered": dict(outcome.covered),
        "failure": failure
        and {
            "example": failure.example,
            "name": failure.name,
            "problems": [problem._asdict() for problem in failure.problems],
            "repeat": failure.command,
        },
    }


def check_target(json_to: str) -> None:
    """Raise `ConfigurationError` where the figures could not be written once they are there."""
    if json_to not in ("", "-") and Path(json_to).is_dir():
        raise ConfigurationError(f"--json {json_to} is a folder; name a file in it, or - for standard output")


def write_json(figures: Any, json_to: str) -> None:
    """Write figures to a file, or to standard output for ``-``; nothing without a name. Raises `ConfigurationError`."""
    text = json.dumps(figures, indent=2) + "\n"
    if json_to == "-":
        sys.stdout.write(text)
    elif json_to:
        path = Path(json_to)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigurationError(f"--json {json_to}: {error.strerror or error}") from None


def _show(outcome: Outcome, figures: dict[str, Any]) -> None:
    console = Console()
    table = Table("covered", "examples", title="What the examples that passed covered")
    table.columns[1].justify = "right"
    for feature, count in outcome.covered.items():
        table.add_row(feature, str(count))
    console.print(table)
    console.print(
        f"{outcome.examples} examples of seed {figures['seed']} passed in {figures['seconds']:.1f} s "
        f"({figures['examples_per_second']:.0f}/s): {outcome.pairs} pairs of ranks, {outcome.pieces} pieces, "
        f"{outcome.nbytes} bytes",
        highlight=False,
    )
    if outcome.failure:
        print(f"\nAN EXAMPLE FAILED. The smallest one found:\n\n{outcome.failure.text()}")
