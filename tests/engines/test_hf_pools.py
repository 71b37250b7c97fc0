from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_pair import cached_model, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engines.hf import ARCHITECTURES, Pools
from kvbaton.engines.hf.forward import Runner, chunks
from kvbaton.engines.hf.pools import Aux, FreeList
from kvbaton.errors import ConfigurationError, RowsError
from kvbaton.layout import PAGED

CANARY = 0x5A


@pytest.fixture
def pools_of():
    made = []

    def make(name: str, **options: int) -> Pools:
        made.append(Pools(cached_model(name), **{"pool_tokens": 256, "slots": 4, **options}))
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


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("tokens", "page_size", "split"), [(1, 16, None), (16, 16, None), (41, 16, 10), (50, 4, 7), (33, 1, None)]
)
def test_a_cache_comes_back_as_it_was_and_no_other_row_changes(name, tokens, page_size, split, pools_of):
    pools = pools_of(name, page_size=page_size)
    other = pools.allocate(21)
    pools.memory.array[:] = CANARY
    rows, cache = filled(pools, name, tokens, split)
    copied = pools.read(rows)
    for place in pools.description.places:
        expected, found = place.get(cache), place.get(copied)
        if expected is None:
            assert found is None
        else:
            assert found.is_contiguous()
            assert torch.equal(found, expected), f"layer {place.layer} {place.role}"
            if found.numel():
                assert found.data_ptr() != pools._view(place).data_ptr()
    for component in pools.layout.components:
        for tensor in component.tensors:
            memory = pools.memory.array[tensor.offset : tensor.offset + tensor.rows * tensor.row_stride]
            used = [rows.slot] if not component.kind.has_tokens else rows.pages[component.name]
            untouched = np.delete(memory.reshape(tensor.rows, -1), used, axis=0) if not component.kind.aux else memory
            assert (untouched == CANARY).all()
    pools.free(other)
    pools.free(rows)
    assert all(free == total for free, total in pools.free_rows().values())


def test_a_window_has_pages_by_absolute_position(pools_of):
    pools = pools_of("gemma3")
    rows = pools.allocate(100)
    # The window holds tokens 77 to 99: pages 4, 5 and 6 of the text.
    assert len(rows.pages["window"]) == 3
    assert rows.first["window"] == 64
    assert len(rows.pages["kv"]) == 7
    assert [len(pages) for pages in pools.pages_of(rows, PAGED, (16, 40)).values()] == [2]
    assert pools.windows() == {"window": 23}


def test_entries_are_sent_in_whole_multiples(pools_of):
    assert pools_of("deepseek_v4", page_size=4).granularity == 8
    assert pools_of("deepseek_v4", page_size=16).granularity == 16
    assert pools_of("qwen3", page_size=4).granularity == 4


def test_the_layout_names_what_is_there(pools_of):
    components = {component.name: component for component in pools_of("qwen3_5").layout.components}
    kinds = {
        name: (str(component.kind), component.page_size, len(component.tensors))
        for name, component in components.items()
    }
    assert kinds == {"conv": ("slot", 1, 2), "recurrent": ("slot", 1, 2), "kv": ("paged", 16, 4), "aux": ("aux", 1, 3)}
    assert [axis.name for axis in components["kv"].tensors[0].axes] == ["token", "head", "dim"]
    assert [axis.name for axis in components["conv"].tensors[0].axes] == ["channel", "kernel"]


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
    assert {tensor.dtype for tensor in pools.layout.component("kv").tensors} == {"bfloat16"}
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
