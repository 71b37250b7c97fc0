import numpy as np
import pytest

from kvbaton.errors import RowsError
from kvbaton.layout import Ownership, RankLayout, conv_state, mla_latent
from kvbaton.plan import Pages, compile_pair


def layout(page_size, rows=8, owned=None):
    latent = mla_latent("kv", layers=(0,), rows=rows, page_size=page_size, latent_dim=2, dtype="uint8")
    state = conv_state("state", layers=(0,), rows=3, blocks=(4,), columns=2, dtype="uint8")
    return RankLayout((latent, state), owned=owned or Ownership())


PLAN = compile_pair(layout(4), layout(8, rows=4))


def test_only_what_was_asked_for_moves():
    assert PLAN.components == ("kv", "state")
    transfers = PLAN.bind("kv", (3, 14), Pages([5, 2, 0, 1], 0), Pages([3, 0], 0))
    assert sum(transfer.nbytes for transfer in transfers) == 11 * 2
    whole, single = transfers
    assert whole.source_units.tolist() == [2, 0]
    assert whole.destination_units.tolist() == [3 * 2 + 1, 0]
    assert single.source_units.tolist() == [5 * 4 + 3, 1 * 4, 1 * 4 + 1]
    assert single.destination_units.tolist() == [3 * 8 + 3, 4, 5]


def test_nothing_asked_for_gives_nothing():
    empty = Pages(np.empty(0, np.int64), 0)
    assert PLAN.bind("kv", (5, 5), empty, empty) == []
    assert PLAN.bind_slots("state", [], []) == []


BAD = {
    "source too short": (
        (0, 9),
        Pages([0, 1], 0),
        Pages([0, 1], 0),
        r"source: component kv: 2 rows .* 0\.\.8, but tokens 8\.\.9 are",
    ),
    "destination too short": ((0, 9), Pages([0, 1, 2], 0), Pages([0], 0), r"destination: component kv: 1 rows"),
    "pages begin later": (
        (0, 9),
        Pages([0, 1, 2], 4),
        Pages([0, 1], 0),
        r"source: component kv: .* 4\.\.16, but tokens 0",
    ),
    "start inside a page": ((0, 4), Pages([0], 2), Pages([0], 0), r"source: .* start at local token 2, .* size 4"),
    "negative start": ((0, 4), Pages([0], -4), Pages([0], 0), r"source: .* start at local token -4"),
    "row past the end": (
        (0, 4),
        Pages([8], 0),
        Pages([0], 0),
        "source: component kv: row 8 is outside the 8 registered",
    ),
    "negative row": ((0, 4), Pages([0], 0), Pages([-1], 0), "destination: component kv: row -1 is outside the 4"),
    "row of a ragged end": ((0, 3), Pages([9], 0), Pages([0], 0), "source: component kv: row 9 is outside the 8"),
    "backwards": ((4, 3), Pages([0], 0), Pages([0], 0), r"tokens 4\.\.3 are no range"),
    "negative tokens": ((-4, 3), Pages([0], 0), Pages([0], 0), r"tokens -4\.\.3 are no range"),
    "floats": (
        (0, 4),
        Pages([0.5], 0),
        Pages([0], 0),
        "source: .* must be a flat list of integers, but are of type float64",
    ),
    "two dimensions": ((0, 4), Pages([[0]], 0), Pages([0], 0), "but are an array of 2 dimensions"),
    "ragged list": ((0, 4), Pages([[0], [1, 2]], 0), Pages([0], 0), "must be a flat list of integers"),
    "more than 64 bits": ((0, 4), Pages([1 << 70], 0), Pages([0], 0), "must be a flat list of integers"),
    "above the signed range": ((0, 4), Pages([1 << 63], 0), Pages([0], 0), "is outside the 8 registered rows"),
}


@pytest.mark.parametrize(("tokens", "source", "destination", "message"), BAD.values(), ids=BAD.keys())
def test_refused(tokens, source, destination, message):
    with pytest.raises(RowsError, match=message):
        PLAN.bind("kv", tokens, source, destination)


def test_slots_are_checked():
    with pytest.raises(RowsError, match="source: component state: row 3 is outside the 3"):
        PLAN.bind_slots("state", [3], [0])
    with pytest.raises(RowsError, match="destination: component state: row -1 is outside the 3"):
        PLAN.bind_slots("state", [0], [-1])


def test_components_are_checked():
    pages = Pages([0], 0)
    with pytest.raises(RowsError, match="component x is not registered; registered are kv, state"):
        PLAN.bind("x", (0, 1), pages, pages)
    with pytest.raises(RowsError, match="component state is of kind slot: use bind_slots"):
        PLAN.bind("state", (0, 1), pages, pages)
    with pytest.raises(RowsError, match="component kv is of kind paged: use bind"):
        PLAN.bind_slots("kv", [0], [0])


def test_rows_can_be_checked_by_themselves():
    PLAN.check_rows("kv", "source", np.arange(8))
    with pytest.raises(RowsError, match="destination: component kv: row 7 is outside the 4"):
        PLAN.check_rows("kv", "destination", np.arange(8))


def test_a_component_of_one_side_only_moves_nothing():
    plan = compile_pair(layout(4), RankLayout(layout(4).components[:1]))
    assert plan.components == ("kv",)
    assert plan.bind_slots("state", [0], [0]) == []


@pytest.mark.parametrize(("first", "last"), [(0, 12), (3, 11), (3, 10), (5, 8), (10, 11)])
def test_owned_tokens_only(first, last):
    # The source owns tokens 2, 3, 6, 7, 10, 11; the destination owns 0, 1, 2, 3, 8, 9, 10, 11 of the first twelve.
    plan = compile_pair(layout(2, owned=Ownership(2, 2, 1)), layout(4, owned=Ownership(4, 2, 0)))
    both = [(2, 2), (3, 3), (10, 6), (11, 7)]
    right = [(token, there) for token, there in both if first <= token < last]
    pages = Pages([0, 1, 2], 0), Pages([0, 1], 0)
    moved = []
    for transfer in plan.bind("kv", (first, last), *pages):
        per = transfer.boxes.bytes_per_unit // 2
        for unit, other in zip(transfer.source_units.tolist(), transfer.destination_units.tolist(), strict=True):
            moved += [((unit * per + i) // 2 * 4 + 2 + (unit * per + i) % 2, other * per + i) for i in range(per)]
    assert sorted(moved) == right


def test_the_bytes_of_a_token():
    assert PLAN.bytes_per_token("kv") == 2


@pytest.mark.parametrize("owned", [Ownership(), Ownership(2, 2, 1)])
def test_an_absurd_range_is_refused_at_once(owned):
    plan = compile_pair(layout(4), layout(4, owned=owned))
    with pytest.raises(RowsError, match="source: component kv: 2 rows of 4 tokens cover"):
        plan.bind("kv", (0, 1 << 49), Pages([0, 1], 0), Pages([0], 0))
