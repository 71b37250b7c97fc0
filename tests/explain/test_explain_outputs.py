"""An explanation as JSON, as pictures and as tables."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvbaton.explain import Explanation, Request, explain, side_of
from kvbaton.explain.html import draw_html
from kvbaton.explain.page import view_pages
from kvbaton.explain.page_picture import draw_page
from kvbaton.explain.ribbons import draw
from kvbaton.explain.table import print_tables
from kvbaton.explain.words import show_bytes, show_spans
from kvbaton.topology import load_topology, read_topology

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
PAIRS = {
    "1x1": ({"model": "qwen3-32b"}, {"model": "qwen3-32b"}),
    "4x2": ({"model": "qwen3-next-80b", "tp": 4}, {"model": "qwen3-next-80b", "tp": 2, "striped": True}),
    "8x8": ({"model": "deepseek-v3.2", "tp": 8}, {"model": "deepseek-v3.2", "cp": 8, "transport": "tcp"}),
    "2x3pp": ({"model": "deepseek-v4-like", "tp": 2}, {"model": "deepseek-v4-like", "tp": 2, "pp": 3}),
    "refused": ({"model": "qwen3-32b", "tp": 2}, {"model": "qwen3-32b", "dtype": "float16"}),
    "lacking": ({"model": "qwen3-32b"}, {"model": "gpt-oss-120b", "tp": 2}),
}


def explained(name):
    return explain(*(read_topology({"title": f"<{name}> & co", **side}) for side in PAIRS[name]), Request(5000))


@pytest.mark.parametrize("name", PAIRS)
def test_json_round_trip(name):
    found = explained(name)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found
    assert found.refused == (name in ("refused", "lacking"))


def test_the_schema_in_the_docs_is_that_of_the_code():
    schema = msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Explanation)), indent=1).decode()
    assert (ROOT / "docs" / "plan-schema.json").read_text() == schema + "\n"


def boxes(picture, kind):
    """``(x, y, width, height)`` of the rectangles of a class."""
    return [
        tuple(float(element.get(side)) for side in ("x", "y", "width", "height"))
        for element in picture.iter(f"{SVG}rect")
        if kind in element.get("class").split()
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_the_picture_is_whole_and_says_the_numbers(name):
    found = explained(name)
    text = draw(found)
    assert text == draw(explained(name)), "the same every time"
    picture = ElementTree.fromstring(text)
    assert picture.get("role") == "img"
    named = {element.get("id") for element in picture}
    assert set(picture.get("aria-labelledby").split()) <= named
    assert not re.search(r"(href|src|url\(|@import|<script)", text), "nothing from elsewhere"
    ribbons = [element for element in picture.iter(f"{SVG}path") if "flow" in element.get("class").split()]
    flows = [flow for pair in found.pairs for flow in pair.flows if flow.nbytes]
    titles = [element.find(f"{SVG}title").text for element in ribbons]
    assert len(titles) == len(flows)
    for flow, title in zip(flows, titles, strict=True):
        assert flow.component in title
        assert show_bytes(flow.nbytes) in title
        assert f"{flow.runs.pieces:,} piece" in title
    words = [element.text for element in picture.iter(f"{SVG}text")]
    for side in (found.source, found.destination):
        for rank in side.ranks:
            assert rank.label in words
    cards = boxes(picture, "card")
    ranks = len(found.source.ranks) + len(found.destination.ranks)
    assert len(cards) == ranks + found.refused, "one more in the legend"
    width, height = (float(number) for number in picture.get("viewBox").split()[2:])
    for x, y, wide, high in cards:
        assert 0 <= x <= width - wide
        assert 0 <= y <= height - high
    cards = [card for card in cards if card[2] > 100]
    for left, right in itertools.pairwise(sorted(cards)):
        assert left[0] != right[0] or left[1] + left[3] <= right[1], "cards do not overlap"


def test_ribbons_are_as_wide_as_their_bytes():
    found = explained("4x2")
    heights = {}
    for element in ElementTree.fromstring(draw(found)).iter(f"{SVG}path"):
        top, down = re.match(r"M[\d.]+ ([\d.]+)C.* ([\d.]+)Z$", element.get("d")).group(1, 0)
        bottom = down.removesuffix("Z").split()[-1]
        heights[element.find(f"{SVG}title").text] = float(bottom) - float(top)
    large = [flow for pair in found.pairs for flow in pair.flows if flow.component != "conv"]
    shown = [height for title, height in heights.items() if ": conv" not in title]
    assert len(large) == len(shown)
    for flow, height in zip(large, shown, strict=True):
        assert height / sum(shown) == pytest.approx(flow.nbytes / sum(flow.nbytes for flow in large), abs=2e-4)


def test_legend_entries_do_not_overlap():
    picture = ElementTree.fromstring(draw(explained("2x3pp")))
    legend = [(x, y) for x, y, width, _ in boxes(picture, "flow") if width == 12]
    assert len(legend) == 6
    for (x, y), (next_x, next_y) in itertools.pairwise(legend):
        assert (next_y, next_x) > (y, x)
        assert next_y > y or next_x - x > 120


@pytest.mark.parametrize("name", ["4x2", "8x8", "2x3pp"])
def test_pages_are_drawn_to_scale(name):
    source, destination = (read_topology(side) for side in PAIRS[name])
    request = Request(5000)
    found = explain(source, destination, request)
    pair = found.pairs[0]
    views = view_pages(
        side_of(source, request),
        side_of(destination, request),
        request,
        (pair.source, pair.destination),
        striped=found.striped,
    )
    assert [view.component for view in views] == [flow.component for flow in pair.flows if flow.nbytes]
    for index, view in enumerate(views):
        for run in view.runs:
            assert 0 <= run.source[1] <= view.source.stride - run.nbytes
            assert 0 <= run.destination[1] <= view.destination.stride - run.nbytes
        taken = sorted((run.destination, run.nbytes) for run in view.runs)
        for ((row, byte), nbytes), (following, _) in itertools.pairwise(taken):
            assert (row, byte + nbytes) <= following, "no byte is written twice"
        picture = ElementTree.fromstring(draw_page(view, f"page-{index}"))
        for side, place in (("source", view.source), ("destination", view.destination)):
            drawn = [width for x, _, width, _ in boxes(picture, "run") if (x < 470) == (side == "source")]
            moved = sum(run.nbytes for run in view.runs)
            assert sum(drawn) == pytest.approx(moved / place.line * 440, abs=0.06 * len(drawn))


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_needs_nothing_else(name):
    found = explained(name)
    text = draw_html(found)
    assert not re.search(r"<script|<link|<img|src=|href=", text)
    assert "&lt;" + name + "&gt; &amp; co" in text
    body = text[text.index("<body>") : text.index("</html>")].replace("<br>", "<br/>")
    page = ElementTree.fromstring(body)
    assert len(list(page.iter(f"{SVG}svg"))) == 1
    cells = [cell.text for cell in page.iter("td")]
    for component in found.components:
        assert component.name in cells
        assert show_bytes(component.nbytes) in cells
    for refusal in found.refusals:
        assert f"{refusal.error}: {refusal.reason}" in cells


@pytest.mark.parametrize("name", PAIRS)
def test_tables_fit_100_columns(name, capsys):
    found = explained(name)
    console = Console(width=100, record=True, force_terminal=False)
    print_tables(found, console)
    lines = console.export_text().splitlines()
    capsys.readouterr()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert f"({found.nbytes:,} bytes)" in text
    for component in found.components:
        assert f"{component.runs.pieces:,}" in text
    assert ("REFUSED" in text) == found.refused


def test_the_picture_in_the_docs_is_that_of_its_example():
    folder = ROOT / "examples" / "topologies"
    sides = [load_topology(folder / f"{name}.yaml") for name in ("qwen3-next-tp4", "qwen3-next-tp2-pp2")]
    assert (ROOT / "docs" / "pictures" / "plan-qwen3-next.svg").read_text() == draw(explain(*sides, Request(4096)))


def test_figures_in_words():
    assert [show_bytes(n) for n in (0, 1023, 1024, 1536, 1 << 20, 1048575, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "1.0 MiB",
        "5.0 TiB",
    ]
    assert show_spans(((0, 4), (8, 1), (16, 8))) == "0-3, 8, 16-23"
