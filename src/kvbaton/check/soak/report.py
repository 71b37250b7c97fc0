"""What a soak says: progress while it runs, then the figures, then every promise that was broken."""

from __future__ import annotations

import secrets
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvbaton.check.report import check_target, write_json
from kvbaton.check.soak.supervisor import Soak
from kvbaton.check.soak.tally import Tally

SHOWN = 25
"""Lines of each list that are shown."""


def check_soak(
    seconds: float,
    transports: Sequence[str],
    seed: int | None,
    *,
    load: int = 8,
    json_to: str = "",
    logs: str = "",
) -> bool:
    """Soak, and say what came out; whether no promise was broken.

    ``logs`` is the folder for the processes' logs; they are thrown away where none is named.
    Raises `ConfigurationError` where the file for the figures cannot be written.
    """
    check_target(json_to)
    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        where = Path(logs or folder)
        where.mkdir(parents=True, exist_ok=True)

        def progress(tally: Tally, passed: float) -> None:
            status.update(
                f"{passed:.0f} of {seconds:g} s: {tally.rooms} rooms, {tally.succeeded} succeeded, {tally.failed} "
                f"failed, {tally.faults.total()} faults, {len(tally.broken())} broken promises"
            )

        soak = Soak(transports, chosen, where, load=load, progress=progress)
        tally = soak.run(seconds)
    figures = {"seconds": seconds, "seed": chosen, "transports": list(transports), **vars(tally)}
    figures["memory_kibibytes"] = soak.memory()
    figures["broken"] = tally.broken()
    if json_to:
        write_json(figures, json_to)
    if json_to != "-":
        _show(tally, soak, seconds, chosen)
    return not tally.broken()


def check_served_soak(
    seconds: float, transports: Sequence[str], seed: int | None, *, json_to: str = "", logs: str = ""
) -> bool:
    """Soak the demo servers behind the real router, and say what came out; whether no promise was broken.

    Raises `ConfigurationError` as `check_soak` does.
    """
    from kvbaton.check.soak.requests import Requests
    from kvbaton.check.soak.serving import ServedSoak

    check_target(json_to)
    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("starting") as status:

        def progress(requests: Requests, faults: Counter[str], passed: float) -> None:
            status.update(
                f"{passed:.0f} of {seconds:g} s: {requests.asked} requests, {requests.right} right, "
                f"{requests.errors.total()} errors, {faults.total()} faults, {len(requests.broken)} broken promises"
            )

        where = Path(logs or folder)
        figures = ServedSoak(transports, chosen, where, progress=progress).run(seconds)
    requests = figures.requests
    said = {"seconds": seconds, "seed": chosen, "transports": list(transports), **vars(requests)}
    said |= {"faults": figures.faults, "broken": figures.broken}
    if json_to:
        write_json(said, json_to)
    if json_to != "-":
        console = Console()
        table = Table("what", "count", title=f"servers, {seconds:g} s, seed {chosen}")
        for name, count in (
            ("requests", requests.asked),
            ("answered right", requests.right),
            ("answered with a clean error", requests.errors.total()),
            ("left by their client", requests.left),
            ("broken promises", len(figures.broken)),
            ("slowest answer, seconds", round(requests.slowest_seconds, 1)),
        ):
            table.add_row(name, str(count))
        console.print(table)
        _list(console, "faults", figures.faults)
        _list(console, "errors", requests.errors)
        for line in figures.broken[: 2 * SHOWN]:
            console.print(f"BROKEN {line}", markup=False, highlight=False, soft_wrap=True)
    return not figures.broken


def _show(tally: Tally, soak: Soak, seconds: float, seed: int) -> None:
    console = Console()
    table = Table("what", "count", title=f"{seconds:g} s, seed {seed}")
    table.add_row("rooms", str(tally.rooms))
    table.add_row("succeeded", str(tally.succeeded))
    table.add_row("failed, with a reason", str(tally.failed - tally.unnamed))
    table.add_row("gone with their process", str(tally.lost_with_their_process))
    for name in ("wrong", "hangs", "leaks", "ended", "not_recovered", "growth"):
        table.add_row(name.replace("_", " "), str(len(getattr(tally, name))))
    console.print(table)
    _list(console, "faults", tally.faults)
    _list(console, "why rooms failed, as decode saw it", tally.reasons)
    _list(console, "why rooms failed, as prefill saw it", tally.prefill_reasons)
    _list(console, "errors logged", tally.logged)
    for name, sizes in soak.memory().items():
        console.print(f"KiB of {name}: {' '.join(map(str, sizes))}", highlight=False, soft_wrap=True)
    for line in tally.broken()[: 2 * SHOWN]:
        console.print(f"BROKEN {line}", markup=False, highlight=False, soft_wrap=True)


def _list(console: Console, title: str, counts: Counter[str]) -> None:
    if counts:
        console.print(f"{title}:")
    for what, count in counts.most_common(SHOWN):
        console.print(f"{count:8} {what}", markup=False, highlight=False, soft_wrap=True)
