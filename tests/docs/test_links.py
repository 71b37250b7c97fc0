"""What pages say of files and figures is true: links lead to pages and headings that are there."""

import re

import pytest
from code_blocks import DOCS

from kvbaton.transport import NAMES
from kvbaton.transport.fabric import FABRICS, adapter_of

ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED = re.compile(r"`(docs/[\w/.-]+?)`")


def anchors(text):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_exists(page):
    text = page.read_text()
    for target, heading in LINK.findall(text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if heading:
            assert heading in anchors(linked.read_text()), f"{target}#{heading}"
    for target in NAMED.findall(text):
        assert (ROOT / target).exists(), target


def test_each_fabric_has_a_page_that_readers_find():
    for name in FABRICS.keys() & set(NAMES):
        page = f"fabrics/{name}.md"
        assert f"]({page})" in (DOCS / "transports.md").read_text()
        assert f"](docs/{page})" in (ROOT / "README.md").read_text()


def test_costs_are_those_that_the_planning_page_says():
    text = (DOCS / "planning.md").read_text()
    said = {}
    for names, piece, copies, packed in re.findall(r"^\| (`.+) \| (\d+) µs \| (\d+) GB/s \| (\d+) µs \|$", text, re.M):
        for name in re.findall(r"`(\w+)`", names):
            said[name] = (int(piece), int(copies), int(packed))
    fabrics = FABRICS.keys() & set(NAMES)
    assert said == {
        name: (
            round(adapter_of(name).costs.piece_seconds * 1e6),
            round(adapter_of(name).costs.copy_bytes_per_second / 1e9),
            round(adapter_of(name).costs.packed_seconds * 1e6),
        )
        for name in fabrics
    }
