"""Figures in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbaton.explain.result import Explanation, Flow, PartInfo, Runs
from kvbaton.topology.layers import show_layers


def show_bytes(nbytes: int) -> str:
    """``nbytes`` in the unit that suits it: 512 B, 1.5 KiB, 96.0 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            break
    return f"{value:,.1f} {unit}"


def show_runs(runs: Runs) -> str:
    """The lengths of runs: one figure where they are alike, else shortest, median and longest."""
    if not runs.pieces:
        return "-"
    if runs.shortest == runs.longest:
        return show_bytes(runs.median)
    shown = [show_bytes(length).split() for length in (runs.shortest, runs.median, runs.longest)]
    if len({unit for _, unit in shown}) == 1:
        return f"{'/'.join(figure for figure, _ in shown)} {shown[0][1]}"
    return " / ".join(" ".join(words) for words in shown)


def show_spans(spans: Sequence[tuple[int, int]]) -> str:
    """``(start, count)`` spans as ranges of indices."""
    parts = [str(start) if count == 1 else f"{start}-{start + count - 1}" for start, count in spans]
    return ", ".join(parts if len(parts) <= 4 else [*parts[:3], f"... ({len(parts)} spans)"])


def show_part_layers(part: PartInfo) -> str:
    """The layers of one part."""
    return _few_layers(part.layers)


def show_block(part: PartInfo) -> str:
    """The roles of one part, and the axes of which it is not all."""
    axes = [
        f"{axis} {show_spans(spans)} of {part.sizes[axis]}"
        for axis, spans in part.block.items()
        if spans != ((0, part.sizes[axis]),)
    ]
    return f"{', '.join(part.roles)}: {'; '.join(axes) or 'all'}"


def show_tokens(flow: Flow) -> str:
    """The tokens of a flow: its range, and which stripe of it where it is not all."""
    if flow.first == flow.last:
        return "the state" if flow.nbytes else "none"
    stripes = {(part.unit, part.modulus, part.remainders) for part in flow.parts}
    text = f"{flow.first}..{flow.last}"
    if len(stripes) != 1:
        return f"{text}, in stripes"
    unit, modulus, remainders = stripes.pop()
    return text if modulus == 1 else f"{text}, {len(remainders)}/{modulus} in units of {unit}"


def show_count(number: int, noun: str) -> str:
    """``number`` and ``noun``, with an s where there is not one of it."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


CAST_COLUMNS = ("component", "roles", "layers", "from", "to", "bound of the error")
"""Columns of the table of casts."""


def cast_rows(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    """The lines of the table of casts."""
    for entry in explanation.components:
        for cast in entry.casts:
            layers = _few_layers(cast.layers)
            yield entry.name, ", ".join(cast.roles), layers, cast.source, cast.destination, cast.bound


def _few_layers(layers: tuple[int, ...]) -> str:
    shown = show_layers(layers)
    return shown if len(shown) <= 22 else f"{len(layers)} of {layers[0]}-{layers[-1]}"
