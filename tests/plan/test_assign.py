import pytest

from kvbaton.layout import Coords, Ownership, RankLayout, mla_latent, paged_kv, recurrent_state, replicated_spans
from kvbaton.plan import EVERY_TOKEN, assign


def grid(tp, *, heads=2, page_size=4, layers=(0,), pp=1):
    return [
        RankLayout(
            (
                paged_kv(
                    layers=layers[p::pp],
                    rows=9,
                    page_size=page_size,
                    heads=heads,
                    head_dim=4,
                    dtype="bfloat16",
                    head_spans=replicated_spans(heads, rank, tp),
                ),
            ),
            Coords((rank, tp), (p, pp)),
        )
        for p in range(pp)
        for rank in range(tp)
    ]


def latents(tp, page_size=4):
    latent = mla_latent(layers=range(3), rows=9, page_size=page_size, latent_dim=8, dtype="bfloat16")
    return [RankLayout((latent,), Coords((rank, tp))) for rank in range(tp)]


def writers(sources, destinations, **options):
    """The numbers of the sources that send something to each destination."""
    found = []
    for index, destination in enumerate(destinations):
        shares = assign(sources, destination, destination_index=index, **options)
        found.append([number for number, share in enumerate(shares) if not share.empty])
    return found


def test_d01_replicated_heads_scatter():
    assert writers(grid(2), grid(8)) == [[0]] * 4 + [[1]] * 4


def test_d02a_replicated_heads_gather():
    first, second = writers(grid(4), grid(2))
    assert (len(first), len(second)) == (1, 1)
    assert first[0] in (0, 1)
    assert second[0] in (2, 3)
    assert writers(grid(4), grid(2)) == [first, second], "both sides must compute the same"


def test_d02b_head_slices():
    assert writers(grid(4, heads=8), grid(2, heads=8)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("tp", "to", "most"), [(8, 8, 1), (8, 4, 1), (4, 8, 2), (2, 8, 4), (3, 7, 3)])
def test_replicas_are_spread_over_destinations(tp, to, most):
    sent = [number for numbers in writers(latents(tp), latents(to)) for number in numbers]
    assert len(sent) == to
    assert max(sent.count(number) for number in range(tp)) == most


def test_stripes_share_the_work_of_replicas_and_cut_no_page():
    shares = assign(latents(3, page_size=4), latents(1, page_size=6)[0], destination_index=1, striped=True)
    tokens = [part.tokens for share in shares for part in share.parts]
    assert [(entry.unit, entry.modulus) for entry in tokens] == [(12, 3)] * 3
    assert sorted(entry.remainders for entry in tokens) == [(0,), (1,), (2,)]


def test_one_holder_sends_every_token_also_when_striped():
    (share,) = assign(grid(1), grid(1)[0], striped=True)
    assert {part.tokens for part in share.parts} == {EVERY_TOKEN}


def test_layers_of_pipeline_ranks():
    shares = assign(grid(1, layers=range(4), pp=2), grid(1, layers=range(4))[0])
    assert [{part.layers for part in share.parts} for share in shares] == [{(0, 2)}, {(1, 3)}]


def test_neighbouring_cells_of_one_sender_are_joined():
    # The boundaries of the other sources cut the first one's heads into cells, all of which it sends.
    (share, *others) = assign(grid(1, heads=8) + grid(4, heads=8)[1:], grid(1, heads=8)[0])
    assert [part.block for part in share.parts] == [(("dim", ((0, 4),)), ("head", ((0, 8),)))] * 2
    assert all(other.empty for other in others)


def test_context_ranks_send_what_they_own():
    sources = [
        RankLayout(layout.components, layout.coords, Ownership(2, 2, rank)) for rank, layout in enumerate(latents(2))
    ]
    shares = assign(sources, latents(1)[0])
    assert [part.tokens for share in shares for part in share.parts] == [EVERY_TOKEN] * 2
    same = [RankLayout(latents(1)[0].components, owned=Ownership(2, 2, 1))]
    assert writers(sources, same) == [[1]]


def test_replicated_slots_have_one_holder():
    state = recurrent_state(layers=range(2), rows=2, heads=2, shape=(2, 2), dtype="float32")
    layouts = [RankLayout((state,), Coords((rank, 3))) for rank in range(3)]
    assert writers(layouts, layouts) == [[0], [1], [2]]


def test_replicated_slots_are_striped_by_layers():
    state = recurrent_state(layers=(1, 5, 9, 13), rows=2, heads=2, shape=(2, 2), dtype="float32")
    layouts = [RankLayout((state,), Coords((rank, 3))) for rank in range(3)]
    shares = assign(layouts, layouts[1], destination_index=1, striped=True)
    assert [[part.layers for part in share.parts] for share in shares] == [[(9,)], [(1, 13)], [(5,)]]


def test_nothing_needed_gives_empty_shares():
    assert [share.empty for share in assign(grid(2), RankLayout(()))] == [True, True]
