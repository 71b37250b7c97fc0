"""An explanation as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbaton.explain.groups import alike_pairs, alike_ranks, alike_refusals, pair_name, some
from kvbaton.explain.result import Explanation, Side
from kvbaton.explain.sentences import sentences
from kvbaton.explain.words import (
    CAST_COLUMNS,
    cast_rows,
    show_block,
    show_bytes,
    show_count,
    show_part_layers,
    show_runs,
    show_tokens,
)

MOST_PARTS = 3
"""Parts of a flow that are listed."""


def print_tables(explanation: Explanation, console: Console) -> None:
    """Print what ``explanation`` says. Pairs and ranks that are alike share a line."""
    for sentence in sentences(explanation):
        console.print(escape(sentence), highlight=False)
    if explanation.components:
        _show(_components(explanation), console)
        if any(entry.casts for entry in explanation.components):
            _show(_casts(explanation), console)
    if explanation.pairs:
        for table in _pairs(explanation):
            _show(table, console)
        _show(_ranks("Sources", "sends", explanation.source), console)
        _show(_ranks("Destinations", "receives", explanation.destination), console)
    if explanation.refused:
        _show(_refusals(explanation), console)


def _show(table: Table, console: Console) -> None:
    console.print()
    console.print(table)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _components(explanation: Explanation) -> Table:
    columns = ("component", "kind", "bytes", "pieces", "run", "held by")
    table = _table("Components", *columns, right=("bytes", "pieces"))
    for entry in explanation.components:
        held = f"{entry.source_copies:g} → {entry.destination_copies:g}"
        row = (entry.name, entry.kind, show_bytes(entry.nbytes), f"{entry.runs.pieces:,}", show_runs(entry.runs), held)
        table.add_row(*map(escape, row))
    table.caption = "held by: how many ranks of each side hold an element; run: bytes (shortest / median / longest)"
    table.caption_justify = "left"
    return table


def _casts(explanation: Explanation) -> Table:
    table = _table("Casts", *CAST_COLUMNS)
    for row in cast_rows(explanation):
        table.add_row(*map(escape, row))
    table.caption = "each element is cast once, by the rank that reads it"
    table.caption_justify = "left"
    return table


def _pairs(explanation: Explanation) -> Iterator[Table]:
    for group in alike_pairs(explanation.pairs):
        names = [pair_name(explanation, pair.source, pair.destination) for pair in group.pairs]
        first = group.first
        title = f"{some(names)}: {show_bytes(first.nbytes)}{' each' if len(names) > 1 else ''}, {first.executor}"
        columns = ("component", "layers", "holds", "tokens", "bytes", "pieces", "run")
        table = _table(escape(title), *columns, right=("bytes", "pieces"))
        for flow in first.flows:
            figures = (show_tokens(flow), show_bytes(flow.nbytes), f"{flow.runs.pieces:,}", show_runs(flow.runs))
            for position, part in enumerate(flow.parts[:MOST_PARTS]):
                name, shown = (flow.component, figures) if position == 0 else ("", ("",) * len(figures))
                table.add_row(escape(name), show_part_layers(part), escape(show_block(part)), *shown)
            if len(flow.parts) > MOST_PARTS:
                table.add_row("", "", f"and {len(flow.parts) - MOST_PARTS} more")
        if len(names) > 1:
            table.caption = f"{len(names)} pairs that are alike; indices are those of {escape(names[0])}"
            table.caption_justify = "left"
        yield table


def _ranks(title: str, verb: str, side: Side) -> Table:
    table = _table(title, "ranks", f"each {verb}", "pieces", "peers", right=(f"each {verb}", "pieces", "peers"))
    for group in alike_ranks(side.ranks):
        names = some([rank.label for rank in group], 8)
        names = names if len(group) == 1 else f"{show_count(len(group), 'rank')}: {names}"
        table.add_row(escape(names), show_bytes(group[0].nbytes), f"{group[0].pieces:,}", str(group[0].peers))
    return table


def _refusals(explanation: Explanation) -> Table:
    table = _table("Refused", "pair", "why")
    for group in alike_refusals(explanation.refusals):
        names = [pair_name(explanation, refusal.source, refusal.destination) for refusal in group]
        title = some(names) if len(names) == 1 else f"{show_count(len(names), 'pair')}: {some(names)}"
        table.add_row(escape(title), escape(f"{group[0].error}: {group[0].reason}"))
    return table
