"""Every test that docs/guarantees.md names is there, and every setting too."""

import re
from pathlib import Path

import pytest

import kvbaton as kb

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::([\w:]+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[name for _, name in TESTS])
def test_what_shows_it_is_there(file, name):
    text = (ROOT / "tests" / file).read_text()
    *classes, function = name.split("::")
    assert f"def {function}(" in text
    assert all(f"class {each}:" in text for each in classes)


def test_each_row_of_an_event_names_one():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| event", "| ---"))]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize("owner", [kb.Settings, kb.Deadlines])
def test_settings_are_there_and_have_these_defaults(owner):
    found = re.findall(rf"`{owner.__name__}\.(\w+)`(?: \(([\d,]+(?:\.\d+)?) ?(s|MiB)?\))?", PAGE)
    assert found
    for name, value, unit in found:
        default = getattr(owner(), name)
        if value:
            assert float(value.replace(",", "")) * (1 << 20 if unit == "MiB" else 1) == default
