"""What a search says: progress, a table of the worlds, the way to a broken promise, and all of it as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvbaton.check.report import check_target, write_json
from kvbaton.check.search.bounds import SHORT, WORLDS, Bounds
from kvbaton.check.search.explore import Result, Trace, replay, search, shortest
from kvbaton.check.search.words import describe
from kvbaton.check.search.world import World
from kvbaton.errors import ConfigurationError


def check_search(names: Sequence[str] = SHORT, json_to: str = "") -> bool:
    """Search the worlds of those names and say what came out; whether every promise was kept.

    ``json_to`` is the file for the figures, or ``-`` for standard output and nothing else there. Raises
    `ConfigurationError` for a world that there is not, and where the file cannot be written.
    """
    check_target(json_to)
    worlds = {name: _bounds(name) for name in names}
    console = Console(stderr=True)
    figures = []
    told = []
    for name, bounds in worlds.items():
        started = time.monotonic()
        world = World(bounds)
        with console.status(name) as status:

            def progress(states: int, transitions: int, name: str = name) -> None:
                status.update(f"{name}: {states} states, {transitions} transitions")

            result = search(world, progress)
        trace = (shortest(world) or result.trace) if result.trace else None
        figures.append(_figures(name, bounds, result, trace, time.monotonic() - started))
        if trace is not None:
            told.append(trace_text(name, world, trace))
    write_json({"ok": not told, "worlds": figures}, json_to)
    if json_to != "-":
        _show(figures)
        for text in told:
            print(f"\n{text}")
    return not told


def show_replay(name: str, choices: str) -> bool:
    """Say what happens in a world when it goes the way that ``choices`` names; whether every promise was kept.

    Raises `ConfigurationError` for a world or a way that there is not.
    """
    world = World(_bounds(name))
    try:
        way = tuple(int(choice) for choice in choices.split("."))
        steps = replay(world, way)
    except (ValueError, IndexError):
        raise ConfigurationError(f"--replay {choices}: no such way in the world {name}") from None
    problem = steps[-1].problem
    if not problem and not world.steps(steps[-1].state):
        problem = world.problem_at_rest(steps[-1].state)
    print(trace_text(name, world, Trace(way, problem)))
    return not problem


def trace_text(name: str, world: World, trace: Trace) -> str:
    """A way through a world, one line an event, what it broke, and how to go it again."""
    steps = replay(world, trace.choices)
    lines = [f"{number:3}  {describe(step.label, world.bounds)}" for number, step in enumerate(steps, 1)]
    choices = ".".join(str(choice) for choice in trace.choices)
    broken = f"     BROKEN: {trace.problem}" if trace.problem else "     every promise was kept"
    return "\n".join(
        [
            f"world {name}, {len(steps)} events:",
            *lines,
            broken,
            "",
            "go this way again:",
            f"  kvbaton check search --world {name} --replay {choices}",
        ]
    )


def _bounds(name: str) -> Bounds:
    if name not in WORLDS:
        raise ConfigurationError(f"--world {name}: there is no such world; there are {', '.join(WORLDS)}")
    return WORLDS[name]


def _figures(name: str, bounds: Bounds, result: Result, trace: Trace | None, seconds: float) -> dict[str, Any]:
    counts = {key: value for key, value in msgspec.to_builtins(result).items() if key != "trace"}
    return {
        "world": name,
        "bounds": msgspec.to_builtins(bounds),
        **counts,
        "seconds": round(seconds, 1),
        "broken": "" if trace is None else trace.problem,
        "replay": "" if trace is None else ".".join(str(choice) for choice in trace.choices),
    }


def _show(figures: Sequence[dict[str, Any]]) -> None:
    table = Table("world", "states", "transitions", "longest run", "states of cores", "seconds", "promises")
    for one in figures:
        counts = (f"{one[key]:,}" for key in ("states", "transitions", "longest", "core_states"))
        table.add_row(one["world"], *counts, f"{one['seconds']:.1f}", "BROKEN" if one["broken"] else "kept")
    for column in table.columns[1:-1]:
        column.justify = "right"
    Console().print(table)
