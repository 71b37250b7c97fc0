from __future__ import annotations

import math

import pytest
import torch
from hf_pair import cached_model, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engines.hf import ARCHITECTURES, Grid, Pools
from kvbaton.engines.hf.forward import Runner, chunks
from kvbaton.engines.hf.rows import Aux, FreeList
from kvbaton.errors import ConfigurationError, RowsError, ShardError

CANARY = 0x5A


@pytest.fixture
def pools_of():
    made = []

    def make(name: str, *, pool_tokens: int = 256, slots: int = 4, ranks=None, **grid) -> Pools:
        made.append(Pools(cached_model(name), Grid(**grid), pool_tokens=pool_tokens, slots=slots, ranks=ranks))
        return made[-1]

    yield make
    for pools in made:
        pools.close()


def filled(pools: Pools, name: str, tokens: int, split: int | None = None):
    """The rows of a request and its cache, written piece by piece."""
    cache, rows = pools.description.new_cache(), pools.allocate(tokens)
    for first, last in chunks(tokens, split):
        Runner(cached_model(name)).extend(cache, prompt(tokens)[first:last])
        pools.write_tokens(cache, rows, (first, last))
    pools.write_state(cache, rows)
    return rows, cache


def touched(pools: Pools, rows) -> list[dict[str, set[int]]]:
    """The rows of a request on each rank, by component."""
    given = pools.all_rows(rows)
    slots = [set() if slot is None else {slot} for slot in pools.aux_slots(rows)]
    return [
        {"aux": slot, **{name: set(each.tolist()) for name, each in rank.items()}}
        for rank, slot in zip(given, slots, strict=True)
    ]


def assert_only_touched(pools: Pools, rows) -> None:
    """Every byte is the canary, but for those in rows of the request."""
    for rank, used in zip(pools.ranks, touched(pools, rows), strict=True):
        changed = [memory.numpy() != CANARY for memory in rank.memory]
        for component in rank.layout.components:
            for tensor in component.tensors:
                for row in used.get(component.name, ()):
                    at = tensor.offset + row * tensor.row_stride
                    nbytes = tensor.itemsize * math.prod(axis.local_size for axis in tensor.axes)
                    changed[tensor.region][at : at + nbytes] = False
        assert not any(each.any() for each in changed)


GRIDS = {
    "one rank": {},
    "tp 2, HND": {"tp": 2, "order": "HND"},
    "tp 8": {"tp": 8},
    "pp 3": {"pp": 3},
    "cp 4 by pages": {"cp": 4, "cp_unit": 16},
    "cp 2 by tokens": {"cp": 2, "window_ring": True},
    "all": {"tp": 2, "pp": 2, "cp": 2, "cp_unit": 4, "order": "HND", "window_ring": True},
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("tokens", "page_size", "split"), [(1, 16, None), (16, 16, None), (41, 16, 10), (50, 4, 7), (33, 1, None)]
)
def test_a_cache_comes_back_as_it_was(name, tokens, page_size, split, grid, pools_of):
    pools = pools_of(name, page_size=page_size, **GRIDS[grid])
    other = pools.allocate(21)
    for rank in pools.ranks:
        for memory in rank.memory:
            memory.fill_(CANARY)
    rows, cache = filled(pools, name, tokens, split)
    copied = pools.read(rows)
    for place in pools.description.places:
        expected, found = place.get(cache), place.get(copied)
        if expected is None:
            assert found is None
        else:
            assert found.is_contiguous()
            assert torch.equal(found, expected), f"layer {place.layer} {place.role}"
    for rank in pools.ranks:
        for memory in rank.memory:
            memory.zero_()
    for place in pools.description.places:
        expected, found = place.get(cache), place.get(copied)
        assert expected is None or torch.equal(found, expected), "the cache shares memory with the pools"
    pools.free(other)
    pools.free(rows)
    assert all(free == total for free, total in pools.free_rows().values())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "deepseek_v4", "mamba2"])
@pytest.mark.parametrize("tokens", [1, 8, 41])
def test_nothing_but_the_rows_of_the_request_is_written(name, tokens, grid, pools_of):
    pools = pools_of(name, page_size=4, **GRIDS[grid])
    pools.allocate(21)
    for rank in pools.ranks:
        for memory in rank.memory:
            memory.fill_(CANARY)
    assert_only_touched(pools, filled(pools, name, tokens, 10)[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 8, 41])
def test_ranks_of_several_processes_make_up_the_whole_cache(name, tokens, pools_of):
    """What each process holds and packs, together, is the cache, and the aux data come from the one that has them."""
    grid = {"tp": 2, "pp": 2, "cp": 2, "page_size": 4}
    parts = [pools_of(name, ranks=ranks, **grid) for ranks in ([0, 1, 2], [3], [7, 5, 6, 4])]
    packed, allocations = {}, []
    for pools in parts:
        rows, cache = filled(pools, name, tokens)
        pools.write_aux(rows, Aux(7, tokens, 3.5))
        packed |= pools.pack(rows)
        allocations.append(rows)
    for pools, rows in zip(parts, allocations, strict=True):
        mine = {rank.shard.number for rank in pools.ranks}
        others = {number: data for number, data in packed.items() if number not in mine}
        copied = pools.read(rows, others)
        for place in pools.description.places:
            expected, found = place.get(cache), place.get(copied)
            assert found is None if expected is None else torch.equal(found, expected)
        assert pools.read_aux(rows, others) == Aux(7, tokens, 3.5)
        assert not pools.complete
    with pytest.raises(ValueError, match="bytes came of rank"):
        parts[1].read(allocations[1], {0: packed[0][:-1]})


def test_a_window_has_pages_by_absolute_position(pools_of):
    pools = pools_of("gemma3")
    rows = pools.allocate(100)
    # The window holds tokens 77 to 99: pages 4, 5 and 6 of the text.
    window = rows.pages[0]["window"]
    assert (len(window.rows), window.start) == (3, 64)
    assert len(rows.pages[0]["kv"].rows) == 7
    assert [list(rank) for rank in pools.streamed_rows(rows, (16, 40))] == [["kv"]]
    assert len(pools.streamed_rows(rows, (16, 40))[0]["kv"]) == 2
    assert list(pools.latest_rows(rows)) == [(77, 100)]


def test_a_window_ring_has_as_many_rows_for_every_request(pools_of):
    pools = pools_of("gemma3", window_ring=True)
    rows = [pools.allocate(tokens).pages[0]["window"] for tokens in (1, 100)]
    assert [(len(each.rows), each.start) for each in rows] == [(2, 0), (2, 0)]


def test_the_rows_of_a_cp_rank_are_those_of_its_tokens(pools_of):
    pools = pools_of("gemma3", cp=2, cp_unit=16)
    rows = pools.allocate(40)
    assert [len(rows.pages[rank]["kv"].rows) for rank in (0, 1)] == [2, 1]
    # Token 16 is the first of rank 1: rank 0 has no row of the second page of the text.
    assert [len(rank["kv"]) for rank in pools.streamed_rows(rows, (16, 32))] == [0, 1]


def test_entries_are_sent_in_whole_multiples(pools_of):
    assert pools_of("deepseek_v4", page_size=4).granularity == 8
    assert pools_of("deepseek_v4", page_size=16).granularity == 16
    assert pools_of("qwen3", page_size=4).granularity == 4


def test_the_layout_names_what_is_there(pools_of):
    components = {component.name: component for component in pools_of("qwen3_5").ranks[0].layout.components}
    kinds = {
        name: (str(component.kind), component.page_size, len(component.tensors))
        for name, component in components.items()
    }
    assert kinds == {"conv": ("slot", 1, 2), "recurrent": ("slot", 1, 2), "kv": ("paged", 16, 4), "aux": ("aux", 1, 3)}
    assert [axis.name for axis in components["kv"].tensors[0].axes] == ["token", "head", "dim"]
    assert [axis.name for axis in components["conv"].tensors[0].axes] == ["channel", "kernel"]


def test_the_layout_of_a_rank_names_its_part(pools_of):
    ranks = pools_of("qwen3_5", tp=4, pp=2, cp=2, page_size=8, order="HND").ranks
    assert [str(rank.shard.coords) for rank in ranks[:5]] == [
        "tp0/4 pp0/2 cp0/2 dp0/1", "tp1/4 pp0/2 cp0/2 dp0/1", "tp2/4 pp0/2 cp0/2 dp0/1",
        "tp3/4 pp0/2 cp0/2 dp0/1", "tp0/4 pp0/2 cp1/2 dp0/1",
    ]  # fmt: skip
    assert [rank.shard.has_aux for rank in ranks] == [False] * 8 + [True] * 8
    layout = ranks[3].layout
    tensors = {tensor.role: tensor for component in layout.components for tensor in component.tensors}
    assert {tensor.layer for tensor in tensors.values()} == {0, 1}
    spans = {role: {axis.name: axis.spans for axis in tensor.axes} for role, tensor in tensors.items()}
    # Two KV heads over four ranks; the convolution's q and k have two heads of 16 too, v has four.
    assert spans["key"] == {"head": ((1, 1),), "token": ((0, 8),), "dim": ((0, 16),)}
    assert [axis.name for axis in tensors["key"].axes] == ["head", "token", "dim"]
    assert spans["conv"]["channel"] == ((16, 16), (48, 16), (112, 16))
    assert spans["recurrent"]["head"] == ((3, 1),)


@pytest.mark.parametrize(
    ("name", "grid", "error", "message"),
    [
        ("qwen3", {"tp": 3}, ShardError, "component kv, axis head: 2 heads .* 3 ranks"),
        ("mamba2", {"tp": 3}, ShardError, "component conv, axis channel, block x"),
        ("qwen3", {"pp": 5}, ConfigurationError, "pp is 5, but the model has 4 layers"),
        ("qwen3", {"cp": 0}, ConfigurationError, "cp is 0"),
        ("qwen3", {"cp_unit": 1.5}, ConfigurationError, "cp_unit is 1.5"),
        ("qwen3", {"order": "NDH"}, ConfigurationError, "order is 'NDH'"),
        ("qwen3", {"tp": 2, "ranks": [0, 0]}, ConfigurationError, r"ranks is \[0, 0\]"),
        ("qwen3", {"tp": 2, "ranks": [2]}, ConfigurationError, "from 0 to 1"),
        ("qwen3", {"tp": 2, "ranks": []}, ConfigurationError, "at least one"),
    ],
)
def test_grids_that_cannot_be_are_refused(name, grid, error, message, pools_of):
    with pytest.raises(error, match=message):
        pools_of(name, **grid)


def test_full_pools_say_none_and_keep_what_they_have(pools_of):
    pools = pools_of("qwen3", pool_tokens=64)
    before = pools.free_rows()
    large = pools.allocate(40)
    assert pools.allocate(17) is None
    small = pools.allocate(16)
    assert pools.allocate(1) is None
    pools.free(large)
    pools.free(small)
    assert pools.free_rows() == before == {"kv": (4, 4), "slots": (4, 4)}
    with pytest.raises(RowsError, match="not in use"):
        pools.free(small)


def test_slots_bound_the_requests(pools_of):
    pools = pools_of("mamba2", slots=2)
    assert [pools.allocate(10_000) is None for _ in range(3)] == [False, False, True]


def test_a_request_that_never_fits_is_named_with_both_numbers(pools_of):
    pools = pools_of("qwen3", pool_tokens=64)
    pools.check_fits(64)
    with pytest.raises(RowsError, match="65 tokens needs 5 pages of component kv, but the pool has 4"):
        pools.check_fits(65)


@pytest.mark.parametrize("options", [{"page_size": 0}, {"pool_tokens": 8}, {"slots": 0}])
def test_pools_of_no_size_are_refused(options, pools_of):
    with pytest.raises(ConfigurationError):
        pools_of("qwen3", **options)


def test_the_aux_table_keeps_its_values(pools_of):
    pools = pools_of("qwen3")
    first, second = pools.allocate(3), pools.allocate(4)
    values = Aux(2**40, 3, 1.75e9), Aux(7, 4, 3.0)
    pools.write_aux(first, values[0])
    pools.write_aux(second, values[1])
    assert (pools.read_aux(first), pools.read_aux(second)) == values


def test_half_precision_models_have_half_precision_pools():
    model = cached_model("qwen3", 5).to(torch.bfloat16)
    pools = Pools(model, pool_tokens=64, slots=1)
    assert {tensor.dtype for tensor in pools.ranks[0].layout.component("kv").tensors} == {"bfloat16"}
    cache, rows = pools.description.new_cache(), pools.allocate(20)
    Runner(model).extend(cache, prompt(20))
    pools.write_tokens(cache, rows, (0, 20))
    assert torch.equal(pools.read(rows).layers[0].keys, cache.layers[0].keys)
    pools.close()


@given(st.integers(1, 12), st.lists(st.integers(1, 5), max_size=30), st.randoms())
@settings(max_examples=50, deadline=None)
def test_a_free_list_never_gives_a_row_twice(count, wanted, random):
    rows, held = FreeList(count), []
    for number in wanted:
        taken = rows.take(number)
        if taken is None:
            assert number > len(rows)
            if held:
                rows.give(held.pop(random.randrange(len(held))))
        else:
            held.append(taken)
        used = [row for group in held for row in group]
        assert len(set(used)) == len(used) == count - len(rows)
        assert set(used) <= set(range(count))
