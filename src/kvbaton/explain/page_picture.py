"""The bytes of one page as a picture: rows as grids of lines, each run in the colour that it has on both sides."""

from __future__ import annotations

from kvbaton.explain.drawing import COLOURS, picture, rectangle, text
from kvbaton.explain.page import PageView, Place
from kvbaton.explain.words import show_bytes, show_count

WIDTH = 960.0
SIDE = 440.0
MARGIN = 20.0
LINE = 14.0
LABEL = 22.0


def draw_page(view: PageView, name: str) -> str:
    """``view`` as the text of an SVG; ``name`` makes the ids in it."""
    body: list[str] = []
    bottoms = []
    sides = (
        ("source", MARGIN, view.source, view.source_rows),
        ("destination", WIDTH - MARGIN - SIDE, view.destination, view.destination_rows),
    )
    for side, x, place, rows in sides:
        y = 30.0
        body.append(text(x, 18, f"{side}: {place.what}", "bold"))
        for position, row in enumerate(rows):
            words = f"row {row}: {show_bytes(place.stride)}, {show_bytes(place.line)} to a line"
            body.append(text(x, y + 12, words, "faint"))
            body += _row(view, side, position, place, x, y + LABEL)
            y += LABEL + _lines(place) * LINE + 8
        bottoms.append(y)
    title = f"{view.component}: {show_count(len(view.runs), 'run')} between the first rows of the pair"
    left_out = f" {view.more:,} more runs between these rows are not drawn." if view.more else ""
    told = "Equal numbers and colours are equal bytes; gray bytes are not touched by this pair." + left_out
    body.append(text(MARGIN, max(bottoms) + 10, told, "faint"))
    listed = [
        f"{number}: {show_bytes(run.nbytes)} from row {view.source_rows[run.source[0]]} byte {run.source[1]} to row "
        f"{view.destination_rows[run.destination[0]]} byte {run.destination[1]}"
        for number, run in enumerate(view.runs[:20], 1)
    ]
    return picture(name, WIDTH, max(bottoms) + 24, title, f"{told} {'; '.join(listed)}.", body)


def _lines(place: Place) -> int:
    return -(-place.stride // place.line)


def _row(view: PageView, side: str, position: int, place: Place, x: float, y: float) -> list[str]:
    scale = SIDE / place.line
    body = []
    for index in range(_lines(place)):
        width = min(place.line, place.stride - index * place.line) * scale
        body.append(rectangle(x, y + index * LINE, width, LINE - 2, "rest"))
    for number, run in enumerate(view.runs, 1):
        where, byte = getattr(run, side)
        if where != position:
            continue
        source, destination = run.source, run.destination
        title = (
            f"run {number}, {run.nbytes:,} bytes: source row {view.source_rows[source[0]]} from byte {source[1]:,}, "
            f"destination row {view.destination_rows[destination[0]]} from byte {destination[1]:,}"
        )
        kind = f"run c{(number - 1) % len(COLOURS)}"
        begin, end = byte, byte + (run.read if side == "source" else run.nbytes)
        while begin < end:
            index, inside = divmod(begin, place.line)
            part = min(end - begin, place.line - inside)
            at, width = x + inside * scale, part * scale
            body.append(rectangle(at, y + index * LINE, width, LINE - 2, kind, title))
            if begin == byte and width >= 8 + 6.5 * len(str(number)):
                body.append(text(at + width / 2, y + index * LINE + 10, str(number), "number", "middle"))
            begin += part
    return body
