"""All figures that have a target, from the files of one `make bench`, as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigurationError

FILES = ("transfer", "slices", "latency", "handover", "rooms", "fabrics", "digest")
"""In the order of the table."""


def summarise(folder: Path) -> str:
    """The table, with the machine above it. Raises `ConfigurationError` if the folder has none of `FILES`."""
    read = {name: _read(folder / f"{name}.json") for name in FILES if (folder / f"{name}.json").exists()}
    if not read:
        raise ConfigurationError(f"{folder} has none of {', '.join(f'{name}.json' for name in FILES)}: run make bench")
    machine = next(iter(read.values()))["machine"]
    loads = ", ".join(f"{name} {each['machine']['load']}" for name, each in read.items())
    figures = [figure for each in read.values() for figure in each["results"] if figure["target"] is not None]
    counted = {verdict: sum(figure["met"] is verdict for figure in figures) for verdict in (True, False, None)}
    return "\n".join(
        [
            f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, {machine['system']}. "
            f"Load at the end of each: {loads}.",
            "",
            *_table(figures),
            "",
            f"{counted[True]} met, {counted[False]} missed, {counted[None]} without their peer.",
        ]
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} holds no figures: {error}") from error


def _table(figures: Iterable[dict[str, Any]]) -> list[str]:
    lines = ["| what | value | against | ratio | target | |", "| --- | --- | --- | --- | --- | --- |"]
    verdicts = {True: "met", False: "**missed**", None: "not here"}
    for figure in figures:
        value = "" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}"
        ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.3g}"
        cells = (figure["name"], value, figure["peer"], ratio, f"{figure['target']:g} {figure['target_unit']}")
        lines.append(f"| {' | '.join(cells)} | {verdicts[figure['met']]} |")
    return lines
