"""docs/layouts.md is true: its code runs, prints what it says, and its pictures and links exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
TEXT = PAGE.read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    """``(line, code, printed)`` of each block of Python; what it prints follows it as a block of text."""
    found = []
    for match in FENCED.finditer(TEXT):
        line = TEXT[: match.start()].count("\n") + 2
        if match[1] == "python":
            found.append([line, match[2], ""])
        elif match[1] == "text":
            found[-1][2] = match[2]
    return found


def test_the_code_runs_and_prints_what_the_page_says():
    names = {"__name__": "layouts_page"}
    listed = blocks()
    assert len(listed) >= 12
    for line, code, printed in listed:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            # As many lines down as in the page, so that a traceback names its lines.
            exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
        assert output.getvalue() == printed, f"{PAGE.name}, line {line}"


def test_every_block_of_text_follows_code():
    languages = [match[1] for match in FENCED.finditer(TEXT)]
    assert all(
        before == "python" for before, after in zip(["", *languages], languages, strict=False) if after == "text"
    )


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)", TEXT))))
def test_what_the_page_points_to_exists(target):
    assert (PAGE.parent / target).is_file()


def test_the_contents_name_every_section():
    sections = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in sections]
    assert re.findall(r"^\* \[(.+)\]\(#(.+)\)$", TEXT, re.MULTILINE) == list(zip(sections, anchors, strict=True))
