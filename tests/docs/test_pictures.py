"""The pictures of the docs are what their script draws, and say in words what they show."""

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = runpy.run_path(str(FOLDER / "draw.py"))["PICTURES"]
SVG = "{http://www.w3.org/2000/svg}"


def test_each_file_has_its_drawing():
    # The pictures of `kvbaton plan` are held to the command by its own tests.
    files = {path.stem for path in FOLDER.glob("*.svg") if not path.stem.startswith("plan-")}
    assert files == set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_the_file_is_what_the_script_draws(name):
    text = (FOLDER / f"{name}.svg").read_text()
    assert text == DRAWN[name]().svg(), "run: python docs/pictures/draw.py"
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc")) > 80
    assert "prefers-color-scheme:dark" in root.findtext(f"{SVG}style")


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_lies_outside_the_picture(name):
    root = ElementTree.fromstring(DRAWN[name]().svg())
    width, height = int(root.get("width")), int(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
        assert 0 <= float(box.get("y")) <= float(box.get("y")) + float(box.get("height")) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y")) < height
