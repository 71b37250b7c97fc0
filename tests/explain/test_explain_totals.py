"""Totals of an explanation against the bytes of the logical model, computed here from its dimensions alone."""

import pytest

from kvbaton.explain import Request, explain
from kvbaton.topology import read_topology

BF16, F32 = 2, 4
TOKENS = 5003


def copies(heads, tp):
    """How many tensor-parallel ranks hold each head."""
    return max(tp // heads, 1)


# For each model: the bytes of one copy of each component, and the copies that tp ranks hold together.
MODELS = {
    "qwen3-32b": lambda tokens, tp: {"kv": 64 * 2 * 8 * 128 * BF16 * tokens * copies(8, tp)},
    "qwen3-next-80b": lambda tokens, tp: {
        "conv": 36 * (2048 + 2048 + 4096) * 3 * BF16,
        "recurrent": 36 * 32 * 128 * 128 * F32,
        "kv": 12 * 2 * 2 * 256 * BF16 * tokens * copies(2, tp),
    },
    "deepseek-v3.2": lambda tokens, tp: {
        "latent": 61 * (512 + 64) * BF16 * tokens * tp,
        "index": 61 * 128 * BF16 * tokens * tp,
    },
    "gemma-3-27b": lambda tokens, tp: {
        "window": 52 * 2 * 16 * 128 * BF16 * min(tokens, 1024) * copies(16, tp),
        "kv": 10 * 2 * 16 * 128 * BF16 * tokens * copies(16, tp),
    },
    "gpt-oss-120b": lambda tokens, tp: {
        "window": 18 * 2 * 8 * 64 * BF16 * min(tokens, 128) * copies(8, tp),
        "kv": 18 * 2 * 8 * 64 * BF16 * tokens * copies(8, tp),
    },
    "deepseek-v4-like": lambda tokens, tp: {
        "window": 43 * 512 * BF16 * min(tokens, 128) * tp,
        "sparse": 21 * 512 * BF16 * (tokens // 4) * tp,
        "index": 21 * 128 * BF16 * (tokens // 4) * tp,
        "sparse_tail": 21 * 2 * (512 + 128) * F32 * (tokens % 4) * tp,
        "heavy": 20 * 512 * BF16 * (tokens // 128) * tp,
        "heavy_tail": 20 * 2 * 512 * F32 * (tokens % 128) * tp,
    },
    # One group of B and C: every rank holds both.
    "mamba2-2.7b": lambda tokens, tp: {
        "conv": 64 * (5120 + 2 * 128 * tp) * 3 * BF16,
        "recurrent": 64 * 80 * 64 * 128 * F32,
    },
}
SIDES = [
    ({"tp": 4}, {"tp": 2}),
    ({"tp": 2, "page_size": 64}, {"tp": 8, "order": "HND"}),
    ({"tp": 2, "pp": 3}, {"tp": 4, "pp": 2, "placement": "blocks_first"}),
    ({"tp": 16}, {"tp": 4, "striped": False}),
    ({"cp": {"size": 3, "unit": 128}}, {"tp": 2, "page_size": 48}),
    ({"tp": 4, "placement": "fused"}, {"cp": {"size": 2, "unit": 384}, "page_size": 48}),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_totals_are_those_of_the_model(name, sides):
    source, destination = ({"model": name, **side} for side in sides)
    found = explain(read_topology(source), read_topology(destination), Request(TOKENS))
    right = MODELS[name](TOKENS, destination.get("tp", 1))
    slots_each = destination.get("cp", {"size": 1})["size"]
    for component in found.components:
        slots = slots_each if component.kind == "slot" else 1
        assert component.nbytes == right[component.name] * slots, component.name
    assert {component.name for component in found.components} == set(right)
    assert not found.refusals
    # The same bytes, added up in every other way.
    assert found.nbytes == sum(component.nbytes for component in found.components)
    assert found.nbytes == sum(pair.nbytes for pair in found.pairs)
    assert found.nbytes == sum(rank.nbytes for rank in found.source.ranks)
    assert found.nbytes == sum(rank.nbytes for rank in found.destination.ranks)
    assert found.pieces == sum(component.runs.pieces for component in found.components)
    for pair in found.pairs:
        assert pair.nbytes == sum(flow.nbytes for flow in pair.flows)
        assert pair.pieces == sum(flow.runs.pieces for flow in pair.flows)


def test_a_prefix_is_not_moved_again_but_states_and_windows_are():
    topology = read_topology({"model": "gemma-3-27b"})
    found = explain(topology, topology, Request(5000, prefix=4800))
    by_name = {component.name: component.nbytes for component in found.components}
    assert by_name == {"kv": 10 * 2 * 16 * 128 * BF16 * 200, "window": 52 * 2 * 16 * 128 * BF16 * 200}
    hybrid = read_topology({"model": "qwen3-next-80b"})
    found = explain(hybrid, hybrid, Request(5000, prefix=5000))
    by_name = {component.name: component.nbytes for component in found.components}
    assert by_name["kv"] == 0
    assert by_name["conv"] == 36 * 8192 * 3 * BF16


def test_striping_shares_the_work_of_replicas():
    source = {"model": "deepseek-v3.2", "tp": 4}
    for striped, balance, idle in ((False, 4.0, 3), (True, 1.0, 0)):
        destination = {"model": "deepseek-v3.2", "striped": striped}
        found = explain(read_topology(source), read_topology(destination), Request(4096))
        assert found.source.balance == pytest.approx(balance, rel=0.02)
        assert sum(not rank.nbytes for rank in found.source.ranks) == idle
        assert found.components[0].source_copies == 4.0
        assert found.components[0].destination_copies == 1.0


def test_copies_count_ranks_that_hold_an_element():
    source = read_topology({"model": "qwen3-32b", "tp": 32, "pp": 2})
    destination = read_topology({"model": "qwen3-32b", "tp": 2, "cp": 4})
    (kv,) = explain(source, destination, Request(100)).components
    assert (kv.source_copies, kv.destination_copies) == (4.0, 1.0)


@pytest.mark.parametrize(("contiguous", "pieces"), [(False, 2 * 3 * 32), (True, 2 * 3 * 2)])
def test_pages_side_by_side_are_few_runs(contiguous, pieces):
    # 500 tokens are 31 whole pages of 16 and one of 4 tokens.
    model = {"layers": 3, "components": {"kv": {"heads": 2, "head_dim": 8}}}
    topology = read_topology({"model": model})
    found = explain(topology, topology, Request(500, contiguous=contiguous))
    assert found.pieces == pieces
    (pair,) = found.pairs
    page = 16 * 2 * 8 * BF16
    runs = pair.flows[0].runs
    assert (runs.shortest, runs.longest) == (page // 4, 31 * page if contiguous else page)


def test_rows_of_tensors_fused_and_apart():
    model = {"layers": 3, "components": {"kv": {"heads": 2, "head_dim": 8}}}
    for placement, pieces in (("layers_first", 2 * 3 * 4), ("fused", 3 * 4), ("blocks_first", 4)):
        topology = read_topology({"model": model, "placement": placement})
        assert explain(topology, topology, Request(64)).pieces == pieces


def test_times_are_given_when_asked_for():
    topology = read_topology({"model": "qwen3-32b"})
    assert explain(topology, topology, Request(10)).planner is None
    assert explain(topology, topology, Request(10), timed=True).planner.compile > 0
