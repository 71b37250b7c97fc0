import pytest

from kvbaton.errors import LayoutError, ShardError
from kvbaton.layout import (
    SLOT,
    Field,
    RankLayout,
    aux_fields,
    check_layout,
    component,
    conv_state,
    dense_axes,
    index_keys,
    mla_latent,
    paged_kv,
    recurrent_state,
    replicated_spans,
    required_bytes,
    shard,
    sharded_spans,
)


@pytest.mark.parametrize(("total", "rank", "size", "span"), [(8, 0, 1, (0, 8)), (8, 1, 2, (4, 4)), (6, 2, 3, (4, 2))])
def test_shard(total, rank, size, span):
    assert shard(total, rank, size) == span


def test_a_block_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ShardError, match="component conv, axis channel, block q: 6 does not divide over 4 ranks"):
        conv_state(layers=(0,), rows=1, blocks={"q": 6, "k": 8}, columns=3, dtype="bfloat16", rank=0, size=4)
    with pytest.raises(ShardError, match="block 1: 6 does not divide over 4"):
        sharded_spans((8, 6), 0, 4)


def test_blocks_are_cut_one_by_one():
    assert sharded_spans({"q": 8, "k": 8, "v": 16}, 0, 2) == ((0, 4), (8, 4), (16, 8))
    assert sharded_spans({"q": 8, "k": 8, "v": 16}, 1, 2) == ((4, 4), (12, 4), (24, 8))
    assert sharded_spans((32,), 1, 2) == ((16, 16),)


def test_replicated_heads():
    assert [replicated_spans(2, rank, 8) for rank in range(8)] == [((0, 1),)] * 4 + [((1, 1),)] * 4
    assert [replicated_spans(2, rank, 4)[0][0] for rank in range(4)] == [0, 0, 1, 1]
    assert replicated_spans(8, 1, 4) == ((2, 2),)
    with pytest.raises(ShardError, match="3 heads cannot be spread evenly over 4 ranks"):
        replicated_spans(3, 0, 4, what="component kv, axis head")
    with pytest.raises(ShardError, match="component kv, axis head: 6 does not divide over 4"):
        replicated_spans(6, 0, 4, what="component kv, axis head")


def test_dense_strides():
    axes, size = dense_axes([("token", 4, None), ("head", 8, ((2, 2),)), ("dim", 16, None)], "bfloat16")
    assert [(axis.name, axis.size, axis.stride) for axis in axes] == [("token", 4, 64), ("head", 8, 32), ("dim", 16, 2)]
    assert size == 4 * 2 * 16 * 2


KV = {"layers": (2, 5), "rows": 3, "page_size": 4, "heads": 2, "head_dim": 8, "dtype": "uint8"}


@pytest.mark.parametrize(
    ("placement", "offsets", "row_stride"),
    [
        ("layers_first", [0, 192, 384, 576], 64),
        ("fused", [0, 64, 384, 448], 128),
        ("blocks_first", [0, 64, 128, 192], 256),
    ],
)
def test_placements(placement, offsets, row_stride):
    kv = paged_kv(placement=placement, **KV)
    assert [tensor.offset for tensor in kv.tensors] == offsets
    assert {tensor.row_stride for tensor in kv.tensors} == {row_stride}
    assert [(t.role, t.layer) for t in kv.tensors] == [
        ("key", 2),
        ("value", 2),
        ("key", 5),
        ("value", 5),
    ]
    assert required_bytes([kv]) == [4 * 64 * 3]


def test_a_region_for_each():
    assert [t.region for t in paged_kv(region_each=True, region=1, **KV).tensors] == [1, 2, 3, 4]
    fused = paged_kv(region_each=True, placement="fused", **KV)
    assert [(t.region, t.offset) for t in fused.tensors] == [(0, 0), (0, 64), (1, 0), (1, 64)]
    assert required_bytes([fused]) == [384, 384]
    with pytest.raises(LayoutError, match="placement 'rows_first'"):
        paged_kv(placement="rows_first", **KV)


def test_orders():
    nhd, hnd = (paged_kv(order=order, **KV).tensors[0].axes for order in ("NHD", "HND"))
    assert {axis.name: axis.stride for axis in nhd} == {"token": 16, "head": 8, "dim": 1}
    assert {axis.name: axis.stride for axis in hnd} == {"token": 8, "head": 32, "dim": 1}


def test_every_builder_makes_a_sound_layout():
    pages = {"layers": range(2), "rows": 3, "page_size": 4}
    slots = {"layers": range(2), "rows": 3, "rank": 1, "size": 2}
    components = (
        paged_kv(region=0, **{**KV, "head_spans": ((1, 1),)}),
        paged_kv("local", region=1, window=6, value_dim=3, **KV),
        mla_latent(region=2, latent_dim=12, dtype="bfloat16", **pages),
        index_keys(region=3, index_dim=5, dtype="float8_e4m3fn", **pages),
        conv_state(region=4, blocks=(8, 8, 16), columns=3, dtype="bfloat16", **slots),
        recurrent_state(region=5, heads=4, shape=(3, 5), dtype="float32", **slots),
        aux_fields({"token": ("int64", 1), "logits": ("float32", 7)}, rows=9, region=6),
    )
    check_layout(RankLayout(components), required_bytes(components))
    assert [str(entry.kind) for entry in components] == [
        "paged",
        "window of 6 tokens",
        "paged",
        "paged",
        "slot",
        "slot",
        "aux",
    ]
    assert components[4].tensors[0].row_stride == 16 * 3 * 2
    assert components[6].tensors[0].row_stride == 8 + 7 * 4


def test_a_component_of_ones_own_fields():
    made = component("x", SLOT, [Field("a", "int8", (("i", 3, None),)), Field("b", "int8", ())], layers=(7,), rows=2)
    assert [(t.role, t.offset, t.row_stride) for t in made.tensors] == [("a", 0, 3), ("b", 6, 1)]
    check_layout(RankLayout((made,)), [8])
