"""Draws throughput against the size of pieces, one line for each contender, both axes logarithmic, as SVG."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvbaton.bench.transfer import size_words
from kvbaton.errors import ConfigurationError

WIDTH, HEIGHT = 900, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 270, 30, 55
COLOURS = {
    "kvbaton over shm": "#0b6e4f",
    "kvbaton over tcp": "#3a86c8",
    "NIXL over shared memory": "#c1440e",
    "NIXL over tcp": "#e59866",
    "NIXL over tcp, 4 MiB socket buffers": "#d4a017",
    "Mooncake over tcp": "#8e44ad",
    "ours": "#0b6e4f",
    "NIXL": "#c1440e",
    "cudaMemcpyBatchAsync": "#3a86c8",
    "torch indexing": "#8e44ad",
}
FLOOR_COLOUR = "#888888"
_NAME = re.compile(r"(?P<who>.+): (?P<size>\d+) (?P<unit>B|KiB|MiB) pieces(, shuffled)?, \d+ MiB")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


class Line(NamedTuple):
    """One contender: ``(bytes of a piece, GiB/s)``, by size."""

    name: str
    points: tuple[tuple[int, float], ...]


def draw_file(figures: Path, picture: Path) -> None:
    """Draw what `bench transfer` or `bench gpu` wrote. Raises `ConfigurationError` if nothing in it can be drawn."""
    try:
        results = json.loads(figures.read_text())["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{figures} holds no figures of `kvbaton bench transfer`: {error}") from error
    lines = lines_of(results)
    if not lines:
        raise ConfigurationError(f"{figures} holds no throughput of a contender; run `kvbaton bench transfer`")
    picture.parent.mkdir(parents=True, exist_ok=True)
    unit = next((str(each["unit"]) for each in results if each.get("unit")), "GiB/s")
    picture.write_text(draw(lines, unit))
    print(f"written to {picture}")


def lines_of(results: Sequence[dict[str, object]]) -> list[Line]:
    """The lines in the figures: those that speak of one contender alone."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        match = _NAME.fullmatch(str(result["name"]))
        if match is None or result["value"] is None:
            continue
        who = match["who"]
        name = f"kvbaton over {who}" if who in ("shm", "tcp") else who
        size = int(match["size"]) * _UNITS[match["unit"]]
        points.setdefault(name, []).append((size, float(str(result["value"]))))
    return [Line(name, tuple(sorted(each))) for name, each in points.items()]


def draw(lines: Sequence[Line], unit: str = "GiB/s") -> str:
    """The picture; ``unit`` is that of all rates."""
    sizes = sorted({size for line in lines for size, _ in line.points})
    rates = [rate for line in lines for _, rate in line.points]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    span = max(1.0, math.log2(sizes[-1] / sizes[0]))

    def across(size: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(size / sizes[0]) / span

    def up(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(rate) - low) / max(1, high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Throughput by size of pieces</title>",
        f"<desc>{escape(_in_words(lines, unit))}</desc>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for power in range(low, high + 1):
        at = up(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for size in sizes:
        at = across(size)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size_words(size)}</text>')
    parts.append(f'<text x="{LEFT}" y="18">{unit}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">size of a piece</text>')
    labels: list[float] = []
    for line in sorted(lines, key=lambda each: -each.points[-1][1]):
        colour = COLOURS.get(line.name, FLOOR_COLOUR)
        dashes = "" if line.name in COLOURS else ' stroke-dasharray="5 4"'
        drawn = " ".join(f"{across(size):.1f},{up(rate):.1f}" for size, rate in line.points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [
            f'<circle cx="{across(size):.1f}" cy="{up(rate):.1f}" r="3" fill="{colour}"/>' for size, rate in line.points
        ]
        # Labels stand where their lines end, but never on each other.
        at = max(up(line.points[-1][1]) + 4, labels[-1] + 15 if labels else 0.0)
        labels.append(at)
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{at:.1f}" fill="{colour}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _in_words(lines: Sequence[Line], unit: str) -> str:
    """What the picture shows, for those who cannot see it."""
    told = (
        f"{line.name}: " + ", ".join(f"{rate:.3g} {unit} at {size_words(size)}" for size, rate in line.points)
        for line in lines
    )
    return "Two processes of one machine, both axes logarithmic. " + "; ".join(told) + "."
