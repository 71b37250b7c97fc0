"""docs/layouts.md is true: its code runs, prints what it says, and its pictures and links exist."""

import re

import pytest
from code_blocks import DOCS, FENCED, blocks, links, run_blocks

PAGE = DOCS / "layouts.md"
TEXT = PAGE.read_text()


def needs_torch(code):
    return re.search(r"^import torch$", code, re.MULTILINE) is not None


def test_the_code_runs_and_prints_what_the_page_says():
    listed = [block for block in blocks(TEXT) if not needs_torch(block[1])]
    assert len(listed) >= 12
    run_blocks(PAGE, listed)


def test_the_code_for_torch_runs():
    pytest.importorskip("torch", reason="torch is not installed, and what the page says about its tensors is not run")
    listed = blocks(TEXT)
    (last,) = [number for number, block in enumerate(listed) if needs_torch(block[1])]
    run_blocks(PAGE, listed[: last + 1])


def test_every_block_of_text_follows_code():
    languages = [match[1] for match in FENCED.finditer(TEXT)]
    assert all(
        before == "python" for before, after in zip(["", *languages], languages, strict=False) if after == "text"
    )


@pytest.mark.parametrize("target", links(TEXT))
def test_what_the_page_points_to_exists(target):
    assert (DOCS / target).is_file()


def test_the_contents_name_every_section():
    sections = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in sections]
    assert re.findall(r"^\* \[(.+)\]\(#(.+)\)$", TEXT, re.MULTILINE) == list(zip(sections, anchors, strict=True))
