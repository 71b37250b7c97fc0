"""How benchmarks report: one table on the terminal, one JSON file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LOG_COLUMNS = 170


@dataclass(frozen=True)
class Figure:
    """One measured value. ``ratio`` is ``value`` over the value of ``peer``, measured in the same run.

    ``target`` is in ``target_unit``: a bound of the ratio, unless the unit says otherwise. ``value`` and ``ratio`` are
    None where somebody was not there to be measured; ``note`` says why then.
    """

    name: str
    value: float | None
    unit: str
    peer: str = ""
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    target_unit: str = "x"
    note: str = ""


def at_least(name: str, value: float, unit: str, peer: str, of_peer: float, target: float | None) -> Figure:
    """More is better: met if ``value`` is at least ``target`` times that of the peer."""
    ratio = value / of_peer
    return Figure(name, value, unit, peer, ratio, target, None if target is None else ratio >= target)


def at_most(name: str, value: float, unit: str, peer: str, of_peer: float, target: float | None) -> Figure:
    """Less is better: met if ``value`` is at most ``target`` times that of the peer."""
    ratio = value / of_peer
    return Figure(name, value, unit, peer, ratio, target, None if target is None else ratio <= target)


def absent(
    name: str, unit: str, peer: str, why: str, target: float | None = None, value: float | None = None
) -> Figure:
    """A row whose ``peer`` is not here, or (without a peer) that has no value. Its target is neither met nor missed."""
    return Figure(name, value, unit, peer, None, target, None, "x", f"{peer or name} is not here: {why}")


def write_report(figures: Sequence[Figure], path: Path) -> None:
    """Print the figures as a table and write them to ``path`` as JSON, with the machine they were measured on."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", "against", "ratio", "target")
    for figure in figures:
        value = "not here" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        ratio = f"{figure.ratio:.3g} x" if figure.ratio is not None else "not here" if figure.note else ""
        verdict = "" if figure.met is None else (" met" if figure.met else " missed")
        target = "" if figure.target is None else f"{figure.target:g} {figure.target_unit}{verdict}"
        table.add_row(figure.name, value, figure.peer, ratio, target)
    # A log has no width of its own; 80 columns would break every row.
    Console(width=None if sys.stdout.isatty() else LOG_COLUMNS).print(table)
    for note in dict.fromkeys(figure.note for figure in figures if figure.note):
        print(note)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine(), "results": [asdict(figure) for figure in figures]}, indent=1) + "\n"
    )
    print(f"written to {path}")


def machine() -> dict[str, object]:
    """What the figures were measured on. ``load`` is that of the last minute, at the end of the run."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
