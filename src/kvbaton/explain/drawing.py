"""What the pictures share: colours that hold in light and dark, and elements of SVG with escaped text."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"),
    *("#b5a800", "#7f7f7f", "#5b4bb5", "#8b5e3c", "#2aa5a0", "#a2336b"),
)
"""Told apart by most eyes, on white and on near black."""

STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f24}"
    ".bold{font-weight:600}.faint{fill:#57606a}"
    ".card{fill:#f6f8fa;stroke:#8c959f}.refused{stroke:#cf222e;stroke-dasharray:5 3;fill:none}"
    ".idle{stroke-dasharray:2 3}.flow{fill-opacity:.62}.flow:hover,.run:hover{fill-opacity:1}"
    ".rest{fill:#eaeef2;stroke:#8c959f;stroke-width:.5}.run{fill-opacity:.8;stroke:#ffffff;stroke-width:.4}"
    + "".join(f".c{index}{{fill:{colour}}}" for index, colour in enumerate(COLOURS))
    + "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.faint{fill:#9198a1}.card{fill:#161b22;stroke:#6e7681}"
    ".rest{fill:#21262d;stroke:#6e7681}.run{stroke:#0d1117}.refused{stroke:#ff7b72}}"
)
"""Rules for every element that is drawn here."""


def picture(name: str, width: float, height: float, title: str, description: str, body: Iterable[str]) -> str:
    """An SVG of its own. ``title`` and ``description`` are what a screen reader says; ``name`` makes their ids."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" style="max-width:100%;height:auto" role="img" '
        f'aria-labelledby="{name}-title {name}-description">\n'
        f'<title id="{name}-title">{escape(title)}</title>\n'
        f'<desc id="{name}-description">{escape(description)}</desc>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def number(value: float) -> str:
    """A coordinate with one decimal at most."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; ``kind`` are its classes."""
    shown = "" if anchor == "start" else f' text-anchor="{anchor}"'
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{number(x)}" y="{number(y)}"{named}{shown}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle with a tooltip."""
    corner = ' rx="3"' if "card" in kind or "refused" in kind else ""
    start = (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{corner} '
        f"class={quoteattr(kind)}"
    )
    return f"{start}><title>{escape(title)}</title></rect>" if title else f"{start}/>"


def ribbon(left: tuple[float, float], right: tuple[float, float], width: float, kind: str, title: str) -> str:
    """A band ``width`` high from a point on the left to one on the right (both its upper corners)."""
    (x, y), (to_x, to_y) = left, right
    middle = number((x + to_x) / 2)
    path = (
        f"M{number(x)} {y:.2f}C{middle} {y:.2f} {middle} {to_y:.2f} {number(to_x)} {to_y:.2f}"
        f"V{to_y + width:.2f}C{middle} {to_y + width:.2f} {middle} {y + width:.2f} {number(x)} {y + width:.2f}Z"
    )
    return f'<path d="{path}" class={quoteattr(kind)}><title>{escape(title)}</title></path>'


def line(left: tuple[float, float], right: tuple[float, float], kind: str, title: str) -> str:
    """A straight line with a tooltip."""
    return (
        f'<path d="M{number(left[0])} {number(left[1])}L{number(right[0])} {number(right[1])}" '
        f"class={quoteattr(kind)}><title>{escape(title)}</title></path>"
    )


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, width: float) -> tuple[list[str], float]:
    """``(classes, words)`` side by side, as many in a line as fit; the elements, and the height that they take."""
    body: list[str] = []
    at, top = x, y
    for kind, words in entries:
        need = 24 + 6.6 * len(words)
        if at > x and at + need > x + width:
            at, top = x, top + 20
        body.append(rectangle(at, top, 12, 12, kind))
        body.append(text(at + 18, top + 10.5, words))
        at += need + 12
    return body, top + 20 - y
