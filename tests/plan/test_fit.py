"""Two sides that do not fit each other are refused before any byte moves, by name and with both numbers."""

import msgspec
import pytest

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import (
    SLOT,
    Axis,
    Component,
    Field,
    Ownership,
    RankLayout,
    Tensor,
    component,
    conv_state,
    mla_latent,
    paged_kv,
    replicated_spans,
)
from kvbaton.plan import assign, compile_pair

replace = msgspec.structs.replace
KV = {"layers": range(2), "rows": 9, "page_size": 4, "heads": 4, "head_dim": 8, "dtype": "bfloat16"}


def layout(**changes):
    return RankLayout((paged_kv(**{**KV, **changes}),))


def edited(**changes):
    """The usual layout with another first tensor."""
    kv = layout().components[0]
    return RankLayout((replace(kv, tensors=(replace(kv.tensors[0], **changes), *kv.tensors[1:])),))


NOT_FITTING = {
    "dtype": (
        layout(),
        layout(dtype="float8_e4m3fn"),
        r"component kv, role key, layer 0: dtype is bfloat16 at the source and float8_e4m3fn .* 256 and 128 bytes",
    ),
    "axis size": (layout(), layout(head_dim=16), r"role key, layer 0, axis dim: size is 8 at the source and 16"),
    "heads of the model": (layout(), layout(heads=2), r"layer 0, axis head: size is 4 at the source and 2"),
    "kind": (
        layout(),
        layout(window=5),
        r"kv: its kind is 'paged' at the source .* and 'window of 5 tokens'",
    ),
    "window": (
        layout(window=4),
        layout(window=5),
        "'window of 4 tokens' at the source .* 'window of 5",
    ),
    "layers": (layout(), layout(layers=(0, 7)), r"role key, layer 7: .* the sources have layers 0 to 1 \(2 of them\)"),
    "axes": (
        edited(axes=layout().components[0].tensors[0].axes[:2]),
        layout(),
        r"role key, layer 0: axes are head at the source and dim, head at the destination",
    ),
    "component": (layout(name="kv"), layout(name="other"), r"no source rank has the component other; .* have kv"),
    "elided at the source": (edited(rows=0), layout(), r"layer 0: elided at the source \(0 rows\), .* has 9 rows"),
}


@pytest.mark.parametrize(("source", "destination", "message"), NOT_FITTING.values(), ids=NOT_FITTING.keys())
def test_refused(source, destination, message):
    with pytest.raises(LayoutMismatch, match=message):
        assign([source], destination)


def test_a_pair_by_itself_is_refused_too():
    for name in ("dtype", "axis size", "kind", "elided at the source"):
        source, destination, message = NOT_FITTING[name]
        with pytest.raises(LayoutMismatch, match=message):
            compile_pair(source, destination)


def test_d11_item_lengths_that_differ_are_refused_before_any_data():
    # 32768 bytes an item at the source (two bytes an element), 16384 at the destination (one byte).
    source = RankLayout((mla_latent(layers=(0,), rows=64, page_size=32, latent_dim=512, dtype="bfloat16"),))
    destination = RankLayout((mla_latent(layers=(0,), rows=128, page_size=32, latent_dim=512, dtype="uint8"),))
    with pytest.raises(LayoutMismatch, match=r"bfloat16 .* uint8 .*32768 and 16384 bytes"):
        assign([source], destination)


def test_a_missing_source_rank_is_named_by_what_it_would_hold():
    with pytest.raises(LayoutMismatch, match=r"axis head: the destination needs 2\.\.4 of 4, .* between 0 and 2"):
        assign([layout(head_spans=replicated_spans(4, 0, 2))], layout())


def test_a_missing_context_rank_is_named_by_a_token():
    sources = [replace(layout(), owned=Ownership(2, 3, remainder)) for remainder in (0, 2)]
    with pytest.raises(LayoutMismatch, match=r"axis token: the destination owns token 2 .* none of the 2 source ranks"):
        assign(sources, layout())
    assign(sources, replace(layout(), owned=Ownership(2, 3, 2)))


def test_blocks_that_only_together_cover_the_axes():
    slot = conv_state(layers=(0,), rows=1, blocks=(4,), columns=2, dtype="uint8").tensors[0]
    corners = []
    for channel, column in (((0, 2), (0, 1)), ((2, 2), (1, 1))):
        axes = replace(slot.axes[0], spans=(channel,)), replace(slot.axes[1], spans=(column,))
        corners.append(conv(replace(slot, axes=axes)))
    with pytest.raises(
        LayoutMismatch, match=r"needs the block channel 0\.\.2, column 1\.\.2, but none of 2 source ranks"
    ):
        assign(corners, conv(slot))


def conv(tensor):
    state = conv_state(layers=(0,), rows=1, blocks=(4,), columns=2, dtype="uint8")
    return RankLayout((replace(state, tensors=(tensor,)),))


def test_ownerships_that_hardly_repeat_are_refused():
    layouts = [replace(layout(), owned=Ownership(1, modulus, 0)) for modulus in (1021, 1031)]
    with pytest.raises(LayoutMismatch, match=r"axis token: .* 1048576 units, and .* are allowed"):
        assign(layouts[:1], layouts[1])


def test_what_one_side_does_not_have_or_elides_moves_nothing():
    latent = mla_latent(layers=(0,), rows=9, page_size=4, latent_dim=3, dtype="uint8")
    source = RankLayout((*layout().components, latent))
    assert compile_pair(source, layout()).components == ("kv",)
    elided = replace(latent, tensors=(replace(latent.tensors[0], rows=0),))
    destination = RankLayout((*layout().components, elided))
    for held in (source, RankLayout((*layout().components, elided))):
        (share,) = assign([held], destination)
        assert share.components == ("kv",)
        assert compile_pair(held, destination, share).components == ("kv",)


def test_a_share_of_other_layouts_is_refused():
    (share,) = assign([layout()], layout())
    with pytest.raises(LayoutMismatch, match="the share names it, but the source has no such tensor"):
        compile_pair(layout(layers=(0,)), layout(), share)
    with pytest.raises(LayoutMismatch, match="the share names it, but the source has no such component"):
        compile_pair(RankLayout(()), layout(), share)


def scattered(counts):
    """A slot tensor of one byte an element: every other index of each axis."""
    axes, stride = [], 1
    for number, count in enumerate(counts):
        spans = tuple((2 * i, 1) for i in range(count))
        axes.append(Axis(f"axis{number}", 2 * count, stride, spans))
        stride *= count
    return RankLayout((Component("state", SLOT, (Tensor("state", 0, 0, 0, 2, stride, "uint8", tuple(axes)),)),))


def test_layouts_in_too_many_cells_are_refused():
    with pytest.raises(LayoutMismatch, match=r"role state, layer 0: the spans .* make 40000 cells; at most 16384"):
        assign([scattered((200, 200))], scattered((200, 200)))


def test_rows_in_too_many_boxes_are_refused():
    axes = [(f"axis{number}", 41, None) for number in range(5)]
    layouts = []
    for order in (axes, axes[::-1]):
        fields = [Field("state", "uint8", tuple(order))]
        layouts.append(RankLayout((component("state", SLOT, fields, layers=(0,), rows=1),)))
    with pytest.raises(LayoutMismatch, match=r"role state, layer 0: .* break each row into more than 65536 boxes"):
        compile_pair(*layouts)
    assert compile_pair(layouts[0], layouts[0]).components == ("state",)
