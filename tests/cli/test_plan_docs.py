"""What docs/planning.md shows is what the command prints."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbaton.cli.main import make_app
from kvbaton.topology import PRESETS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "planning.md").read_text()
SHOWN = re.findall(r"```\n\$ (kvbaton plan .*?)\n(.*?)\n```", TEXT, re.DOTALL)


def test_there_are_examples():
    assert len(SHOWN) == 3
    for name in PRESETS:
        assert f"`{name}`" in TEXT


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=["fits", "refused", "cast"])
def test_examples_print_what_is_shown(command, output, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(make_app(), shlex.split(command)[1:])
    assert [line.rstrip() for line in result.output.splitlines()] == output.splitlines()
