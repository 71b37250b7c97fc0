"""``kvbaton plan`` on files."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbaton.cli.main import main, make_app

EXAMPLES = Path(__file__).parents[2] / "examples" / "topologies"


def run(*arguments):
    return CliRunner().invoke(make_app(), ["plan", *map(str, arguments)])


def sides(source, destination):
    return "--from", EXAMPLES / f"{source}.yaml", "--to", EXAMPLES / f"{destination}.yaml"


def test_tables_pictures_and_json(tmp_path):
    out = {name: tmp_path / "out" / f"plan.{name}" for name in ("json", "svg", "html")}
    options = [word for name, path in out.items() for word in (f"--{name}", path)]
    result = run(*sides("qwen3-next-tp4", "qwen3-next-tp2-pp2"), "--tokens", 100, "--times", *options)
    assert result.exit_code == 0
    assert "qwen3-next-80b: a request of 100 tokens, in shuffled pages" in result.output
    assert "the planner took" in result.output
    assert max(map(len, result.output.splitlines())) <= 100
    explanation = json.loads(out["json"].read_text())
    assert explanation["tokens"] == 100
    assert explanation["nbytes"] == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4) + 12 * 2 * 2 * 256 * 2 * 100
    ElementTree.fromstring(out["svg"].read_text())
    assert out["html"].read_text().count("<svg") == 1 + 3, "the picture, and the pages of three components"


def test_json_to_standard_output_is_nothing_but_json():
    result = run(*sides("gemma-3-27b-tp8", "gemma-3-27b-tp8"), "--json", "-", "--contiguous", "--prefix", 4000)
    assert result.exit_code == 0
    explanation = json.loads(result.output)
    assert (explanation["pages"], explanation["prefix"]) == ("contiguous", 4000)


def test_refusals_are_printed_with_exit_code_1(tmp_path):
    page = tmp_path / "plan.html"
    result = run(*sides("gemma-3-27b-tp8", "gemma-3-27b-fp8"), "--html", page)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "REFUSED at 4 of 4 destinations, for 1 reason" in text
    assert "LayoutMismatch: component window, role key," in text
    assert "dtype is bfloat16 at the source and" in page.read_text()


def test_what_is_refused_fits_with_a_cast(tmp_path):
    page, figures = tmp_path / "plan.html", tmp_path / "plan.json"
    result = run(*sides("gemma-3-27b-tp8", "gemma-3-27b-fp8-cast"), "--html", page, "--json", figures)
    assert result.exit_code == 0
    explanation = json.loads(figures.read_text())
    assert explanation["cast"] is True
    casts = {(entry["name"], *cast["roles"]): cast for entry in explanation["components"] for cast in entry["casts"]}
    assert casts.keys() == {("window", "key", "value"), ("kv", "key"), ("kv", "value")}
    assert {cast["source"] for cast in casts.values()} == {"bfloat16"}
    key = casts["kv", "key"]
    assert key["layers"] == list(range(5, 62, 6))
    assert key["destination"] == "float8_e4m3fn with scales in key_scale (head 16)"
    assert key["relative"] == 2**-4 + 2**-22
    assert casts["window", "key", "value"]["bound"] == "the larger of 2^-4 * abs(value) and 2^-10 * 0.5"
    # An fp8 element is a byte; 16 heads of 10 layers have a scale for each of 4,096 tokens, for keys and for values.
    kv = next(entry for entry in explanation["components"] if entry["name"] == "kv")
    assert kv["nbytes"] == 4096 * 10 * 2 * 16 * (128 + 4)
    text = page.read_text()
    assert "<h2>Casts</h2>" in text
    assert "key_scale (head 16)" in text
    assert text.count("<svg") == 1 + 2


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        (
            {"a": "model: qwen3-32b\nheads: 4"},
            [],
            "ConfigurationError: {a}: unknown field 'heads' (known: model, title",
        ),
        ({"a": "model: [1"}, [], "ConfigurationError: {a}: is no YAML: while parsing a flow sequence"),
        ({}, [], "ConfigurationError: {a}: No such file or directory"),
        (
            {"a": "model: qwen3-32b\ntp: 12"},
            [],
            "ShardError: component kv, axis head: 8 heads cannot be spread evenly over 12",
        ),
        (
            {"a": "{model: qwen3-32b, transport: carrier}"},
            [],
            "ConfigurationError: there is no transport 'carrier'; known",
        ),
        (
            {"a": "{model: qwen3-32b, transport: auto}"},
            [],
            "ConfigurationError: transport auto is what works on a machine, which a topology does not know; write",
        ),
        ({"a": "model: qwen3-32b"}, ["--pair", "1:0"], "ConfigurationError: --pair 1:0: no such pair moves anything"),
        ({"a": "model: qwen3-32b"}, ["--prefix", "5000"], "ConfigurationError: the prefix of 5000 tokens is longer"),
        ({"a": "model: qwen3-32b"}, ["--svg", "/proc/none/x.svg"], "ConfigurationError: /proc/none/x.svg: "),
    ],
)
def test_what_cannot_be_used_is_one_line_with_exit_code_2(files, options, words, tmp_path, monkeypatch, capsys):
    paths = {name: tmp_path / f"{name}.yaml" for name in ("a", "b")}
    for name, text in files.items():
        paths[name].write_text(text)
    paths["b"].write_text("model: qwen3-32b")
    arguments = ["kvbaton", "plan", "--from", str(paths["a"]), "--to", str(paths["b"]), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(words.format(a=paths["a"]))
    assert told.count("\n") == 1
