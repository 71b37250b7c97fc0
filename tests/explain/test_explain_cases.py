"""Faults of the field, written as topologies: who sends to whom, and which bytes."""

import pytest

from kvbaton.explain import Request, explain, side_of
from kvbaton.explain.page import view_pages
from kvbaton.topology import read_topology


def both(components, source, destination, layers=1):
    model = {"layers": layers, "components": components}
    return [read_topology({"model": model, **side}) for side in (source, destination)]


def pieces(topologies, pair, tokens=2):
    request = Request(tokens)
    sides = [side_of(topology, request) for topology in topologies]
    (view,) = view_pages(*sides, request, pair, cast=topologies[1].cast)
    return [(run.source[1], run.destination[1], run.nbytes) for run in view.runs]


def writers(topologies, tokens=2):
    return [(pair.source, pair.destination) for pair in explain(*topologies, Request(tokens)).pairs]


def test_a_cast_has_runs_of_unlike_length():
    topologies = both({"kv": {"dim": 4}}, {"page_size": 2}, {"page_size": 2, "dtype": "float32", "cast": True})
    request = Request(2)
    (view,) = view_pages(*(side_of(topology, request) for topology in topologies), request, (0, 0), cast=True)
    assert [(run.read, run.nbytes) for run in view.runs] == [(16, 32)]
    (component,) = explain(*topologies, request).components
    (cast,) = component.casts
    assert (cast.roles, cast.layers, cast.source, cast.destination) == (("latent",), (0,), "bfloat16", "float32")
    assert (cast.relative, cast.bound) == (0.0, "none: exact")


KEYS = {"kv": {"tensors": {"key": {"axes": {"head": {"size": 8, "cut": "heads"}, "dim": 4}}}}}


def test_d01_replicated_heads_scattered():
    topologies = both({"kv": {"heads": 2, "head_dim": 4}}, {"tp": 2, "page_size": 2}, {"tp": 8, "page_size": 2})
    assert writers(topologies) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    found = explain(*topologies, Request(2))
    heads = [pair.flows[0].parts[0].block["head"] for pair in found.pairs]
    assert heads == [((0, 1),)] * 4 + [((1, 1),)] * 4
    assert {pair.nbytes for pair in found.pairs} == {2 * 2 * 4 * 2}


def test_d02a_replicated_heads_gathered_from_one_holder_each():
    found = writers(both({"kv": {"heads": 2, "head_dim": 4}}, {"tp": 4}, {"tp": 2, "striped": False}))
    assert [destination for _, destination in found] == [0, 1]
    assert [source // 2 for source, _ in found] == [0, 1]


@pytest.mark.parametrize(
    ("rank", "right"),
    [
        (0, [(0, 0, 16), (16, 32, 16)]),
        (1, [(0, 16, 16), (16, 48, 16)]),
        (2, [(0, 0, 16), (16, 32, 16)]),
        (3, [(0, 16, 16), (16, 48, 16)]),
    ],
)
def test_d02b_slices_of_heads(rank, right):
    topologies = both(KEYS, {"tp": 4, "page_size": 2}, {"tp": 2, "page_size": 2})
    assert pieces(topologies, (rank, rank // 2)) == right
    found = explain(*topologies, Request(2))
    assert [(pair.source, pair.destination, pair.pieces, pair.nbytes) for pair in found.pairs] == [
        (source, source // 2, 2, 32) for source in range(4)
    ]


CONV = {"conv": {"blocks": {"q": 8, "k": 8, "v": 16}, "columns": 3, "dtype": "bfloat16"}}
D03 = [[(0, 0, 24), (48, 24, 24), (96, 48, 48)], [(24, 0, 24), (72, 24, 24), (144, 48, 48)]]


@pytest.mark.parametrize("rank", [0, 1])
def test_d03_blocks_of_a_convolution_state(rank):
    assert pieces(both(CONV, {"tp": 1}, {"tp": 2}), (0, rank)) == D03[rank]
    back = pieces(both(CONV, {"tp": 2}, {"tp": 1}), (rank, 0))
    assert back == [(to, at, nbytes) for at, to, nbytes in D03[rank]]


def test_d03_one_block_is_one_cut():
    conv = {"conv": {"blocks": {"all": 32}, "columns": 3}}
    assert pieces(both(conv, {"tp": 1}, {"tp": 2}), (0, 1)) == [(96, 0, 96)]


def test_d11_other_dtypes_are_refused_with_both_and_every_pair_named():
    kv = {"kv": {"heads": 4, "head_dim": 8}}
    topologies = both(kv, {"tp": 2}, {"dtype": "float8_e4m3fn"})
    found = explain(*topologies, Request(2))
    assert not found.pairs
    assert [(refusal.source, refusal.destination) for refusal in found.refusals] == [(0, 0), (1, 0)]
    assert {refusal.error for refusal in found.refusals} == {"LayoutMismatch"}
    for refusal in found.refusals:
        assert "dtype is bfloat16 at the source and float8_e4m3fn at the destination" in refusal.reason


def test_one_destination_is_refused_and_the_others_are_explained():
    # The first stage fits; the second needs a layer that the sources do not have.
    source = read_topology({"model": {"layers": 4, "components": {"kv": {"layers": "0-2", "heads": 1, "head_dim": 4}}}})
    model = {"layers": 4, "components": {"kv": {"heads": 1, "head_dim": 4}}}
    found = explain(source, read_topology({"model": model, "pp": 2}), Request(16))
    assert [(pair.source, pair.destination) for pair in found.pairs] == [(0, 0)]
    (refusal,) = found.refusals
    assert (refusal.source, refusal.destination) == (None, 1)
    assert refusal.reason == (
        "component kv, role key, layer 3: the destination needs it, but the sources have layers 0 to 2 (3 of them) of "
        "that role"
    )


def test_transports_that_do_not_meet_are_refused_as_the_handshake_does():
    found = explain(
        read_topology({"model": "qwen3-32b", "transport": ["shm"]}),
        read_topology({"model": "qwen3-32b", "transport": ["tcp"]}),
        Request(16),
    )
    (refusal,) = found.refusals
    assert refusal.error == "HandshakeError"
    assert refusal.reason.startswith("no transport in common: the prefill rank has shm, the decode rank tcp")
    assert found.pairs[0].executor == "none"
    assert found.transport.name == ""


@pytest.mark.parametrize(
    ("transport", "placement", "executor"),
    [
        ("shm", "layers_first", "mapped"),
        ("loopback", "layers_first", "mapped"),
        ("tcp", "blocks_first", "packed"),
        ("mooncake", "layers_first", "packed"),
        ("mooncake", "blocks_first", "direct"),
        ("nixl", "layers_first", "direct"),
    ],
)
def test_the_executor_follows_from_transport_and_pieces(transport, placement, executor):
    # Pieces are 32 KiB, or 4 MiB where a page holds all layers.
    topology = read_topology({"model": "qwen3-32b", "transport": transport, "placement": placement})
    found = explain(topology, topology, Request(4096))
    assert {pair.executor for pair in found.pairs} == {executor}
    assert found.transport.available
