"""What a check of transports says: how each went, then what was broken, what was skipped, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from kvbaton.check.report import check_target, write_json
from kvbaton.check.transports import Run, run, subject_of, subjects, why_not


def check_transports(
    only: Sequence[str],
    checks: Sequence[str],
    options: Mapping[str, str],
    factory: str = "",
    timeout: float = 20.0,
    json_to: str = "",
) -> bool:
    """Check the transports and say what came out; whether no promise was broken and all that was asked for ran.

    ``only``, ``checks`` and ``options`` are as for `kvbaton.check.transports`; ``factory`` names one more transport,
    and alone only that one. ``json_to`` is the file for the results, or ``-`` for standard output and nothing else
    there. Raises `ConfigurationError` for a name that there is not, for an option that one of the transports does not
    take, and where the file cannot be written: all before the first check.
    """
    check_target(json_to)
    chosen = [subject_of(factory)] if factory else []
    if only or not factory:
        chosen += subjects(only, options)
    console = Console(stderr=True)
    missing = [why_not(subject) for subject in chosen]
    runs = []
    for subject, reason in zip(chosen, missing, strict=True):
        if reason:
            runs.append(Run(subject.name, "unavailable", reason))
            continue
        with console.status(subject.name) as status:

            def progress(check: str, name: str = subject.name) -> None:
                status.update(f"{name}: {check}")

            runs.append(run(subject, checks, timeout, progress))
    if json_to:
        write_json(msgspec.to_builtins(runs), json_to)
    if json_to != "-":
        _show(runs)
    return not any(one.broken for one in runs) and not (only and any(one.status != "ran" for one in runs))


def _show(runs: Sequence[Run]) -> None:
    console = Console()
    table = Table("transport", "kept", "broken", "skipped", "seconds")
    for one in runs:
        if one.status == "ran":
            counts = (str(one.count(status)) for status in ("kept", "broken", "skipped"))
            table.add_row(one.transport, *counts, f"{one.seconds:.1f}")
        else:
            table.add_row(one.transport, "-", "-", "-", "-")
    console.print(table)
    for one in runs:
        if one.status != "ran":
            console.print(f"{one.transport}: did not run: {one.reason}", markup=False, highlight=False, soft_wrap=True)
        for outcome in one.outcomes:
            if outcome.status != "kept":
                text = f"{one.transport}: {outcome.check} {outcome.status}: {outcome.reason}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
