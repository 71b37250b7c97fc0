"""What a run of the simulation says: progress, tables of faults and outcomes, the failure made small, and JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvbaton.check.faults.scenario import KINDS, Scenario, draw
from kvbaton.check.faults.shrink import shrink
from kvbaton.check.faults.simulate import Totals, run_seeds, simulate
from kvbaton.check.faults.world import Result
from kvbaton.check.report import check_target, write_json
from kvbaton.errors import ConfigurationError


def check_faults(seeds: int, first: int, *, size: int = 1, processes: int = 1, json_to: str = "") -> bool:
    """Simulate ``seeds`` seeds from ``first`` on, and say what came out; whether nothing was violated.

    ``size`` is how many times more happens in each than in a small world. ``json_to`` is the file for the figures, or
    ``-`` for standard output and nothing else there. Raises `ConfigurationError` where it cannot be written.
    """
    check_target(json_to)
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[steps]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("seeds", total=seeds, steps="")

        def progress(totals: Totals) -> None:
            bar.update(task, completed=totals.seeds, steps=f"{totals.steps} steps")

        totals = run_seeds(first, seeds, size=size, processes=processes, progress=progress)
    seconds = time.monotonic() - started
    smallest = shrink(draw(totals.failed[0].seed, size)) if totals.failed else None
    write_json(as_json(totals, first, size, seconds, smallest), json_to)
    if json_to != "-":
        _show(totals, first, seconds)
        if totals.failed and smallest is not None:
            _show_failure(totals.failed[0], smallest, size)
    return not totals.failed


def check_scenario(path: str) -> bool:
    """Simulate the scenario in a JSON file, and show everything that happens; whether nothing was violated.

    Raises `ConfigurationError` where there is none in it.
    """
    try:
        scenario = msgspec.json.decode(Path(path).read_bytes(), type=Scenario)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"--scenario {path}: {error}") from None
    return show_scenario(scenario)


def show_scenario(scenario: Scenario) -> bool:
    """Simulate one scenario, and show everything that happens; whether nothing was violated."""
    log: list[str] = []
    result = simulate(scenario, log)
    print(text_of(scenario))
    print(*log, sep="\n")
    return not result.violations


def text_of(scenario: Scenario) -> str:
    """A scenario in words."""
    shape = scenario.shape
    lines = [
        f"seed {scenario.seed}: {shape.replicas} prefill replicas of tp {shape.prefill_tp} x pp {shape.prefill_pp}, "
        f"{shape.groups} decode groups of tp {shape.decode_tp}; components {', '.join(shape.parts)}; pages of "
        f"{shape.prefill_page} and {shape.decode_page} tokens; transports {', '.join(scenario.transports)}; aux by "
        f"{'fabric' if scenario.fabric_aux else 'control'}",
        *(f"  {request}" for request in sorted(scenario.requests, key=lambda request: request.at)),
        *(f"  {fault}" for fault in scenario.faults),
    ]
    return "\n".join(lines)


def as_json(totals: Totals, first: int, size: int, seconds: float, smallest: Scenario | None) -> dict[str, Any]:
    """The figures of a run."""
    return {
        "ok": not totals.failed,
        "first": first,
        "seeds": totals.seeds,
        "size": size,
        "steps": totals.steps,
        "seconds": round(seconds, 3),
        "faults": {kind: totals.faults[kind] for kind in KINDS},
        "seen": dict(sorted(totals.seen.items())),
        "outcomes": dict(sorted(totals.outcomes.items())),
        "failed": [
            {"seed": result.seed, "violations": [violation._asdict() for violation in result.violations]}
            for result in totals.failed
        ],
        "smallest": msgspec.to_builtins(smallest),
    }


def _show(totals: Totals, first: int, seconds: float) -> None:
    console = Console()
    faults = Table("fault", "struck", title="Faults by kind")
    outcomes = Table("rooms", "count", title="Ends by side and reason")
    for table in (faults, outcomes):
        table.columns[1].justify = "right"
    for kind in KINDS:
        faults.add_row(kind, str(totals.faults[kind]))
    for kind, count in sorted(totals.seen.items()):
        faults.add_row(f"({kind})", str(count))
    for outcome, count in sorted(totals.outcomes.items()):
        outcomes.add_row(outcome, str(count))
    console.print(faults)
    console.print(outcomes)
    console.print(
        f"seeds {first} to {first + totals.seeds - 1}: {totals.seeds} worlds, {totals.steps} steps, "
        f"{sum(totals.faults.values())} faults, {sum(totals.outcomes.values())} rooms, {len(totals.failed)} worlds "
        f"with violations, in {seconds:.1f} s",
        highlight=False,
    )


def _show_failure(result: Result, smallest: Scenario, size: int) -> None:
    print(f"\nSEED {result.seed} FAILED:")
    for violation in result.violations[:5]:
        print(f"  {violation}")
    print("\nthe smallest scenario found that still fails:\n")
    show_scenario(smallest)
    again = f"kvbaton check faults --first {result.seed} --seeds 1" + (f" --size {size}" if size != 1 else "")
    print(f"\nrepeat this seed alone:\n  {again}")
    print("\nthe smallest scenario, for --scenario FILE:\n" + msgspec.json.encode(smallest).decode())
