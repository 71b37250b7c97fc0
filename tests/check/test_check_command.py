import json
import os
import subprocess
import sys

import pytest

from kvbaton.check import layouts
from kvbaton.cli.main import main
from kvbaton.plan import Share


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvbaton", "check", "layouts", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def nothing_is_sent(sources, destination, **options):
    return (Share(),) * len(sources)


def test_figures_as_json(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--examples", "60", "--seed", "3", "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ok"] is True
    assert (figures["examples"], figures["passed"], figures["seed"]) == (60, 60, 3)
    assert figures["failure"] is None
    assert 0 < figures["covered"]["tp unequal"] <= 60
    assert figures["bytes"] > figures["pieces"] > figures["pairs"] > 60
    path = tmp_path / "figures" / "check.json"
    assert run(monkeypatch, "--examples", "60", "--seed", "3", "--json", str(path)) == 0
    again = json.loads(path.read_text())
    assert {name: again[name] for name in ("covered", "bytes")} == {n: figures[n] for n in ("covered", "bytes")}
    told = capsys.readouterr().out
    assert "60 examples of seed 3 passed" in told
    assert "tp unequal" in told


def test_figures_that_cannot_be_written_are_told_first(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "--examples", "1000000000", "--json", str(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f"ConfigurationError: --json {tmp_path} is a folder; name a file in it, or - for standard output\n"
    )
    assert run(monkeypatch, "--examples", "1", "--seed", "1", "--json", str(tmp_path / "file" / "x.json")) == 2
    assert f"\nConfigurationError: --json {tmp_path}/file/x.json: " in capsys.readouterr().err


def test_a_failure_is_shown_and_can_be_repeated(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "assign", nothing_is_sent)
    assert run(monkeypatch, "--examples", "50", "--seed", "1", "--json", "-") == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["ok"] is False
    assert figures["passed"] < 50
    assert "never written" in figures["failure"]["problems"][0]["what"]
    assert run(monkeypatch, "--examples", "50", "--seed", "1") == 1
    told = capsys.readouterr().out
    command = figures["failure"]["repeat"]
    assert figures["failure"]["example"] in told
    assert command in told
    assert command.startswith("kvbaton check layouts --example ")
    assert run(monkeypatch, *command.split()[3:]) == 1
    assert figures["failure"]["example"] in capsys.readouterr().out
    monkeypatch.undo()
    assert run(monkeypatch, *command.split()[3:]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


def test_nothing_is_left_in_the_working_directory(tmp_path):
    command = [sys.executable, "-m", "kvbaton", "check", "layouts", "--examples", "300", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    environment.pop("HYPOTHESIS_STORAGE_DIRECTORY", None)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "300 examples of seed" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_seed_is_told(monkeypatch, capsys):
    seeds = set()
    for _ in range(2):
        assert run(monkeypatch, "--examples", "1", "--json", "-") == 0
        seeds.add(json.loads(capsys.readouterr().out)["seed"])
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("name", "message"), [("xyz", "is not a row of hexadecimal"), ("00" * 300, "has 300 bytes, more than 152")]
)
def test_a_name_of_no_example_is_refused(name, message, monkeypatch, capsys):
    assert run(monkeypatch, "--example", name) == 2
    assert message in capsys.readouterr().err


def test_without_hypothesis_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert run(monkeypatch, "--examples", "1") == 2
    assert "pip install 'kvbaton[check]'" in capsys.readouterr().err
