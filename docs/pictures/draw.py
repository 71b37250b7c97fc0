"""Draws the pictures of docs/layouts.md: ``python docs/pictures/draw.py`` writes them beside this file.

Every picture brings its own background and two sets of colours, so that it can be read on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

COLOURS = {
    # name: (fill, line) on a light page, then on a dark one.
    "a": ("#cfe4ff", "#4a8fdc", "#1c3d66", "#5a9de6"),
    "b": ("#ffe1b8", "#c98a1e", "#5c3d0d", "#d9a04a"),
    "c": ("#cdeccd", "#4b9e57", "#1f4a29", "#62b56e"),
    "d": ("#ead3f7", "#9a5cc0", "#44285a", "#b07fd4"),
    "empty": ("#f3f4f6", "#b5bcc4", "#1b2129", "#4a525c"),
    "ground": ("#ffffff", "#d0d7de", "#0d1117", "#3d444d"),
}
INK = ("#1f2328", "#e6edf3")
MUTED = ("#59636e", "#9da5ae")
FOUR = "abcd"


def style(dark: bool) -> str:
    """Give the rules of one of the two sets of colours."""
    at = 2 if dark else 0
    rules = [f".{name}{{fill:{each[at]};stroke:{each[at + 1]}}}" for name, each in COLOURS.items()]
    rules += [f".to-{name}{{fill:none;stroke:{each[at + 1]}}}" for name, each in COLOURS.items()]
    rules += [f"text{{fill:{INK[dark]}}}", f".muted{{fill:{MUTED[dark]}}}", f".line{{fill:none;stroke:{MUTED[dark]}}}"]
    return "".join(rules)


class Picture:
    """A drawing of ``width`` by ``height`` units; ``title`` and ``description`` are for those who cannot see it."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._head = (width, height, title, description)
        self._body: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, label: str = "") -> None:
        """Draw a rectangle with a word in the middle."""
        self._body.append(f'<rect class="{colour}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle")

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", muted: bool = False) -> None:
        """Write one line; ``y`` is its base line."""
        kind = ' class="muted"' if muted else ""
        self._body.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>')

    def link(self, x: float, y: float, x_to: float, y_to: float, colour: str) -> None:
        """Draw a curve from the lower edge of one box to the upper edge of another."""
        half = (y + y_to) / 2
        self._body.append(
            f'<path class="to-{colour}" d="M{x:g} {y:g}C{x:g} {half:g} {x_to:g} {half:g} {x_to:g} {y_to:g}"/>'
        )

    def measure(self, x: float, x_to: float, y: float, words: str) -> None:
        """Draw a bracket below a stretch of memory, and its length in words to the right of it."""
        self._body.append(f'<path class="line" d="M{x:g} {y - 5:g}V{y:g}H{x_to:g}V{y - 5:g}"/>')
        self.text(x_to + 8, y + 3, words, muted=True)

    def svg(self) -> str:
        """Give the whole file."""
        width, height, title, description = self._head
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            "<style>text{font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
            f"{style(False)}@media (prefers-color-scheme:dark){{{style(True)}}}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *self._body,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def page() -> Picture:
    """Draw one page in two orders."""
    picture = Picture(
        760,
        356,
        "One page in the orders NHD and HND",
        "A page of 4 tokens on a rank that holds heads 3, 4 and 5 of 6. In NHD the three heads of a token are "
        "neighbours: the stride of head is one cell, that of token three cells. In HND the four tokens of a head are "
        "neighbours: the stride of token is one cell, that of head four cells. The row stride is twelve cells in both.",
    )
    picture.text(20, 28, "A row: a page of 4 tokens, on a rank that holds heads 3, 4 and 5 of 6.")
    picture.text(
        20, 47, "Axis head: size 6, spans ((3, 3),). A cell is one head of one token: all of axis dim.", muted=True
    )
    cell, left = 46, 20
    for top, order, names in ((66, "NHD", ("head", "token")), (216, "HND", ("token", "head"))):
        picture.text(left, top + 14, f"{order}: [page, {names[1]}, {names[0]}, dim]")
        inner = 3 if order == "NHD" else 4
        for place in range(12):
            outer, inside = divmod(place, inner)
            token, head = (outer, inside) if order == "NHD" else (inside, outer)
            picture.box(left + place * cell, top + 24, cell, 32, FOUR[token], f"t{token} h{head + 3}")
        picture.box(left + 12 * cell, top + 24, 2 * cell, 32, "empty", "next row")
        picture.measure(left, left + cell, top + 72, f"stride of {names[0]}: 1 cell")
        picture.measure(left, left + inner * cell, top + 94, f"stride of {names[1]}: {inner} cells")
        picture.measure(left, left + 12 * cell, top + 116, "row_stride: 12 cells")
    return picture


def heads() -> Picture:
    """Draw replicated heads."""
    picture = Picture(
        760,
        214,
        "2 KV heads, from 2 prefill ranks to 8 decode ranks",
        "Prefill rank 0 holds head 0 and sends it to decode ranks 0 to 3; prefill rank 1 holds head 1 and sends it to "
        "decode ranks 4 to 7. The four ranks of a head have equal spans.",
    )
    picture.text(20, 28, "prefill, tp 2")
    picture.text(20, 200, "decode, tp 8: four ranks have the same span")
    for rank in range(2):
        x = 90 + rank * 380
        picture.box(x, 42, 200, 34, FOUR[rank], f"rank {rank}: head {rank}, spans (({rank}, 1),)")
        for other in range(4):
            number = 4 * rank + other
            x_to = 24 + number * 90
            picture.link(x + 40 + other * 40, 76, x_to + 41, 134, FOUR[rank])
            picture.box(x_to, 134, 82, 42, FOUR[rank])
            picture.text(x_to + 41, 151, f"rank {number}", anchor="middle")
            picture.text(x_to + 41, 168, f"(({rank}, 1),)", anchor="middle")
    return picture


def conv() -> Picture:
    """Draw the channels of a convolution state."""
    picture = Picture(
        760,
        250,
        "A convolution state on one rank and on two",
        "One rank holds 32 channels: q 0 to 7, k 8 to 15, v 16 to 31. Of two ranks each holds half of every block: "
        "rank 0 has q 0 to 3, k 8 to 11, v 16 to 23; rank 1 has q 4 to 7, k 12 to 15, v 24 to 31. In its memory a "
        "rank has its three pieces one after the other.",
    )
    unit, left = 22, 28
    picture.text(left, 28, "tp 1: channels 0 to 31, spans ((0, 32),)")
    blocks = (("q", 0, 8, "a"), ("k", 8, 8, "b"), ("v", 16, 16, "c"))
    for name, start, count, colour in blocks:
        for half in range(2):
            begin, size = start + half * count // 2, count // 2
            words = f"{name} {begin}-{begin + size - 1}"
            picture.box(left + begin * unit, 40, size * unit, 34, colour, words)
            x = left + half * 364 + (begin - half * count // 2 + (-start + start // 2)) * unit
            picture.link(left + (begin + size / 2) * unit, 74, x + size * unit / 2, 164, colour)
            picture.box(x, 164, size * unit, 34, colour, words)
    for rank in range(2):
        x = left + rank * 364
        picture.text(x, 219, f"tp 2, rank {rank}: 16 channels, spans")
        picture.text(x, 237, ("((0, 4), (8, 4), (16, 8))", "((4, 4), (12, 4), (24, 8))")[rank], muted=True)
    return picture


def pages() -> Picture:
    """Draw pages of two sizes."""
    picture = Picture(
        760,
        240,
        "100 tokens in pages of 16 and in pages of 64",
        "The source has 7 pages of 16 tokens, the last with 4 tokens in it; the destination has 2 pages of 64 tokens, "
        "the last with 36 tokens in it. Six units of 16 tokens and 4 single tokens move. The other 28 places of the "
        "last destination page are not written.",
    )
    unit, left, edge = 5.6, 22, 16
    picture.text(left, 28, "source: pages of 16 tokens, rows 7 0 3 8 2 5 1")
    picture.text(738, 28, "6 units of 16 tokens move, and 4 single tokens", anchor="end", muted=True)
    for number, row in enumerate((7, 0, 3, 8, 2, 5, 1)):
        x, colour = left + number * edge * unit, FOUR[number // 4]
        count = 4 if number == 6 else edge
        picture.box(x, 40, edge * unit, 36, "empty")
        picture.box(x, 40, count * unit, 36, colour, f"row {row}" if count == edge else "4")
        picture.box(x, 130, count * unit, 36, colour, str(count))
        picture.link(x + count * unit / 2, 76, x + count * unit / 2, 130, colour)
    picture.text(left + 106 * unit, 63, "row 1", anchor="middle", muted=True)
    picture.box(left + 100 * unit, 130, 28 * unit, 36, "empty", "28 not written")
    for x, words in ((left, "row 4: tokens 0 to 63"), (left + 64 * unit, "row 1: tokens 64 to 99")):
        picture.measure(x, x + 64 * unit - 6, 176, "")
        picture.text(x, 195, words, muted=True)
    picture.text(left, 223, "destination: pages of 64 tokens, rows 4 1")
    return picture


def dcp() -> Picture:
    """Draw tokens that ranks share one by one."""
    picture = Picture(
        760,
        226,
        "Token-interleaved ranks, from 4 to 1",
        "Of 12 tokens rank 0 holds 0, 4 and 8, rank 1 holds 1, 5 and 9, rank 2 holds 2, 6 and 10, rank 3 holds 3, 7 "
        "and 11, each densely. A single rank holds all of them in order: each source writes every fourth token.",
    )
    cell = 46
    for rank in range(4):
        x = 28 + rank * 182
        picture.text(x, 28, f"Ownership(1, 4, {rank})")
        for place in range(3):
            token = 4 * place + rank
            picture.link(x + (place + 0.5) * cell, 74, 104 + (token + 0.5) * cell, 152, FOUR[rank])
            picture.box(x + place * cell, 40, cell, 34, FOUR[rank], str(token))
            picture.box(104 + token * cell, 152, cell, 34, FOUR[rank], str(token))
    picture.text(104, 210, "one rank: Ownership(), every token")
    return picture


def ring() -> Picture:
    """Draw a ring and a linear window."""
    picture = Picture(
        760,
        266,
        "A window of 8 tokens in a ring and in pages",
        "Tokens 5 to 12 of a request of 13 tokens. In a ring of 2 rows of 4 places a token lies at its number modulo "
        "8: row 6 holds 8, 9, 10, 11 and row 3 holds 12, 5, 6, 7. In pages of 4 that begin at token 4 they lie in "
        "order, in three rows; the places of tokens 4, 13, 14 and 15 are not written.",
    )
    cell = 48
    picture.text(28, 28, "ring: Pages([6, 3], 0); page p lies in row p % 2, so token t at place t % 8")
    places = {}
    for place, token in enumerate((8, 9, 10, 11, 12, 5, 6, 7)):
        x = 140 + place * cell + (place // 4) * 24
        places[token] = x + cell / 2
        picture.box(x, 62, cell, 34, FOUR[token // 4 - 1], str(token))
    for row, x in ((6, 140), (3, 140 + 4 * cell + 24)):
        picture.text(x, 55, f"row {row}", muted=True)
    for place in range(12):
        token = place + 4
        x = 40 + place * cell + (place // 4) * 24
        inside = 5 <= token <= 12
        if inside:
            picture.link(places[token], 96, x + cell / 2, 172, FOUR[token // 4 - 1])
        picture.box(x, 172, cell, 34, FOUR[token // 4 - 1] if inside else "empty", str(token) if inside else "")
    for number, row in enumerate((2, 9, 0)):
        picture.text(40 + number * (4 * cell + 24), 224, f"row {row}", muted=True)
    picture.text(28, 250, "window in pages of 4: Pages([2, 9, 0], 4)")
    return picture


def stripes() -> Picture:
    """Draw replicas that share the work."""
    picture = Picture(
        760,
        268,
        "Stripes over 4 replicas",
        "Four source ranks all hold the same 8 pages. Rank 0 sends pages 0 and 4, rank 1 pages 1 and 5, rank 2 pages 2 "
        "and 6, rank 3 pages 3 and 7. The destination gets every page once.",
    )
    cell, left = 66, 180
    picture.text(28, 28, "All four source ranks hold all pages; each sends the coloured ones.")
    for rank in range(4):
        y = 44 + rank * 38
        picture.text(28, y + 20, f"source rank {rank}")
        for number in range(8):
            mine = number % 4 == rank
            picture.box(
                left + number * cell, y, cell - 6, 30, FOUR[rank] if mine else "empty", f"page {number}" if mine else ""
            )
    y = 212
    picture.text(28, y + 20, "destination")
    for number in range(8):
        picture.box(left + number * cell, y, cell - 6, 30, FOUR[number % 4], f"page {number}")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "page": page,
    "heads": heads,
    "conv": conv,
    "pages": pages,
    "dcp": dcp,
    "ring": ring,
    "stripes": stripes,
}


def main() -> None:
    """Write all pictures."""
    for name, make in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(make().svg())


if __name__ == "__main__":
    main()
