"""Files that stand for far more than they hold are refused in one line, before memory is taken for what they say."""

import json
from pathlib import Path

import pytest

from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.explain import Ranks, Request, explain, explain_ranks
from kvbaton.explain.report import make
from kvbaton.topology import lay_out, load_topology, read_topology
from kvbaton.topology.layers import parse_layers
from kvbaton.topology.parse import MAX_VALUES, shown

GOOD = "model: {layers: 2, components: {kv: {heads: 2, head_dim: 4}}}\n"
KV = "model: {layers: 2, components: {kv: {heads: 2, head_dim: 4, %s}}}\n"
TEN = "[x,x,x,x,x,x,x,x,x,x]"
LAUGHS = [("a", TEN), *((c, f"[{','.join(['*' + p] * 10)}]") for p, c in zip("abcdefgh", "bcdefghi", strict=True))]
MERGES = [
    ("a", "{k: v}"),
    *((c, f"{{<<: [{','.join(['*' + p] * 10)}]}}") for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
]
DIGITS = "9" * 5000

REFUSED = {
    "laughs in a list": ("".join(f"- &{c} {v}\n" for c, v in LAUGHS), "holds more than 65,536 values"),
    "laughs in a mapping": ("".join(f"{c}: &{c} {v}\n" for c, v in LAUGHS) + GOOD, "holds more than 65,536 values"),
    "laughs in merges": ("".join(f"{c}: &{c} {v}\n" for c, v in MERGES) + GOOD, "holds more than 65,536 values"),
    "inside itself": (GOOD + "pp: &p [*p]\n", "holds more than 65,536 values"),
    "a long file": ("# " + "x" * (1 << 17) + "\n" + GOOD, "has more than 131,072 bytes"),
    "deep": ("[" * 20_000 + "]" * 20_000, "is no YAML: maximum recursion depth exceeded"),
    "a range of layers": (KV % 'layers: "0-99999999999"', "layer 2 is outside the model's 2 layers, 0 to 1"),
    "a slice of layers": (KV % 'layers: "0:99999999999:7"', "layer 7 is outside the model's 2 layers"),
    "many layers": (GOOD.replace("layers: 2", "layers: 100000000"), "model.layers: expected `int` <= 8192"),
    "digits": (KV % f"layers: {DIGITS}", "is no YAML: Exceeds the limit (4300 digits)"),
    "digits in text": (KV % f'layers: "{DIGITS}"', "is no layers; write all, 5, 0-29"),
    "digits of a size": (GOOD + f"tp: {DIGITS}\n", "is no YAML: Exceeds the limit (4300 digits)"),
    "hexadecimal digits": (GOOD + f"tp: 0x{'f' * 5000}\n", "a number of 20000 bits is too large"),
    "a day that is none": (GOOD + "title: 2001-13-45\n", "is no YAML: month must be in 1..12"),
    "a day": (GOOD + "title: 2001-12-05\n", "is a date, not text"),
    "a set": (GOOD + "title: !!set {a, b}\n", "is a set, not text"),
    "a tag": (GOOD + "tp: !!int abc\n", "is no YAML: invalid literal for int()"),
    "a long path": ("model: " + "a" * 5000 + "\n", "File name too long"),
    "half a character": (GOOD + 'title: "\\ud800x"\n', "the text '\\ud800x' is no line of printable text"),
    "a terminal's commands": (GOOD + 'title: "\\e]0;x\\a"\n', "the text '\\x1b]0;x\\x07' is no line of printable text"),
    "an order": (GOOD + "order: NHDX\n", ".order: invalid enum value 'NHDX' (known: NHD, HND)"),
    "a stage": (
        GOOD + "components: {kv: {stage: middle}}\n",
        "components.kv.stage: invalid enum value 'middle' (known: first, last)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_are_refused_in_one_line(name, tmp_path):
    text, words = REFUSED[name]
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        load_topology(path)
    told = str(error.value)
    assert told.startswith(str(path))
    assert words in told
    assert told.isprintable()
    assert len(told) < 600


CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
SPARSE = {**CONFIG, "layer_types": ["compressed_sparse_attention"] * 4, "index_head_dim": 4, "sliding_window": 8}
CONFIGS = {
    "deep": ("[" * 100_000 + "]" * 100_000, "is no JSON: maximum recursion depth exceeded"),
    "digits": (f'{{"num_hidden_layers": {DIGITS}}}', "is no JSON: Exceeds the limit (4300 digits)"),
    "infinite": ('{"num_hidden_layers": 1e400}', "num_hidden_layers is inf, not a positive number"),
    "many layers": ({**CONFIG, "num_hidden_layers": 1 << 40}, "not a positive number up to 8192"),
    "large heads": ({**CONFIG, "head_dim": 1 << 60}, "head_dim is 1152921504606846976, not a positive number"),
    "types": ({**CONFIG, "layer_types": {"a": 1}}, "layer_types is {'a': 1}, not a list"),
    "a long type": ({**CONFIG, "layer_types": ["x" * 9999] * 4}, "which is not known"),
    "a pattern": ({**CONFIG, "hybrid_override_pattern": "M" * 99_999}, "lists the types of 5 layers"),
    "a number of layers": ({**CONFIG, "attn_layer_indices": 3}, "attn_layer_indices is 3, not a list"),
    "a text": (
        {**CONFIG, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": "2"},
        "max_window_layers is '2', not a number",
    ),
    "indexers": ({**CONFIG, "index_topk": 3, "indexer_types": 5}, "indexer_types is 5, not a list"),
    "rates": ({**SPARSE, "compress_rates": [1]}, "compress_rates is [1], not a mapping"),
    "a rate": (
        {**SPARSE, "compress_rates": {"compressed_sparse_attention": 0}},
        "compress_rates.compressed_sparse_attention is 0, not a number from 1",
    ),
    "a dtype": ({**CONFIG, "dtype": ["x"] * 999}, "is no dtype"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_refused_in_one_line(name, tmp_path):
    config, words = CONFIGS[name]
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ConfigurationError) as error:
        read_topology({"model": "config.json"}, "t", tmp_path)
    told = str(error.value)
    assert told.startswith(str(path))
    assert words in told
    assert told.isprintable()
    assert len(told) < 600


def test_a_name_of_a_file_that_cannot_be_printed_can_be_a_title(tmp_path):
    path = tmp_path / "a\nb\udcff.yaml"
    path.write_text(GOOD)
    assert load_topology(path).title == "a?b?"


def test_values_are_counted_up_to_the_bound():
    with pytest.raises(ConfigurationError, match="holds more than"):
        read_topology({"model": "qwen3-32b", "pp": [0] * MAX_VALUES})
    with pytest.raises(ConfigurationError, match="pp: lists 60000 ranges of layers, at most 8192 can be read"):
        read_topology({"model": "qwen3-32b", "pp": [[0] * 60_000]})


def test_what_is_shown_of_a_value_is_short():
    for value in ("x" * 10**6, ["x" * 10**6] * 10**5, {"a": {"b": ["c"] * 999}}, 1 << 99_999, {1 << 99_999}):
        assert len(shown(value)) <= 64


def test_layers_are_not_listed_before_they_are_known_to_exist():
    assert parse_layers(["1:8:3", "2-3"], 8, "t") == (1, 2, 3, 4, 7)
    with pytest.raises(ConfigurationError, match="layer 8 is outside"):
        parse_layers("5-999999999999999999", 8, "t")


def kinds(**kind):
    return {"model": {"layers": 2, "components": {"kv": {"heads": 2, "head_dim": 4, **kind}}}}


@pytest.mark.parametrize(
    "kind",
    [
        {"window": 1 << 40},
        {"kind": "ring", "window": 1 << 40},
        {"kind": {"window": 10**10, "ring": True, "reused": False}},
        {"tail": 1 << 20},
    ],
)
@pytest.mark.parametrize("cp", [1, {"size": 4, "unit": 1}])
def test_windows_that_are_longer_than_the_request_take_no_more_rows_than_it(kind, cp):
    topology = read_topology({**kinds(**kind), "cp": cp})
    rows = {tensor.rows for layout in lay_out(topology, 40) for tensor in layout.components[0].tensors}
    assert max(rows) <= 14
    explanation = explain(topology, read_topology(kinds(**kind)), Request(40))
    assert not explanation.refusals
    assert explanation.nbytes == 40 * 2 * 2 * 2 * 4 * 2


def test_more_pairs_of_ranks_than_can_be_explained(tmp_path):
    (tmp_path / "t.yaml").write_text(GOOD + "cp: {size: 1021, unit: 7}\n")
    words = "1021 sources and 1021 destinations are 1042441 pairs of ranks, at most 16384 can be explained"
    with pytest.raises(ConfigurationError, match=words):
        make(tmp_path / "t.yaml", tmp_path / "t.yaml", Request(40))


def test_more_tensors_than_can_be_explained():
    many = {"layers": 8192, "components": {"kv": {"dim": 1}}}
    with pytest.raises(ConfigurationError, match="8388608 tensors on 1024 ranks, at most 131072 can be explained"):
        lay_out(read_topology({"model": many, "cp": 1024}), 1)
    two = {"layers": 8192, "components": {"kv": {"heads": 1, "head_dim": 1}}}
    with pytest.raises(ConfigurationError, match=r"16384 tensors on 1 ranks, .* 8192 on a rank"):
        lay_out(read_topology({"model": two}), 1)
    components = {f"c{number}": {"dim": 1} for number in range(257)}
    with pytest.raises(ConfigurationError, match="257 components, at most 256 are allowed"):
        lay_out(read_topology({"model": {"layers": 1, "components": components}}), 1)
    (layout,) = lay_out(read_topology({"model": {"layers": 2048, "components": {"kv": {"dim": 1}}}}), 1)
    side = Ranks([layout] * 64)
    with pytest.raises(ConfigurationError, match="64 sources times 131072 tensors of the destinations are more than"):
        explain_ranks(side, side, Request(1))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_factors_are_positive_numbers(value):
    with pytest.raises(KVBatonError):
        lay_out(read_topology({**kinds(), "components": {"kv": {"factor": value}}}), 1)


def test_the_examples_are_far_below_the_bounds():
    for path in (Path(__file__).parents[2] / "examples" / "topologies").glob("*.yaml"):
        assert path.stat().st_size * 20 < 1 << 17
