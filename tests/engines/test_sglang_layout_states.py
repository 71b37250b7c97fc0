"""The state components of SGLang's ranks, by content, and how its payloads become rows."""

from __future__ import annotations

import numpy as np
import pytest
import sglang_pools as pools
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_world import World, tp

from kvbaton.engines.sglang.layout import Ranks, describe

KV_HEADS = 4


def with_kv(fill, *, layers=range(2), mla=False):
    """Pools of the main cache, and those that ``fill`` makes."""

    def both(world, side, place):
        make, options = (pools.mla, {}) if mla else (pools.mha, {"heads": KV_HEADS})
        make(side, place, world.positions(side.role), layers=layers, **options)
        fill(world, side, place)

    return both


def slot(world, side, place):
    """What SGLang's scheduler gives for linear attention: a list of one array."""
    return [[np.array([place.slot], np.int32)]]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (1, 4), (4, 2), (2, 4)])
@pytest.mark.parametrize(
    "options",
    [{}, {"outer": True}, {"replicated": 2}, {"blocks": (8, 4, 4), "ids": False}],
    ids=["q, k and v", "rows of channels", "states that every rank has", "without layer ids"],
)
def test_states_of_linear_attention(prefill, decode, options):
    def fill(world, side, place):
        pools.mamba(side, place, layers=[1, 2, 4], **options)

    World().run(with_kv(fill), tp(prefill), tp(decode), slot, total_kv_heads=KV_HEADS)


@given(
    sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6])),
    units=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    columns=st.integers(1, 4),
    heads=st.integers(1, 2),
    outer=st.booleans(),
    replicated=st.integers(0, 2),
    ids=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_state_of_linear_attention(sizes, units, columns, heads, outer, replicated, ids):
    blocks = [12 * unit for unit in units]

    def fill(world, side, place):
        pools.mamba(
            side,
            place,
            layers=[1, 4],
            blocks=blocks,
            heads=12 * heads,
            outer=outer,
            columns=columns,
            replicated=replicated,
            ids=ids,
        )

    World(tokens=5).run(with_kv(fill, mla=True), tp(sizes[0]), tp(sizes[1]), slot, is_mla=True)


def test_a_convolution_whose_blocks_the_model_tells():
    """Mamba 2: SGLang does not list the blocks, and one cut through all of them would be wrong."""

    def fill(world, side, place):
        pools.mamba(side, place, layers=[1, 2], blocks=(16, 8, 8), given=False)

    World().run(with_kv(fill), tp(2), tp(1), slot, total_kv_heads=KV_HEADS, conv_blocks=(16, 8, 8))
    World().run(with_kv(fill), tp(2), tp(2), slot, total_kv_heads=KV_HEADS)


def test_linear_attention_with_a_tensor_parallelism_of_its_own():
    def fill(world, side, place):
        tp_of_states, side.tp = side.tp, side.own["tp"]
        pools.mha(side, place, world.positions(side.role), layers=range(2), heads=KV_HEADS)
        side.tp = tp_of_states
        pools.mamba(side, place, layers=[1, 2])

    prefill = [{"tp": (0, 1), "cp": (rank, 2), "state_tp": (rank, 2)} for rank in range(2)]
    World().run(fill, prefill, tp(1), slot, total_kv_heads=KV_HEADS)


def test_states_of_the_stages_of_a_pipeline():
    def fill(world, side, place):
        stage = side.own["pp"][0] if "pp" in side.own else None
        if side.role == "prefill":
            side.args.prefill_start_layer = 2 * stage
        kv = {None: range(4), 0: range(2), 1: range(2, 4)}[stage]
        pools.mha(side, place, world.positions(side.role), layers=kv, heads=KV_HEADS)
        pools.mamba(side, place, layers={None: [6, 8], 0: [], 1: [6, 8]}[stage])

    World().run(fill, [{"pp": (0, 2)}, {"pp": (1, 2)}], tp(2), slot, total_kv_heads=KV_HEADS)


def window_pages(world, side, place, size=20):
    """SGLang's window: whole pages from the one that holds its first token."""
    begin = max(world.prefix, world.tokens - size) // side.page_size
    return np.arange(begin, -(-world.tokens // side.page_size))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (4, 2), (8, 4), (2, 8)])
@pytest.mark.parametrize("prefix", [0, 32])
def test_a_sliding_window_moves_in_whole_pages(prefill, decode, prefix):
    def fill(world, side, place):
        pools.window(side, place, window_pages(world, side, place), layers=range(3), heads=KV_HEADS, dims=(8, 4))

    def states(world, side, place):
        return [place.swa_pages[window_pages(world, side, place)]]

    World(prefix=prefix).run(
        with_kv(fill), tp(prefill), tp(decode), states, swa_kv_heads=KV_HEADS, total_kv_heads=KV_HEADS
    )


def test_sliding_windows_on_stages_of_a_pipeline():
    """With the layers of each stage, as a config tells them: full attention in even layers, windows in odd ones."""
    stages = {0: range(4), 1: range(4, 6), None: range(6)}

    def fill(world, side, place):
        held = stages[side.own["pp"][0] if "pp" in side.own else None]
        if side.role == "prefill":
            side.args.prefill_start_layer = 0
        full, windowed = ([layer for layer in held if layer % 2 == odd] for odd in (0, 1))
        pools.mha(side, place, world.positions(side.role), layers=full, heads=KV_HEADS)
        pools.window(side, place, window_pages(world, side, place), layers=windowed, heads=KV_HEADS)

    def grid(stage, size):
        full, windowed = (tuple(layer for layer in stages[stage] if layer % 2 == odd) for odd in (0, 1))
        own = {"layers": {"kv": full, "swa": windowed}}
        own |= {} if stage is None else {"pp": (stage, 2)}
        return [{**own, "tp": (rank, size)} for rank in range(size)]

    def states(world, side, place):
        return [place.swa_pages[window_pages(world, side, place)]]

    World().run(fill, grid(0, 2) + grid(1, 2), grid(None, 1), states, total_kv_heads=KV_HEADS, swa_kv_heads=KV_HEADS)


def test_a_sliding_window_with_other_heads_than_full_attention():
    def fill(world, side, place):
        pools.window(side, place, window_pages(world, side, place), layers=range(2), heads=8)

    def states(world, side, place):
        return [place.swa_pages[window_pages(world, side, place)]]

    World().run(with_kv(fill), tp(8), tp(2), states, total_kv_heads=KV_HEADS, swa_kv_heads=8)
    # Without their number, as long as no rank shares a head it follows from the size of the pages.
    World().run(with_kv(fill), tp(4), tp(2), states, total_kv_heads=KV_HEADS)


def rows_of(world, side, place, kind):
    """The rows of a request by SGLang's rules for each type, in the order in which both sides list them."""
    size, tokens, prefix = side.page_size, world.tokens, world.prefix
    suffix = place.pages[prefix // size : -(-tokens // size)]
    ring = 16
    return {
        "dsa": suffix,
        "minimax_index_k": suffix,
        "qsa_compressed": place.pages[: -(-tokens // size)],
        "qsa_pending": [place.row],
        "request_row": [place.row],
        "swa_ring": place.row * ring + np.arange(tokens - 10, tokens) % ring,
        "c128_state": [place.row],
        "swa": place.swa_pages[window_pages(world, side, place)],
    }[kind]


LAYERS_OF_TYPE = {"qsa_pending": [3, 7, (1 << 32) - 2], "qsa_compressed": [3, 7, 11]}


@pytest.mark.parametrize(
    "kind", ["dsa", "minimax_index_k", "qsa_compressed", "qsa_pending", "request_row", "swa_ring", "c128_state", "swa"]
)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_states_that_every_rank_has(kind, prefill, decode):
    layers = LAYERS_OF_TYPE.get(kind, [])

    def fill(world, side, place):
        rows = rows_of(world, side, place, kind)
        total = 6 * 16 if kind == "swa_ring" else place.total_pages
        gone = (1,) if kind == "dsa" else ()
        pools.alike(side, kind, rows, count=3, row_bytes=20, total=total, elided=gone, layers=layers)

    def states(world, side, place):
        return [rows_of(world, side, place, kind)]

    world = World(prefix=8)
    told = {"is_mla": True, "kv_cache_layout": "nhd"}
    sent = world.run(with_kv(fill, layers=range(3), mla=True), tp(prefill), tp(decode), states, **told)
    assert len(sent) == decode


@pytest.mark.parametrize("live", [0, 1, 5, 7])
@pytest.mark.parametrize("rings", [(8, 8), (8, 12), (16, 8)])
def test_tails_of_rings_of_other_sizes(live, rings):
    """The live entries of a request's ring, in the order of their tokens, wherever the ring wraps."""
    sizes = dict(zip(("prefill", "decode"), rings, strict=True))

    def runs(side, place):
        """SGLang's 6-tuple: row, first run, second run, size of the ring."""
        ring, begin = sizes[side.role], (world.tokens - live) % sizes[side.role]
        first = min(live, ring - begin)
        return [place.row, begin, first, 0, live - first, ring] if live else []

    def fill(world, side, place):
        ring, made = sizes[side.role], []
        entries = place.row * ring + (np.arange(world.tokens - live, world.tokens) % ring)
        for at in range(4):
            here, wanted = side.buffer((6, ring, 128), np.uint16)
            wanted.reshape(-1, 128)[entries] = pools.logical("tail", at, shape=(live, 128), dtype=np.uint16)
            made.append(here)
        side.state("dsa_tail", made, [ring * 256] * 4)

    world = World(tokens=47)
    world.run(with_kv(fill, mla=True), tp(2), tp(1), lambda world, side, place: [runs(side, place)], is_mla=True)


@pytest.mark.parametrize("draft", [1, 2])
def test_index_keys_and_tails_of_a_draft_stay_apart(draft):
    def fill(world, side, place):
        pools.mla(side, place, world.positions(side.role), layers=range(draft), draft=True, name="draft")
        pools.alike(side, "dsa", place.pages, count=2 + draft, row_bytes=20, total=place.total_pages)
        entries = place.row * 8 + np.arange(3)
        made = [side.buffer((6 * 8, 256)) for _ in range(2 * (2 + draft))]
        for at, (_, wanted) in enumerate(made):
            wanted[entries] = pools.logical("tail", at, shape=(3, 256))
        side.state("dsa_tail", [here for here, _ in made], [8 * 256] * len(made))
        roles = [(tensor.role, tensor.layer) for tensor in described(side).component("dsa_tail").tensors]
        assert roles[4:] == [(f"draft_{role}", at) for role in ("tail_key", "tail_score") for at in range(draft)]

    def described(side):
        return describe(side.args, Ranks(role="prefill", is_mla=True)).layout

    def states(world, side, place):
        return [place.pages, [place.row, 0, 3, 0, 0, 8]]

    World().run(with_kv(fill, mla=True), tp(1), tp(2), states, is_mla=True)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (4, 2), (8, 2)])
def test_dense_layers_of_a_sparse_model(prefill, decode):
    """Keys and values of the dense layers travel as a state: all pages of the request, its prefix included."""

    def fill(world, side, place):
        every = np.arange(-(-world.tokens // side.page_size))
        pools.window(side, place, every, layers=range(2), heads=KV_HEADS, kind="minimax_dense_kv")

    def states(world, side, place):
        return [place.swa_pages[: -(-world.tokens // side.page_size)]]

    World(prefix=8).run(with_kv(fill), tp(prefill), tp(decode), states, total_kv_heads=KV_HEADS)


@pytest.mark.parametrize("page_size", [4, 128])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (4, 2)])
@pytest.mark.parametrize("kind", ["block_scale", "block_scale_swa"])
def test_block_scales_in_both_orders(page_size, prefill, decode, kind):
    """By token in pages of other sizes, by head in pages of 128 tokens."""

    def fill(world, side, place):
        held, made = pools.heads_of(KV_HEADS, *side.tp), []
        pages = np.arange(-(-world.tokens // page_size))
        for at in range(4):
            whole = pools.logical("scale", at, shape=(len(pages), page_size, KV_HEADS, 2))[:, :, held]
            shape = (place.total_pages, page_size, len(held), 2)
            if page_size == 128:
                whole = whole.transpose(0, 2, 1, 3)
                shape = (place.total_pages, len(held), page_size, 2)
            made.append(side.buffer(shape))
            made[-1][1][place.swa_pages[pages]] = whole
        side.state(kind, [here for here, _ in made], [here[0].nbytes for here, _ in made])

    def states(world, side, place):
        return [place.swa_pages[: -(-world.tokens // page_size)]]

    world = World(tokens=45 if page_size == 4 else 200, prefill_page=page_size, decode_page=page_size)
    world.run(with_kv(fill), tp(prefill), tp(decode), states, total_kv_heads=KV_HEADS)


def test_windows_and_rings_of_compressed_attention():
    """DeepSeek V4 over two stages: the lists are by kind of buffer, and each stage has its part of each."""
    ratios = [0, 4, 128, 4, 128, 4]
    rows = {"swa": 8, "swa_ring": 9, "c128_state": 10}

    def kinds(start, end):
        four = [("c4", layer) for layer in range(start, end) if ratios[layer] == 4]
        every = [("w", layer) for layer in range(start, end)]
        return {
            "kv": [*four, *[("i", layer) for _, layer in four], *_of(128, start, end)],
            "swa": [*every, *four, *[("i", layer) for _, layer in four]],
            "swa_ring": [*every, *[("r", layer) for _, layer in every]],
            "c128_state": _of(128, start, end),
        }

    def _of(ratio, start, end):
        return [("many", layer) for layer in range(start, end) if ratios[layer] == ratio]

    def fill(world, side, place):
        start, end = {None: (0, 6), 0: (0, 3), 1: (3, 6)}[side.own["pp"][0] if "pp" in side.own else None]
        if side.role == "prefill":
            side.args.prefill_start_layer, side.args.prefill_end_layer = start, end
        side.args.mla_compression_ratios = ratios
        for name, held in kinds(start, end).items():
            made = []
            for key in held:
                width = 16 + len(key[0])
                here, wanted = side.buffer((max(place.total_pages, 6 * 16), width))
                at = place.pages[world.pages(side.role)] if name == "kv" else payload(name, world, side, place)
                wanted[at] = pools.logical(name, *key, shape=(len(at), width))
                made.append(here)
                if name == "kv":
                    side.kv(here, width)
            if name != "kv":
                side.state(name, made, [here[0].nbytes for here in made])

    def payload(name, world, side, place):
        return rows_of(world, side, place, name)

    def states(world, side, place):
        return [payload(name, world, side, place) for name in rows]

    World().run(fill, [{"pp": (0, 2)}, {"pp": (1, 2)}], tp(2), states, is_mla=True)


def test_states_of_a_shared_envelope():
    """Unified memory: window and linear attention are parts of the one region that the main cache is in too."""

    def rows(place):
        """Half of a free envelope, and a third of another."""
        free = np.setdiff1d(np.arange(1, place.total_pages), place.pages)
        return {"swa": free[:1] * 2, "mamba": free[1:2] * 3}

    def fill(world, side, place):
        pools.opaque(side, place, world.pages(side.role), widths=[96], per_rank=True)
        here, wanted = side.raw[-1][pools.GUARD : -pools.GUARD], side.wanted[-1][pools.GUARD : -pools.GUARD]
        for kind, width in (("swa", 48), ("mamba", 32)):
            wanted.reshape(-1, width)[rows(place)[kind]] = pools.logical(kind, side.tp, shape=(1, width))
            side.state(kind, [here], [width])

    def states(world, side, place):
        return list(rows(place).values())

    World(tokens=30).run(fill, tp(2), tp(2), states, unified=True, total_kv_heads=KV_HEADS)
