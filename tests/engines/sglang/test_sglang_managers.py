"""SGLang's own managers over kvbaton: see `sglang_managers`, which runs in a process of its own."""

from __future__ import annotations

import re

import pytest
from sglang_here import SCRIPTS, needs_sglang, outcomes

pytestmark = needs_sglang
SCRIPT = SCRIPTS / "sglang_managers.py"
NAMES = re.findall(r"^    def ([a-z]\w+)\(self, world\)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def ended():
    return outcomes(SCRIPT)


@pytest.mark.parametrize("name", NAMES)
def test_scenario(ended, name):
    assert ended[name] == ""


def test_no_scenario_is_left_out(ended):
    assert list(ended) == NAMES
    assert len(NAMES) > 25
