"""docs/manager.md is true: its code runs, its tables have every argument and field with its default."""

import inspect
import re
from dataclasses import MISSING, fields

import pytest
from code_blocks import DOCS, blocks, links, run_blocks

import kvbaton as kb

PAGE = DOCS / "manager.md"
TEXT = PAGE.read_text()


def table(title):
    """The first two cells of each line of the table whose first column is called ``title``."""
    lines = TEXT[TEXT.index(f"| {title} |") :].splitlines()[2:]
    cells = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells.append(tuple(cell.strip() for cell in line.split("|")[1:3]))
    return cells


def test_the_code_runs_and_prints_what_the_page_says():
    listed = blocks(TEXT)
    assert len(listed) == 3
    run_blocks(PAGE, listed)


@pytest.mark.parametrize("target", links(TEXT))
def test_what_the_page_points_to_exists(target):
    assert (DOCS / target).is_file()


@pytest.mark.parametrize("kind", [kb.Settings, kb.Deadlines])
def test_every_setting_is_there_with_its_default(kind):
    said = []
    for field in fields(kind):
        nested = field.default is MISSING
        said.append(
            (f"`{field.name}`", f"`{type(field.default_factory()).__name__}()`" if nested else f"`{field.default!r}`")
        )
    assert table(f"`{kind.__name__}`") == said


def test_every_argument_of_a_manager_is_there_with_its_default():
    said = [
        (name, default.strip("`"))
        for names, default in table("argument of `Manager`")
        for name in re.findall(r"`(\w+)`", names)
    ]
    parameters = list(inspect.signature(kb.Manager).parameters.values())
    assert said == [(each.name, "" if each.default is each.empty else repr(each.default)) for each in parameters]


@pytest.mark.parametrize("kind", [kb.Sender, kb.Receiver])
def test_every_method_of_a_room_is_there(kind):
    internal = {"restart_clock", "show", "show_released", "count"}
    public = {name for name in dir(kind) if not name.startswith("_")} - internal
    assert {name for name in public if f"`{name}" not in TEXT} == set()
