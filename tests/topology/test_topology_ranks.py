"""What each rank of a topology holds."""

from pathlib import Path

import pytest

from kvbaton.errors import LayoutError
from kvbaton.layout import Kind, Ownership, check_layout, required_bytes
from kvbaton.topology import lay_out, load_topology, read_topology
from kvbaton.topology.layers import parse_layers, show_layers

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "topologies").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_hold_together(path):
    for layout in lay_out(load_topology(path), 4096):
        check_layout(layout, required_bytes(layout.components))
        assert layout.components


def spans(layout, component, axis, role=None):
    tensors = layout.component(component).tensors
    tensor = next(tensor for tensor in tensors if role in (None, tensor.role))
    return next(entry.spans for entry in tensor.axes if entry.name == axis)


def test_heads_are_cut_or_held_by_several():
    model = {"layers": 2, "components": {"kv": {"heads": 2, "head_dim": 4}}}
    assert [spans(rank, "kv", "head") for rank in lay_out(read_topology({"model": model, "tp": 2}), 1)] == [
        ((0, 1),),
        ((1, 1),),
    ]
    found = [spans(rank, "kv", "head")[0][0] for rank in lay_out(read_topology({"model": model, "tp": 8}), 1)]
    assert found == [0, 0, 0, 0, 1, 1, 1, 1]


def test_blocks_are_cut_each_by_itself_and_groups_are_shared():
    blocks = {"x": 16, "B": {"size": 6, "groups": 2}, "C": {"size": 4, "groups": 1}}
    model = {"layers": 1, "components": {"conv": {"blocks": blocks, "columns": 3}}}
    found = [spans(rank, "conv", "channel") for rank in lay_out(read_topology({"model": model, "tp": 4}), 1)]
    assert found == [
        ((0, 4), (16, 3), (22, 4)),
        ((4, 4), (16, 3), (22, 4)),
        ((8, 4), (19, 3), (22, 4)),
        ((12, 4), (19, 3), (22, 4)),
    ]


def test_stages_context_ranks_and_replicas():
    model = {"layers": 5, "components": {"kv": {"heads": 4, "head_dim": 4}, "aux": {"fields": {"token": ["int64", 1]}}}}
    value = {
        "model": model,
        "tp": 2,
        "pp": 2,
        "cp": {"size": 2, "unit": 4},
        "dp": 3,
        "components": {"aux": {"stage": "last"}},
    }
    layouts = lay_out(read_topology(value), 100)
    assert [str(layout.coords) for layout in layouts[:3]] == [
        "tp0/2 pp0/2 cp0/2 dp0/3",
        "tp1/2 pp0/2 cp0/2 dp0/3",
        "tp0/2 pp0/2 cp1/2 dp0/3",
    ]
    assert [layout.owned for layout in layouts] == [Ownership(4, 2, r) for r in (0, 0, 1, 1)] * 2
    layers = [sorted({tensor.layer for tensor in layout.component("kv").tensors}) for layout in layouts]
    assert layers == [[0, 1]] * 4 + [[2, 3, 4]] * 4
    assert [[entry.name for entry in layout.components] for layout in layouts] == [["kv"]] * 4 + [["kv", "aux"]] * 4
    inside = lay_out(read_topology({"model": model, "tp": 4, "cp": {"size": 2, "inside_tp": True}}), 100)
    assert [layout.owned.remainder for layout in inside] == [0, 1, 0, 1]
    assert {layout.owned.unit for layout in inside} == {16}, "a page, where no unit is given"
    whole = lay_out(read_topology({"model": model, "cp": 2, "components": {"kv": {"whole": True}}}), 100)
    assert [layout.owned_of(layout.component("kv")) for layout in whole] == [Ownership()] * 2


def test_order_and_placement_are_strides():
    model = {"layers": 2, "components": {"kv": {"heads": 4, "head_dim": 8}}}

    def strides(**options):
        (layout,) = lay_out(read_topology({"model": model, "page_size": 2, **options}), 3)
        tensors = layout.component("kv").tensors
        return tensors[0].row_stride, {axis.name: axis.stride for axis in tensors[0].axes}, tensors[1].offset

    rows = 2 * (2 + 1)
    assert strides() == (128, {"token": 64, "head": 16, "dim": 2}, 128 * rows)
    assert strides(order="HND") == (128, {"head": 32, "token": 16, "dim": 2}, 128 * rows)
    assert strides(placement="fused")[::2] == (256, 128)
    assert strides(placement="blocks_first")[::2] == (512, 128)


def test_factors_and_scales():
    model = {"layers": 1, "components": {"kv": {"heads": 4, "head_dim": 8}, "state": {"heads": 4, "shape": [2, 6]}}}
    value = {
        "model": model,
        "tp": 2,
        "page_size": 2,
        "order": "HND",
        "cast": True,
        "components": {
            "kv": {"dtype": "float8_e4m3fn", "factor": 2, "scale": {"axes": ["token", "head"], "blocks": {"dim": 4}}},
            "state": {"scale": {"blocks": {"head": 2}}},
        },
    }
    topology = read_topology(value)
    assert topology.cast
    assert not read_topology({"model": model}).cast
    layout = lay_out(topology, 3)[1]
    key, key_scale, value_, _ = layout.component("kv").tensors
    assert (key.role, key.scale, key.factor, key.dtype) == ("key", "key_scale", 2.0, "float8_e4m3fn")
    assert (value_.role, value_.scale) == ("value", "value_scale")
    assert (key_scale.role, key_scale.dtype, key_scale.factor) == ("key_scale", "float32", 1.0)
    assert [(axis.name, axis.size, axis.spans) for axis in key_scale.axes] == [
        ("head", 4, ((2, 2),)),
        ("token", 2, ((0, 2),)),
        ("dim", 2, ((0, 2),)),
    ]
    _, scale = layout.component("state").tensors
    assert [(axis.name, axis.size, axis.spans) for axis in scale.axes] == [("head", 2, ((1, 1),))]


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ({"axes": ["token", "width"]}, "component kv, role key: scales along width, but its axes are token, head, dim"),
        (
            {"axes": ["token"], "blocks": {"dim": 3}},
            "component kv, role key, axis dim: blocks of 3 with one scale do not divide 8",
        ),
        (
            {"axes": ["token"], "blocks": {"head": 4}},
            "component kv, role key, axis head: blocks of 4 with one scale do not divide 2",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(scale, words):
    model = {"layers": 1, "components": {"kv": {"heads": 4, "head_dim": 8}}}
    topology = read_topology({"model": model, "tp": 2, "components": {"kv": {"scale": scale}}})
    with pytest.raises(LayoutError, match=words):
        lay_out(topology, 3)


def test_dtypes_and_kinds():
    components = {
        "kv": {"heads": 1, "head_dim": 4},
        "scale": {"tensors": {"scale": {"axes": {"head": {"size": 1, "cut": "heads"}}, "dtype": "float32"}}},
        "conv": {"blocks": {"q": 4}, "columns": 3},
        "mixed": {"dim": 4, "kind": {"ratio": 4, "window": 64, "ring": True, "reused": False}},
    }
    value = {
        "model": {"layers": 1, "components": components},
        "dtype": "float8_e4m3fn",
        "components": {"conv": {"dtype": "float16"}},
    }
    (layout,) = lay_out(read_topology(value), 10)
    dtypes = {entry.name: entry.tensors[0].dtype for entry in layout.components}
    assert dtypes == {"kv": "float8_e4m3fn", "scale": "float32", "conv": "float16", "mixed": "float8_e4m3fn"}
    assert layout.component("mixed").kind == Kind(ratio=4, window=64, ring=True, reused=False)


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("all", range(10)),
        ("3::4", (3, 7)),
        ("0-2, 9", (0, 1, 2, 9)),
        ([0, "4:8:2"], (0, 4, 6)),
        (":3", (0, 1, 2)),
        (5, (5,)),
    ],
)
def test_layers_in_words(words, layers):
    assert parse_layers(words, 10, "x") == tuple(layers)
    assert parse_layers(show_layers(tuple(layers)), 10, "x") == tuple(layers)
