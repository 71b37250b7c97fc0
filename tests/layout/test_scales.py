"""Scales that do not hold together are refused by name, and the builders make those that do."""

import msgspec
import pytest

from kvbaton.errors import LayoutError
from kvbaton.layout import (
    PAGED,
    SLOT,
    Axis,
    Field,
    RankLayout,
    block_sizes,
    check_layout,
    component,
    required_bytes,
)

replace = msgspec.structs.replace
FP8 = "float8_e4m3fn"
SPANS = ((2, 2), (6, 2))
AXES = (("token", 4, None), ("head", 8, SPANS), ("dim", 16, None))


def build(
    *, scale=(("token", 4, None), ("head", 4, ((1, 1), (3, 1)))), axes=AXES, factor=0.5, kind=PAGED, dtype="float32"
):
    fields = [Field("key", FP8, axes, "key_scale", factor), Field("key_scale", dtype, scale)]
    made = component("kv", kind, fields, layers=(0, 1), rows=3, page_size=4 if kind.has_tokens else 1)
    return RankLayout((made,))


def check(layout):
    check_layout(layout, required_bytes(layout.components))


def edited(role, **changes):
    part = build().components[0]
    tensors = tuple(replace(each, **changes) if each.role == role else each for each in part.tensors)
    return RankLayout((replace(part, tensors=tensors),))


def test_blocks_over_several_spans():
    layout = build()
    check(layout)
    key, scale = layout.components[0].tensors[:2]
    assert (key.scale, key.factor) == ("key_scale", 0.5)
    assert block_sizes(key, scale) == {"token": 1, "head": 2}


@pytest.mark.parametrize(
    "scale",
    [
        (("token", 4, None),),
        (("token", 4, None), ("dim", 4, None)),
        (("dim", 2, None), ("token", 4, None), ("head", 8, SPANS)),
    ],
)
def test_any_axes_in_any_order(scale):
    check(build(scale=scale))


def test_rows_without_tokens_may_share_one_scale():
    axes = (("head", 8, SPANS), ("dim", 16, None))
    check(build(scale=(), axes=axes, kind=SLOT))


NOT_SOUND = {
    "no such role": (edited("key", scale="other"), r"role key, layer 0: its scale 'other' is no role"),
    "dtype": (build(dtype="bfloat16"), "dtype of its scale key_scale is bfloat16, it must be float32"),
    "a scale of a scale": (edited("key_scale", scale="key"), "key_scale has a scale or factor itself"),
    "a factor of a scale": (edited("key_scale", factor=2.0), "key_scale has a scale or factor itself"),
    "its own scale": (edited("key", scale="key"), "dtype of its scale key is float8_e4m3fn"),
    "rows": (edited("key_scale", rows=2), "it has 3 rows, but its scale key_scale has 2"),
    "an axis of its own": (
        build(scale=(("token", 4, None), ("group", 2, None))),
        "scale key_scale, axis group: the tensor has no such axis, it has token, head, dim",
    ),
    "a size that does not divide": (
        build(scale=(("token", 4, None), ("dim", 3, None))),
        "axis dim: its size is 3, which does not divide the 16 of the tensor",
    ),
    "other spans": (
        build(scale=(("token", 4, None), ("head", 4, ((0, 2),)))),
        r"axis head: its spans \(\(0, 2\),\) hold the scales of \(\(0, 4\),\) .* but .* \(\(2, 2\), \(6, 2\)\)",
    ),
    "no tokens": (build(scale=(("head", 8, SPANS),)), "key_scale, layer 0: kind paged needs the axis token"),
    "factor 0": (edited("key", factor=0.0), "factor is 0.0, it must be from"),
    "a negative factor": (edited("key", factor=-1.0), "factor is -1.0, it must be from"),
    "a huge factor": (edited("key", factor=2.0**61), r"factor is 2.3\d*e\+18, it must be from"),
    "an infinite factor": (edited("key", factor=float("inf")), "factor is inf"),
    "a factor that is no number": (edited("key", factor=float("nan")), "factor is nan"),
    "a factor of text": (edited("key", factor="2"), "factor is of type str, not a float"),
    "a scale that is no text": (edited("key", scale=7), "scale is 7, not the role of a tensor"),
}


@pytest.mark.parametrize(("layout", "message"), NOT_SOUND.values(), ids=NOT_SOUND.keys())
def test_refused(layout, message):
    with pytest.raises(LayoutError, match=f"component kv, role key(_scale)?, layer 0.*{message}|{message}"):
        check(layout)


def test_a_scale_belongs_to_one_tensor():
    part = build().components[0]
    twin = replace(part.tensors[0], role="value")
    with pytest.raises(LayoutError, match="role value, layer 0: its scale key_scale is already that of key"):
        check(RankLayout((replace(part, tensors=(*part.tensors, twin)),)))


def test_it_travels_with_the_layout():
    layout = build()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=RankLayout) == layout
    assert isinstance(layout.components[0].tensors[0].axes[0], Axis)
