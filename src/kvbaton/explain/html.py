"""An explanation as one page that needs nothing else: picture, tables, and the bytes of one pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from kvbaton.explain.groups import alike_pairs, alike_ranks, alike_refusals, pair_name, some
from kvbaton.explain.page import PageView
from kvbaton.explain.page_picture import draw_page
from kvbaton.explain.result import Explanation, Side
from kvbaton.explain.ribbons import draw
from kvbaton.explain.sentences import sentences
from kvbaton.explain.words import (
    CAST_COLUMNS,
    cast_rows,
    show_block,
    show_bytes,
    show_part_layers,
    show_runs,
    show_tokens,
)

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#d0d7de;--bad:#cf222e}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;--bad:#ff7b72}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1000px;margin:2em auto;
padding:0 1em}h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.3em .6em;border-bottom:1px solid var(--line)}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}caption{text-align:left;opacity:.75}
figure{margin:1em 0;overflow-x:auto}.bad{color:var(--bad);font-weight:600}
"""
_NUMBERS = frozenset({"bytes", "pieces", "each moves", "peers"})


def draw_html(explanation: Explanation, views: Sequence[PageView] = (), pair: str = "") -> str:
    """The page as text. ``views`` are the pages of the pair that ``pair`` names."""
    head = f"{explanation.source.title} → {explanation.destination.title}"
    body = [f"<h1>{escape(head)}</h1>"]
    for sentence in sentences(explanation):
        kind = ' class="bad"' if sentence.startswith("REFUSED") else ""
        body.append(f"<p{kind}>{escape(sentence[:1].upper() + sentence[1:])}.</p>")
    body.append(f"<figure>{draw(explanation)}</figure>")
    if explanation.refused:
        body.append(_refusals(explanation))
    if explanation.components:
        body.append(_components(explanation))
        if any(entry.casts for entry in explanation.components):
            told = "Each element is cast once, by the rank that reads it."
            body.append(_table("Casts", CAST_COLUMNS, cast_rows(explanation), told))
    if explanation.pairs:
        body.append(_pairs(explanation))
        body.append(_ranks("Sources", explanation.source))
        body.append(_ranks("Destinations", explanation.destination))
    if views:
        body.append(f"<h2>Bytes of {escape(pair)}</h2>")
    for index, view in enumerate(views):
        body.append(f"<h3>{escape(view.component)}</h3><figure>{draw_page(view, f'page-{index}')}</figure>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{escape(head)}</title><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    kinds = [' class="n"' if column in _NUMBERS else "" for column in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{escape(cell).replace(chr(10), '<br>')}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<h2>{title}</h2><table>{told}<thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>"


def _components(explanation: Explanation) -> str:
    rows = (
        (
            entry.name,
            entry.kind,
            show_bytes(entry.nbytes),
            f"{entry.runs.pieces:,}",
            show_runs(entry.runs),
            f"{entry.source_copies:g} → {entry.destination_copies:g}",
        )
        for entry in explanation.components
    )
    caption = "Run: bytes (shortest / median / longest). Held by: how many ranks of each side hold an element."
    return _table("Components", ("component", "kind", "bytes", "pieces", "run", "held by"), rows, caption)


def _pairs(explanation: Explanation) -> str:
    rows = []
    for group in alike_pairs(explanation.pairs):
        names = [pair_name(explanation, pair.source, pair.destination) for pair in group.pairs]
        title = names[0] if len(names) == 1 else f"{len(names)} pairs: {some(names, 8)}"
        head = (title, group.first.executor)
        for flow in group.first.flows:
            figures = (show_tokens(flow), show_bytes(flow.nbytes), f"{flow.runs.pieces:,}", show_runs(flow.runs))
            for position, part in enumerate(flow.parts):
                name, shown = (flow.component, figures) if position == 0 else ("", ("",) * len(figures))
                rows.append((*head, name, show_part_layers(part), show_block(part), *shown))
                head = ("", "")
    columns = ("pair", "way", "component", "layers", "holds", "tokens", "bytes", "pieces", "run")
    return _table("Pairs", columns, rows, "Pairs that are alike share a line; indices are those of the first.")


def _ranks(title: str, side: Side) -> str:
    rows = (
        (
            some([rank.label for rank in group], 16),
            show_bytes(group[0].nbytes),
            f"{group[0].pieces:,}",
            str(group[0].peers),
        )
        for group in alike_ranks(side.ranks)
    )
    return _table(title, ("ranks", "each moves", "pieces", "peers"), rows)


def _refusals(explanation: Explanation) -> str:
    rows = (
        (
            some([pair_name(explanation, refusal.source, refusal.destination) for refusal in group], 8),
            f"{group[0].error}: {group[0].reason}",
        )
        for group in alike_refusals(explanation.refusals)
    )
    return _table("Refused", ("pair", "why"), rows)
