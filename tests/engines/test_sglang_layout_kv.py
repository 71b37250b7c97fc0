"""The main cache of SGLang's ranks: what one side lays out as SGLang does must come out where the other expects it."""

from __future__ import annotations

import numpy as np
import pytest
import sglang_pools as pools
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_world import World, tp

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import Ownership

KV_HEADS = 4


def kv_of(heads=KV_HEADS, layers=range(3), dims=(8, 8)):
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=layers, heads=heads, dims=dims)

    return fill


@pytest.mark.parametrize(
    ("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 2), (2, 8), (4, 8), (8, 8)]
)
@pytest.mark.parametrize("pages", [(1, 1), (4, 4), (1, 16), (16, 1), (4, 16)])
def test_keys_and_values_between_any_tp_and_page_size(prefill, decode, pages):
    world = World(prefix=16, cut=33, prefill_page=pages[0], decode_page=pages[1])
    world.run(kv_of(dims=(8, 6)), tp(prefill), tp(decode), total_kv_heads=KV_HEADS)


@given(
    sizes=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    heads=st.sampled_from([1, 2, 4, 8]),
    pages=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    tokens=st.integers(1, 50),
    prefix_pages=st.integers(0, 6),
    cut=st.integers(0, 50),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
@settings(max_examples=40, deadline=None)
def test_any_attention(sizes, heads, pages, tokens, prefix_pages, cut, dims):
    prefix = min(prefix_pages * 8, (tokens - 1) // 8 * 8)
    cut = max(prefix, min(cut, tokens))
    world = World(tokens=tokens, prefix=prefix, cut=cut, prefill_page=pages[0], decode_page=pages[1])
    world.run(kv_of(heads, range(2), dims), tp(sizes[0]), tp(sizes[1]), total_kv_heads=heads)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), (2, 3), (6, 4), (3, 4)])
def test_tp_sizes_that_do_not_divide_each_other(prefill, decode):
    World(prefix=8).run(kv_of(12), tp(prefill), tp(decode), total_kv_heads=12)


def test_two_decode_groups_of_other_sizes_on_one_prefill():
    world = World()
    sources = world.ranks("prefill", kv_of(), tp(2), total_kv_heads=KV_HEADS)
    for size in (1, 4):
        world.hand_over(sources, world.ranks("decode", kv_of(), tp(size), total_kv_heads=KV_HEADS))


def mla_of(layers=range(3), **options):
    def fill(world, side, place):
        pools.mla(side, place, world.positions(side.role), layers=layers, **options)

    return fill


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 16), (16, 4)])
def test_latents_are_on_every_rank(prefill, decode, sizes):
    world = World(prefix=16, cut=30, prefill_page=sizes[0], decode_page=sizes[1])
    world.run(mla_of(), tp(prefill), tp(decode), is_mla=True)


def test_the_ranks_that_hold_a_latent_share_the_work():
    (sent,) = World(tokens=48).run(mla_of(), tp(2), tp(1), is_mla=True)
    assert min(sent) > 48 * 3 * 24 * 2 // 3


@pytest.mark.parametrize("grid", ["pipeline", "hybrid pipeline", "tp and pipeline"])
def test_stages_of_a_pipeline_to_one(grid):
    """Without layer ids the stage's first layer says which layers it holds; hybrid models list their ids."""
    hybrid, size = grid == "hybrid pipeline", 2 if grid == "tp and pipeline" else 1
    layers = [3, 7, 11, 15] if hybrid else list(range(4))
    stages = {0: layers[:2], 1: layers[2:]}

    def fill(world, side, place):
        held = stages[side.own["pp"][0]] if "pp" in side.own else layers
        if side.role == "prefill":
            side.args.prefill_start_layer = 2 * side.own["pp"][0]
            side.args.prefill_end_layer = side.args.prefill_start_layer + 2
        pools.mha(side, place, world.positions(side.role), layers=held, heads=KV_HEADS)
        side.args.kv_layer_ids = [*held, *held] if hybrid else []

    prefill = [{"pp": (stage, 2), "tp": (rank, size)} for stage in range(2) for rank in range(size)]
    World().run(fill, prefill, tp(1), total_kv_heads=KV_HEADS)


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("decode", [1, 2])
def test_layers_of_a_draft_model_stay_apart(mla, decode):
    def fill(world, side, place):
        make, options = (pools.mla, {}) if mla else (pools.mha, {"heads": KV_HEADS})
        make(side, place, world.positions(side.role), layers=range(2), **options)
        make(side, place, world.positions(side.role), layers=range(1), draft=True, name="draft", **options)

    World(prefix=8).run(fill, tp(2), tp(decode), is_mla=mla, total_kv_heads=KV_HEADS)


def test_of_a_pipeline_only_the_last_stage_has_a_draft():
    """SGLang may give every stage a draft's pool; what is in the others is of no use."""

    def fill(world, side, place):
        stage = side.own.get("pp", (None,))[0]
        if side.role == "prefill":
            side.args.prefill_start_layer = 2 * stage
        layers = {None: range(4), 0: range(2), 1: range(2, 4)}[stage]
        tokens = world.positions(side.role)
        pools.mha(side, place, tokens, layers=layers, heads=KV_HEADS)
        drafted = tokens if stage != 0 else np.arange(0)
        pools.mha(side, place, drafted, layers=range(1), heads=KV_HEADS, draft=True, name="draft")
        pools.alike(side, "request_row", [place.row] if stage != 0 else [], count=1, row_bytes=8, total=6)
        if side.role == "prefill":
            side.args.prefill_end_layer = side.args.prefill_start_layer + 2
        made = [side.buffer((6, 20)) for _ in (*layers, "rope", "draft")]
        for key, (_, wanted) in zip((*layers, "rope", "draft"), made, strict=True):
            if key != "draft" or stage != 0:
                wanted[place.row] = pools.logical("pending", key, shape=(20,))
        listed = [*layers, (1 << 32) - 2, 4]
        side.state("qsa_pending", [here for here, _ in made], [20] * len(made), layers=listed)

    def states(world, side, place):
        return [[place.row], [place.row]]

    for size in (1, 2):
        World().run(fill, [{"pp": (0, 2)}, {"pp": (1, 2)}], tp(size), states, total_kv_heads=KV_HEADS)


def test_a_draft_that_decode_has_alone_is_left_out_on_request():
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(2), heads=KV_HEADS)
        if side.role == "decode":
            pools.mha(side, place, np.arange(0), layers=range(2), heads=KV_HEADS, draft=True, name="draft")

    World().run(fill, tp(2), tp(1), total_kv_heads=KV_HEADS, draft=False)


def test_index_keys_of_a_draft_that_decode_has_alone_are_left_out_with_it():
    def fill(world, side, place):
        pools.mla(side, place, world.positions(side.role), layers=range(2))
        own = 1 if side.role == "decode" else 0
        pools.mla(side, place, np.arange(0), layers=range(own), draft=True, name="draft")
        made = [side.buffer((place.total_pages, 20)) for _ in range(2 + own)]
        for at, (_, wanted) in enumerate(made[:2]):
            wanted[place.pages] = pools.logical("index", at, shape=(len(place.pages), 20))
        side.state("dsa", [here for here, _ in made], [20] * len(made))

    World().run(fill, tp(1), tp(2), lambda _, __, place: [place.pages], is_mla=True, draft=False)


def test_a_window_of_a_draft_that_decode_has_alone_is_left_out_with_it():
    """DeepSeek V4: the draft's window is a second component of the type."""

    def fill(world, side, place):
        side.args.mla_compression_ratios = [4]
        pools.opaque(side, place, world.pages(side.role), widths=[40, 12])
        pools.alike(side, "swa", place.swa_pages[-2:], count=3, row_bytes=16, total=place.total_pages)
        if side.role == "decode":
            here, _ = side.buffer((place.total_pages, 16))
            side.state("swa", [here], [16])

    def states(world, side, place):
        return [place.swa_pages[-2:]] * len(side.args.state_types)

    World().run(fill, tp(1), tp(2), states, is_mla=True, draft=False)
    with pytest.raises(LayoutMismatch, match="component swa_2"):
        World().run(fill, tp(1), tp(2), states, is_mla=True)


def test_layers_shared_out_over_context_parallel_ranks():
    """With a cache that is split by layer each rank lists its own layers, and says the first of them."""

    def fill(world, side, place):
        held = range(4)
        if "cp" in side.own:
            side.args.prefill_start_layer = 2 * side.own["cp"][0]
            held = range(side.args.prefill_start_layer, side.args.prefill_start_layer + 2)
        pools.mla(side, place, world.positions(side.role), layers=held)

    World().run(fill, [{"cp": (rank, 2)} for rank in range(2)], tp(1), is_mla=True)


def test_context_parallel_ranks_that_hold_everything_share_the_work():
    (sent,) = World().run(kv_of(), [{"cp": (rank, 2)} for rank in range(2)], tp(1), total_kv_heads=KV_HEADS)
    aux = sum((64, 64, 64, 64, 128, 128, 64, 128, 96, 64))
    assert sum(sent) == 45 * 3 * 2 * KV_HEADS * 8 * 2 + aux
    assert min(sent) > sum(sent) // 3


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("prefix", [0, 16])
def test_ranks_that_share_the_tokens(prefill, decode, prefix):
    """Token t lies on rank t % size, densely; the draft's cache is whole on each, in pages ``size`` times as large."""
    sizes = {"prefill": prefill, "decode": decode}

    def fill(world, side, place):
        size, tokens = sizes[side.role], world.positions(side.role)
        mine = tokens[tokens % size == side.own["dcp"][0]]
        pools.mla(side, place, (mine, mine // size), layers=range(2))
        pools.mla(side, place, tokens, layers=range(1), draft=True, name="draft", page_size=4 * size)
        # Index keys are whole on each rank, in pages of their own.
        pages = np.arange(prefix // 4, -(-45 // 4))
        pools.alike(side, "dsa", place.swa_pages[pages], count=2, row_bytes=20, total=place.total_pages)

    def states(world, side, place):
        return [place.swa_pages[np.arange(prefix // 4, -(-45 // 4))]]

    world = World(tokens=45, prefix=prefix)
    ranks = {}
    for role, size in sizes.items():
        grid = [{"dcp": (rank, size), "tp": (rank, size)} for rank in range(size)]
        ranks[role] = world.ranks(role, fill, grid, states, is_mla=True)
        # Pages are virtual ones: a page of each rank together.
        virtual = 4 * size
        for each, _ in ranks[role]:
            pages = world.places[role].pages[: -(-45 // virtual)]
            each.chunks = [(pages[prefix // virtual :], prefix, (prefix, 45))]
    owned = [each.described.layout.owned for each, _ in ranks["decode"]]
    assert owned == [Ownership(1, decode, at) for at in range(decode)]
    world.hand_over(ranks["prefill"], ranks["decode"])


@pytest.mark.parametrize("cut", [None, 20])
def test_pages_whose_inside_is_not_told_move_as_a_whole(cut):
    """DeepSeek V4: latents of ratio 4, index keys, latents of ratio 128, over two stages of a pipeline."""
    ratios = [0, 4, 128, 4, 128, 4]

    def fill(world, side, place):
        start, end = {None: (0, 6), 0: (0, 3), 1: (3, 6)}[side.own["pp"][0] if "pp" in side.own else None]
        if side.role == "prefill":
            side.args.prefill_start_layer, side.args.prefill_end_layer = start, end
        side.args.mla_compression_ratios, side.args.kv_layout = ratios, "packed,c4:packed,c128:packed"
        held = [("c4", layer) for layer in range(start, end) if ratios[layer] == 4]
        held += [("index", layer) for role, layer in held] + [
            ("c128", layer) for layer in range(start, end) if ratios[layer] == 128
        ]
        for role, layer in held:
            width = {"c4": 40, "index": 12, "c128": 7}[role]
            here, wanted = side.buffer((place.total_pages, width))
            side.kv(here, width)
            whole = pools.logical(role, layer, shape=(20, width))
            at = world.pages(side.role)
            wanted[place.pages[at]] = whole[at]

    World(prefix=8, cut=cut).run(fill, [{"pp": (0, 2)}, {"pp": (1, 2)}], tp(2), is_mla=True)


def test_pages_packed_for_each_layer():
    """One row of a page for each layer, keys and values and scales packed inside, other on every rank."""

    def fill(world, side, place):
        pools.opaque(side, place, world.pages(side.role), widths=[30, 30, 30], per_rank=True)
        side.args.kv_layer_ids = [2, 5, 8]

    World(prefix=4, cut=17).run(fill, tp(2), tp(2), total_kv_heads=KV_HEADS)


def test_an_envelope_of_all_layers():
    def fill(world, side, place):
        pools.opaque(side, place, world.pages(side.role), widths=[96], per_rank=True)

    World(cut=17).run(fill, tp(2), tp(2), unified=True, total_kv_heads=KV_HEADS)


def test_a_layer_that_both_sides_leave_out():
    def fill(world, side, place):
        pools.mla(side, place, world.positions(side.role), layers=range(1))
        side.kv(np.empty((0, 48), np.uint8), 0)
        pools.mla(side, place, world.positions(side.role), layers=range(2, 3))

    World().run(fill, tp(1), tp(2), is_mla=True)


def test_receiving_into_host_pages():
    def fill(world, side, place):
        pools.mha(side, place, world.positions(side.role), layers=range(2), heads=KV_HEADS)
        if side.role == "decode":
            args = side.args
            for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
                setattr(args, f"host_{name}", getattr(args, name))
                setattr(args, name, [1, 2] if name != "kv_data_lens" else [5, 5])

    world = World()
    sources = world.ranks("prefill", fill, tp(1), total_kv_heads=KV_HEADS)
    destinations = world.ranks("decode", fill, tp(1), total_kv_heads=KV_HEADS, memory="host", device="cuda")
    ((described, _),) = [(each.described, side) for each, side in destinations]
    assert {region.kind for region in described.regions} == {"host"}
    world.hand_over(sources, destinations)
