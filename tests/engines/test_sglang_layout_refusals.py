"""What cannot be described, or does not fit between two sides, is refused with the component and the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import sglang_pools as pools
from sglang_pools import Place, Side
from sglang_world import World, tp

from kvbaton.engines.sglang.layout import Ranks, describe, facts_of
from kvbaton.errors import LayoutError, LayoutMismatch, RowsError

KV_HEADS = 4


def side_of(*, role="prefill", mla=False, page_size=4, heads=KV_HEADS, own=None):
    side = Side(1, page_size, tp=(own or {}).get("tp", (0, 1)))
    side.role, side.own = role, own or {}
    place = Place(np.random.default_rng(1), page_size, 3, 8)
    if mla:
        pools.mla(side, place, np.arange(10), layers=range(2))
    else:
        pools.mha(side, place, np.arange(10), layers=range(2), heads=heads)
    return side, place


def refused(side, *words, **ranks):
    with pytest.raises(LayoutError) as caught:
        describe(side.args, Ranks(role=side.role, **side.own, **ranks))
    for word in words:
        assert str(word) in str(caught.value)


def test_heads_that_nobody_tells():
    side, _ = side_of(role="decode", own={"tp": (1, 2)})
    refused(side, "component kv", "2 ranks", "decode", "total_kv_heads")


def test_the_heads_of_one_rank_are_taken_from_its_pool():
    side, _ = side_of(role="decode")
    layout = describe(side.args, Ranks(role="decode")).layout
    assert {axis.name: axis.size for axis in layout.component("kv").tensors[0].axes}["channel"] == KV_HEADS * 8


def test_heads_that_the_pool_was_not_made_with():
    side, _ = side_of(own={"tp": (0, 2)})
    side.args.kv_head_num, side.args.total_kv_head_num = 2, 8
    refused(side, "kv_head_num is 2", "holds 4 of 8")


def test_heads_that_do_not_divide_over_the_ranks():
    side, _ = side_of(own={"tp": (0, 3)}, heads=3)
    refused(side, "component kv", "4 does not divide over 3 ranks", total_kv_heads=4)


def test_pages_that_do_not_divide_over_their_tokens():
    side, _ = side_of()
    side.args.page_size = 5
    refused(side, "component kv", "256 bytes", "5 tokens", total_kv_heads=KV_HEADS)


@pytest.mark.parametrize("name", ["kv_data_lens", "kv_item_lens", "aux_item_lens"])
def test_lists_of_unequal_length(name):
    side, place = side_of()
    side.aux(place)
    getattr(side.args, name).pop()
    refused(side, f"{name} has", total_kv_heads=KV_HEADS)


def test_a_list_that_is_missing():
    side, _ = side_of()
    del side.args.kv_item_lens
    refused(side, "kv_item_lens is not given")


def test_keys_without_values():
    side, _ = side_of()
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
        getattr(side.args, name).pop()
    refused(side, "3 buffers are not keys and values", total_kv_heads=KV_HEADS)


def test_layer_ids_of_other_buffers():
    side, _ = side_of()
    side.args.kv_layer_ids = [1, 2]
    refused(side, "kv_layer_ids has 2 entries for 4 buffers", total_kv_heads=KV_HEADS)
    side.args.kv_layer_ids = [1, 2, 1, 3]
    refused(side, "do not name the same layers", total_kv_heads=KV_HEADS)


def test_a_state_type_of_tomorrow():
    side, _ = side_of()
    pools.alike(side, "flux", [1], count=1, row_bytes=8, total=8)
    refused(side, "component flux", "not known", "mamba, swa", total_kv_heads=KV_HEADS)


def test_a_state_whose_slot_is_not_made_of_its_channels():
    side, place = side_of()
    pools.mamba(side, place, layers=[0])
    side.args.state_dim_per_tensor[0][0] += 1
    refused(side, "component mamba", "tensor 0", "33 channels", total_kv_heads=KV_HEADS)


def test_a_stage_of_a_pipeline_that_does_not_know_its_layers():
    side, _ = side_of(role="decode", own={"pp": (1, 2)})
    refused(side, "component kv", "pp rank 1 of 2 on the decode side", "start_layer", total_kv_heads=KV_HEADS)
    describe(side.args, Ranks(role="decode", pp=(1, 2), start_layer=2, total_kv_heads=KV_HEADS))


def test_a_sliding_window_on_a_stage_needs_its_layer_numbers():
    side, place = side_of(own={"pp": (0, 2)})
    side.args.prefill_start_layer = 0
    pools.window(side, place, np.arange(2), layers=range(2), heads=KV_HEADS)
    refused(side, "component kv", "layers['kv']", total_kv_heads=KV_HEADS)
    layers = {"kv": [0, 2], "swa": [1, 3]}
    described = describe(side.args, Ranks(role="prefill", pp=(0, 2), layers=layers, total_kv_heads=KV_HEADS))
    assert [tensor.layer for tensor in described.layout.component("swa").tensors] == [1, 3, 1, 3]
    refused(
        side, "component swa", "1 layers are given", "lists 2", layers=layers | {"swa": [1]}, total_kv_heads=KV_HEADS
    )


def test_context_parallel_decode_of_keys_and_values():
    side, _ = side_of(own={"dcp": (0, 2)})
    refused(side, "decode context parallelism over 2 ranks", "MLA only", total_kv_heads=KV_HEADS)


def test_pages_that_ranks_share_by_their_number():
    side, _ = side_of(mla=True)
    refused(side, "2 ranks share its pages by page number", is_mla=True, kv_shard=(0, 2))


def test_pages_of_states_under_decode_context_parallelism():
    side, place = side_of(mla=True, own={"dcp": (0, 2)})
    pools.alike(side, "qsa_compressed", place.pages, count=2, row_bytes=8, total=8)
    refused(side, "component qsa_compressed", "2 ranks", "dcp size 1", is_mla=True)


def test_a_draft_beside_an_envelope():
    side, place = side_of()
    pools.mha(side, place, np.arange(4), layers=[0], heads=KV_HEADS, draft=True)
    refused(side, "component draft", "draft=False", unified=True)


def test_aux_buffers_of_an_order_that_is_not_known():
    side, place = side_of()
    side.aux(place, widths=(64,) * 9)
    refused(side, "component aux", "9 buffers", total_kv_heads=KV_HEADS)


@pytest.mark.parametrize("order", ["vectorized_5d", "hnd"])
def test_pages_in_an_order_that_cannot_be_cut(order):
    """Between as many ranks they move as a whole; to other ranks, or to another order, nothing moves."""

    def fill(world, side, place):
        pages = world.pages(side.role)
        pools.opaque(side, place, pages, widths=[64, 64, 64, 64], per_rank=True)

    World(cut=17).run(fill, tp(2), tp(2), total_kv_heads=KV_HEADS, kv_cache_layout=order)
    with pytest.raises(LayoutMismatch, match=r"attention_tp: size is 2 at the source and 1"):
        World().run(fill, tp(2), tp(1), total_kv_heads=KV_HEADS, kv_cache_layout=order)
    world = World()
    sources = world.ranks("prefill", fill, tp(2), total_kv_heads=KV_HEADS, kv_cache_layout=order)
    with pytest.raises(LayoutMismatch, match="component kv"):
        world.hand_over(sources, world.ranks("decode", fill, tp(2), total_kv_heads=KV_HEADS))


def test_a_window_in_another_order_is_not_cut():
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        pools.window(side, place, np.arange(2), layers=range(1), heads=KV_HEADS)
        side.args.swa_kv_cache_layout = "vectorized_5d" if side.role == "prefill" else "nhd"

    with pytest.raises(LayoutMismatch, match="component"):
        World().run(fill, tp(1), tp(1), lambda *_: [[1, 2]], total_kv_heads=KV_HEADS, kv_cache_layout="nhd")


def test_a_convolution_of_unknown_blocks_is_not_cut():
    """Mamba 2 with neither `conv_shard_groups` nor `conv_blocks`: SGLang's own back-ends cut through x, B and C."""

    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        pools.mamba(side, place, layers=[1], given=False)

    def slot(world, side, place):
        return [[place.slot]]

    World().run(fill, tp(2), tp(2), slot, total_kv_heads=KV_HEADS)
    with pytest.raises(LayoutMismatch, match="component mamba, role state0"):
        World().run(fill, tp(2), tp(1), slot, total_kv_heads=KV_HEADS)


def test_draft_heads_that_several_ranks_would_share_are_not_guessed():
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=2)
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=4, draft=True, name="draft")

    World().run(fill, tp(4), tp(4), total_kv_heads=2)
    with pytest.raises(LayoutMismatch, match=r"component draft.*attention_tp"):
        World().run(fill, tp(4), tp(8), total_kv_heads=2)
    World().run(fill, tp(4), tp(8), total_kv_heads=2, draft_kv_heads=4)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ("bfloat16", "float16", "dtype is bfloat16 at the source and float16"),
        ("bfloat16", "fp8_e4m3", "component kv"),
        ("fp8_e4m3", "fp8_e5m2", "axes are channel of fp8_e4m3 at the source and channel of fp8_e5m2"),
    ],
)
def test_caches_of_other_dtypes(prefill, decode, words):
    """Also where their elements are of the same size."""

    def fill(world, side, place):
        dtype = {"prefill": prefill, "decode": decode}[side.role]
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        side.args.kv_cache_dtype_str = dtype

    with pytest.raises(LayoutMismatch, match=words):
        World().run(fill, tp(2), tp(1), total_kv_heads=KV_HEADS)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "auto", "mxfp8"])
def test_caches_of_one_dtype(dtype):
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS, draft=True, name="draft")
        side.args.kv_cache_dtype_str = dtype

    World().run(fill, tp(2), tp(1), total_kv_heads=KV_HEADS)


def test_what_auto_stands_for():
    """It is the dtype of the model, which is an option of each side as well."""

    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        side.args.kv_cache_dtype_str = {"prefill": "auto", "decode": "bf16"}[side.role]

    World().run(fill, tp(1), tp(2), total_kv_heads=KV_HEADS, model_dtype="bfloat16")
    with pytest.raises(LayoutMismatch, match="dtype is float16 at the source and bfloat16"):
        World().run(fill, tp(1), tp(2), total_kv_heads=KV_HEADS, model_dtype="float16")


@pytest.mark.parametrize("mla", [False, True])
def test_a_cache_whose_scales_are_not_listed(mla):
    side, _ = side_of(mla=mla)
    side.args.kv_cache_dtype_str = "nvfp4"
    refused(side, "component kv", "block scales of a nvfp4 cache", is_mla=mla, total_kv_heads=KV_HEADS)


def test_page_sizes_that_differ_under_a_window():
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        pools.window(side, place, np.arange(2), layers=range(1), heads=KV_HEADS)

    with pytest.raises(LayoutMismatch, match=r"component swa.*axis place: size is 4 at the source and 8"):
        World(decode_page=8).run(fill, tp(1), tp(1), lambda *_: [[1, 2]], total_kv_heads=KV_HEADS)


@pytest.mark.parametrize("kind", ["dsa", "qsa_pending", "c128_state", "swa_ring", "request_row", "minimax_index_k"])
def test_rows_of_other_sizes(kind):
    def fill(world, side, place):
        pools.mla(side, place, world.positions(side.role), layers=range(2))
        width = {"prefill": 20, "decode": 24}[side.role]
        pools.alike(side, kind, [1, 2], count=2, row_bytes=width, total=8, layers=[1, 2])

    with pytest.raises(LayoutMismatch, match=rf"component {kind}.*axis byte: size is 20 at the source and 24"):
        World().run(fill, tp(1), tp(1), lambda *_: [[1, 2]], is_mla=True)


def test_slots_of_other_sizes():
    """The dtype of a state is an option of each side: its slots have other sizes, and are not cut into each other."""

    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(1), heads=KV_HEADS)
        pools.mamba(side, place, layers=[1], columns=3 if side.role == "prefill" else 4)

    with pytest.raises(LayoutMismatch, match=r"component mamba, role state0.*axis byte: size is 6 .* and 8"):
        World().run(fill, tp(1), tp(2), lambda _, __, place: [[place.slot]], total_kv_heads=KV_HEADS)


PLAIN = {
    "ids": 64,
    "cached": 64,
    "logprobs": 64,
    "logprob ids": 64,
    "top": 128,
    "top ids": 128,
    "topk": 64,
    "topk ids": 128,
    "hidden": 96,
    "room": 64,
}
"""SGLang's metadata without options, and the bytes of a row of each."""


def metadata(*, mask=False, seeds=False, checked=False):
    """The same with options, in SGLang's order."""
    listed = list(PLAIN.items())
    first, last = listed[:6], listed[6:9]
    middle = [("mask", 64), ("mask ids", 512), ("mask lp", 512)] if mask else []
    end = [("seeds", 512)] * seeds + [("room", 64)] + [("sum", 64)] * checked
    return first + middle + last + end


@pytest.mark.parametrize(
    "options",
    [
        {"mask": True},
        {"seeds": True},
        {"checked": True},
        {"seeds": True, "checked": True},
        {"mask": True, "seeds": True},
        {"mask": True, "checked": True},
        {"mask": True, "seeds": True, "checked": True},
    ],
)
def test_metadata_of_other_options_do_not_take_each_others_place(options):
    """An option of one side puts a buffer into the middle of its list: what both have is matched all the same."""

    def fill(world, side, place):
        for name, width in listed[side.role]:
            here, wanted = side.buffer((6, width))
            side.list("aux", here, width)
            wanted[place.aux] = pools.logical("aux", name, shape=(width,))
        side.aux = lambda *_, **__: None

    listed = {"prefill": metadata(**options), "decode": metadata()}
    World().run(fill, tp(1), tp(1))
    listed = {"prefill": metadata(), "decode": metadata(**options)}
    with pytest.raises(LayoutMismatch, match="component aux"):
        World().run(fill, tp(1), tp(1))
    listed["prefill"] = metadata(**options)
    World().run(fill, tp(1), tp(1))


def test_payloads_that_cannot_be_read():
    side, place = side_of(mla=True)
    pools.alike(side, "dsa", place.pages, count=2, row_bytes=8, total=8)
    made = [side.buffer((6, 8 * 256))[0] for _ in range(4)]
    side.state("dsa_tail", made, [8 * 256] * 4)
    described = describe(side.args, Ranks(role="decode", is_mla=True))
    for payloads, words in (
        (None, "0 state payloads are given for 2"),
        ([[1]], "1 state payloads"),
        ([[1.5], []], "component dsa: indices are of type float64"),
        ([[1], [1, 2]], "component dsa_tail: a payload has 2 numbers"),
        ([[1], [1, 0, 3, 0, 0, 12]], "12 entries by the payload, 8 are registered"),
        ([[1], [1, 6, 3, 0, 0, 8]], "leaves the ring of 8"),
    ):
        with pytest.raises(RowsError, match=words.replace("(", r"\(")):
            described.state_rows(payloads, 10, 0)
    assert described.state_rows([None, []], 10, 0).slots["dsa"].tolist() == []


def test_facts_of_a_model():
    shape = SimpleNamespace(conv_dim=32, intermediate_size=16)
    text = SimpleNamespace(model_type="nemotron_h", mamba2_cache_params=SimpleNamespace(shape=shape))
    config = SimpleNamespace(
        hf_config=text,
        hf_text_config=SimpleNamespace(swa_num_key_value_heads=8),
        full_attention_layer_ids=[0, 2, 4],
        swa_attention_layer_ids=[1, 3, 5],
        get_total_num_kv_heads=lambda: 4,
        dtype="torch.bfloat16",
    )
    facts = facts_of(config, (0, 4))
    assert (facts.total_kv_heads, facts.swa_kv_heads, facts.conv_blocks) == (4, 8, (16, 8, 8))
    assert facts.model_dtype == "bfloat16"
    assert (facts.layers["kv"], facts.layers["swa"]) == ((0, 2), (1, 3))
    text.model_type = "qwen3_next"
    config.hf_text_config = SimpleNamespace()
    other = facts_of(config)
    assert (other.conv_blocks, other.swa_kv_heads, other.layers["swa"]) == (None, 4, (1, 3, 5))
