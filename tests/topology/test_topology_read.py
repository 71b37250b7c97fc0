"""Files that do not fit are refused in one line that names the place."""

import json

import pytest

from kvbaton.errors import ConfigurationError, LayoutError, ShardError
from kvbaton.topology import PRESETS, lay_out, load_topology, read_topology

KV = {"heads": 4, "head_dim": 8}


def written(**components):
    return {"layers": 4, "components": components or {"kv": KV}}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "t: [1] is no mapping of fields: model, title, tp"),
        ({"model": "qwen3-32b", "pagesize": 4}, "t: unknown field 'pagesize'; did you mean page_size? (known: model,"),
        ({"tp": 2}, "t: object missing required field `model`"),
        ({"model": "qwen3-32b", "tp": 0}, "t.tp: expected `int` >= 1"),
        ({"model": "qwen3-32b", "order": "NDH"}, "t.order: invalid enum value 'NDH'"),
        ({"model": "qwen3-32b", "dtype": "fp8"}, "t: dtype: 'fp8' is no dtype (known: float64,"),
        (
            {"model": "qwen3-33b"},
            "t: model: 'qwen3-33b' is neither a config.json (or its folder) nor a preset (qwen3-32b",
        ),
        ({"model": "qwen3-32b", "pp": 65}, "t: pp: 65 stages for 64 layers"),
        (
            {"model": written(), "pp": ["0-1", "1-3"]},
            "t: pp: layer 1 is in 2 stages; each of the 4 layers must be in one",
        ),
        ({"model": written(), "pp": ["0-1", "3-4"]}, "t: pp: layer 4 is outside the model's 4 layers, 0 to 3"),
        ({"model": written(), "tp": 4, "cp": {"size": 3, "inside_tp": True}}, "t: cp.size is 3 inside tp, which must"),
        ({"model": written(), "cp": {"sise": 3}}, "t: cp: unknown field 'sise'; did you mean size?"),
        ({"model": written(), "tp": 64, "cp": 64}, "t: 4096 ranks, at most 1024 can be explained"),
        (
            {"model": written(), "components": {"vk": {}}},
            "t: components: the model has no component 'vk' (it has kv)",
        ),
        ({"model": written(), "components": {"kv": {"page": 1}}}, "t: components.kv: unknown field 'page'"),
        ({"model": written(), "components": {"kv": {"stage": 1}}}, "t: components.kv.stage: 1 is none of the 1 stages"),
        (
            {"model": written(), "components": {"kv": {"scale": {"axes": ["head"]}}}},
            "t: components.kv.scale.axes: token is missing; each token has scales of its own",
        ),
        (
            {"model": written(), "components": {"kv": {"scale": {"axes": ["token", "head"], "blocks": {"head": 2}}}}},
            "t: components.kv.scale: head is named twice",
        ),
        (
            {"model": written(), "components": {"kv": {"scale": ["token"]}}},
            "t: components.kv.scale: expected `object | null`, got `array`",
        ),
        ({"model": written(), "components": {"kv": {"factor": 0}}}, "t: components.kv.factor: expected `float` > 0"),
        ({"model": {"layers": 4}}, "t: model: object missing required field `components`"),
        ({"model": written(kv={"heads": 4})}, "model.components.kv: heads needs head_dim (keys and values) or shape"),
        ({"model": written(kv={})}, "model.components.kv: nothing says what it holds; give one of heads and head_dim"),
        ({"model": written(kv={**KV, "dim": 4})}, "model.components.kv: dim, heads says what it holds"),
        ({"model": written(kv={**KV, "kind": "pages"})}, "components.kv.kind: 'pages' is no kind (known: paged, slot,"),
        (
            {"model": written(kv={**KV, "kind": "ring"})},
            "components.kv: kind ring needs window: a number of tokens, but none",
        ),
        (
            {"model": written(kv={**KV, "window": 4, "tail": 2})},
            "kind window needs window: a number of tokens, but window, tail",
        ),
        (
            {"model": written(kv={**KV, "layers": "0-x"})},
            "components.kv.layers: '0-x' is no layers; write all, 5, 0-29",
        ),
        ({"model": written(kv={**KV, "layers": "4::2"})}, "components.kv.layers: '4::2' names no layer of 4"),
        ({"model": written(kv={**KV, "layers": 3 * 3600 + 8})}, "0 to 3; a slice such as '3:48:4' must be quoted"),
        ({"model": written(c={"blocks": {"q": 4}})}, "components.c: a convolution state needs blocks and columns"),
        (
            {"model": written(c={"blocks": {"q": {"size": 4, "groups": 3}}, "columns": 3})},
            "3 groups do not divide its 4",
        ),
        (
            {"model": written(c={"tensors": {"x": {"axes": {"head": {"cut": "even"}}}}})},
            "axes.head: give size, or blocks",
        ),
        (
            {"model": written(c={"tensors": {"x": {"axes": {"token": 4}}}})},
            "axes.token: its size follows from the page",
        ),
        ({"model": written(a={"fields": {"token": ["int65", 1]}})}, "components.a.fields.token: 'int65' is no dtype"),
    ],
)
def test_what_does_not_fit_is_named(value, words):
    with pytest.raises(ConfigurationError) as error:
        read_topology(value, "t")
    assert str(error.value).startswith("t")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    for name, text, words in (
        ("missing.yaml", None, "No such file or directory"),
        ("broken.yaml", "tp: [1\nmodel", "is no YAML: while parsing a flow sequence"),
        ("tab.yaml", "tp:\t- x:\n\t- y", "is no YAML"),
        ("bytes.yaml", b"\xff\xfe\x00", "is no YAML"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigurationError) as error:
            load_topology(path)
        assert str(error.value).startswith(f"{path}: ")
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_a_model_is_read_from_a_folder_beside_the_file(tmp_path):
    (tmp_path / "model").mkdir()
    config = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 512, "torch_dtype": "float16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "t.yaml").write_text("model: model\n")
    (layout,) = lay_out(load_topology(tmp_path / "t.yaml"), 10)
    (kv,) = layout.components
    assert len(kv.tensors) == 6
    assert {tensor.dtype for tensor in kv.tensors} == {"float16"}
    assert [(axis.name, axis.size) for axis in kv.tensors[0].axes] == [("token", 16), ("head", 8), ("dim", 64)]
    (tmp_path / "model" / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="is no JSON object"):
        load_topology(tmp_path / "t.yaml")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is no JSON: "):
        load_topology(tmp_path / "t.yaml")


def test_what_does_not_divide_is_refused_with_component_and_numbers():
    with pytest.raises(ShardError, match=r"component kv, axis head: 8 does not divide over 3 ranks"):
        lay_out(read_topology({"model": "qwen3-32b", "tp": 3}), 1)
    with pytest.raises(ShardError, match="component kv, axis head: 4 heads cannot be spread evenly over 6 ranks"):
        lay_out(read_topology({"model": written(), "tp": 6}), 1)
    conv = written(conv={"blocks": {"q": 6, "k": 8}, "columns": 3})
    with pytest.raises(ShardError, match="component conv, axis channel, block q: 6 does not divide over 4 ranks"):
        lay_out(read_topology({"model": conv, "tp": 4}), 1)
    state = written(state={"heads": 4, "shape": [2, 2]})
    with pytest.raises(ShardError, match="component state, axis head: 4 does not divide over 8 ranks"):
        lay_out(read_topology({"model": state, "tp": 8}), 1)
    entries = {"model": written(c={"dim": 4, "ratio": 8}), "components": {"c": {"page_size": 12}}}
    with pytest.raises(LayoutError, match="component c: page_size 12 is no multiple of the 8 tokens of an entry"):
        lay_out(read_topology(entries), 1)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_laid_out_at_any_size(name):
    for tp, pp in ((1, 1), (2, 1), (4, 3), (8, 2)):
        layouts = lay_out(read_topology({"model": name, "tp": tp, "pp": pp}), 1000)
        assert len(layouts) == tp * pp
        layers = {tensor.layer for layout in layouts for entry in layout.components for tensor in entry.tensors}
        assert layers == set(range(PRESETS[name]["num_hidden_layers"]))


def test_stages_that_do_not_divide_the_layers_differ_by_one_at_most():
    model = {"layers": 10, "components": {"kv": KV}}
    stages = read_topology({"model": model, "pp": 4}).stages
    assert stages == ((0, 1), (2, 3, 4), (5, 6), (7, 8, 9))
