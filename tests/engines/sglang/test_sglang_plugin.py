from __future__ import annotations

import enum
import pickle
from importlib.metadata import entry_points

import pytest
from sglang_here import SCRIPTS, needs_sglang, run

from kvbaton.engines import sglang
from kvbaton.engines.sglang.plugin import add_member, class_of_backend


class Color(enum.Enum):
    RED = "red"


def test_a_member_that_is_added_is_one_like_the_others():
    blue = add_member(Color, "BLUE", "blue")
    assert Color("blue") is blue is Color["BLUE"] is Color.BLUE
    assert list(Color) == [Color.RED, blue]
    assert (blue.name, blue.value) == ("BLUE", "blue")
    assert blue in Color
    assert blue != Color.RED
    assert {blue: 1}[Color.BLUE] == 1
    assert pickle.loads(pickle.dumps(blue)) is blue
    assert add_member(Color, "BLUE", "blue") is blue
    assert len(Color) == 2


def test_classes_of_other_backends_are_sglangs_own():
    other = enum.Enum("Backend", {"NIXL": "nixl"}).NIXL
    manager = enum.Enum("Kind", {"MANAGER": 1}).MANAGER
    assert class_of_backend(lambda *asked: asked, other, manager) == (other, manager)


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="KVManager"):
        sglang.KVManager  # noqa: B018


def test_sglang_finds_the_plugin():
    found = [each for each in entry_points(group="sglang.srt.plugins") if each.name == "kvbaton"]
    if not found:
        pytest.skip("kvbaton is not installed, or was before it had a plug-in (make setup)")
    assert found[0].load().__module__ == "kvbaton.engines.sglang.plugin"


@needs_sglang
def test_sglang_knows_the_backend_once_it_is_registered():
    assert "all of it is right" in run(SCRIPTS / "sglang_plugin.py")
