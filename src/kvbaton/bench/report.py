"""How benchmarks report: one table on the terminal, one JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measured value. ``ratio`` is ``value`` over the value of ``peer``, measured in the same run.

    ``target`` is in ``target_unit``: a bound of the ratio, unless the unit says otherwise.
    """

    name: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    target_unit: str = "x"


def write_report(figures: Sequence[Figure], path: Path) -> None:
    """Print the figures as a table and write them to ``path`` as JSON, with the machine they were measured on."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", "against", "ratio", "target")
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3g} x"
        verdict = "" if figure.met is None else (" met" if figure.met else " missed")
        target = "" if figure.target is None else f"{figure.target:g} {figure.target_unit}{verdict}"
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}", figure.peer, ratio, target)
    Console().print(table)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine, "results": [asdict(figure) for figure in figures]}, indent=1) + "\n"
    )
    print(f"written to {path}")
