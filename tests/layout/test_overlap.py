import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import LayoutError
from kvbaton.layout import (
    PAGED,
    Axis,
    Component,
    RankLayout,
    Tensor,
    check_layout,
    conv_state,
    paged_kv,
    recurrent_state,
    required_bytes,
)

KV = {"layers": range(2), "rows": 6, "page_size": 4, "heads": 2, "head_dim": 8, "dtype": "bfloat16"}
replace = msgspec.structs.replace


def check(*components):
    check_layout(RankLayout(components), required_bytes(components))


def test_builders_that_were_given_no_place():
    conv = conv_state(layers=(2,), rows=3, blocks=(4, 4), columns=3, dtype="bfloat16")
    with pytest.raises(LayoutError, match=r"component kv, role key, layer 0: shares .* region 0 with component conv"):
        check(paged_kv(**KV), conv)
    check(paged_kv(**KV), replace(conv, tensors=tuple(replace(each, region=1) for each in conv.tensors)))
    check(paged_kv(**KV), conv_state(layers=(2,), rows=3, blocks=(4, 4), columns=3, dtype="bfloat16", offset=1 << 14))


@pytest.mark.parametrize("shift", [0, 2, 64, 512, -768])
def test_values_in_the_place_of_keys(shift):
    kv = paged_kv(**KV)
    key, value, *rest = kv.tensors
    moved = replace(value, offset=value.offset - key.rows * key.row_stride + shift)
    layout = RankLayout((replace(kv, tensors=(key, moved, *rest)),))
    if shift < 0:
        moved = replace(value, offset=value.offset + shift)
        layout = RankLayout((replace(kv, tensors=(key, moved, *rest)),))
    with pytest.raises(LayoutError, match="shares memory"):
        check_layout(layout, [1 << 16])


def test_components_of_one_pool_may_overlay_each_other():
    state = recurrent_state("state", layers=(4,), rows=4, heads=2, shape=(4, 4), dtype="float32")
    kv = paged_kv(**KV)
    with pytest.raises(LayoutError, match="the same pool"):
        check(kv, state)
    with pytest.raises(LayoutError, match="the same pool"):
        check(replace(kv, pool="blocks"), replace(state, pool="others"))
    check(replace(kv, pool="blocks"), replace(state, pool="blocks"))


@pytest.mark.parametrize("placement", ["layers_first", "fused", "blocks_first"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_tensors_that_lie_inside_each_other_without_meeting(placement, order):
    check(paged_kv(placement=placement, order=order, **KV))


def test_keys_and_values_packed_by_head():
    # As one engine packs them: in each head the key, then the value.
    def tensor(role, offset):
        axes = (Axis("head", 2, 64, ((0, 2),)), Axis("token", 2, 32, ((0, 2),)), Axis("dim", 8, 2, ((0, 8),)))
        return Tensor(role, 0, 0, offset, 5, 128, "bfloat16", axes)

    check_layout(RankLayout((Component("kv", PAGED, (tensor("key", 0), tensor("value", 16)), page_size=2),)), [1 << 12])
    crossing = (tensor("key", 0), tensor("value", 14))
    with pytest.raises(LayoutError, match="shares memory"):
        check_layout(RankLayout((Component("kv", PAGED, crossing, page_size=2),)), [1 << 12])


@given(
    st.integers(0, 400),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from((2, 8)),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_what_is_refused_does_share_a_byte(offset, rows, dims, page, padding, rest):
    def tensor(role, at, rows, dims):
        axes = (Axis("token", page, 2 * dims + padding, ((0, page),)), Axis("dim", dims, 2, ((0, dims),)))
        return Tensor(role, 0, 0, at, rows, page * (2 * dims + padding) + rest, "bfloat16", axes)

    def touched(tensor):
        row, token, dim, byte = np.ogrid[: tensor.rows, :page, : tensor.axes[1].size, :2]
        at = tensor.offset + row * tensor.row_stride + token * tensor.axes[0].stride + dim * 2 + byte
        return set(at.reshape(-1).tolist())

    pair = tensor("key", 64, 3, 3), tensor("value", offset, rows, dims)
    layout = RankLayout((Component("kv", PAGED, pair, page_size=page),))
    shares = bool(touched(pair[0]) & touched(pair[1]))
    try:
        check_layout(layout, [1 << 14])
    except LayoutError:
        assert shares
    else:
        # Corners are enough where one of them is a solid block.
        assert not shares or padding
