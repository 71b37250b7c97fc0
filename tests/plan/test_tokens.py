"""Positions over many periods, which the oracle's small requests hardly reach."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import Component, Kind, Ownership, RankLayout, paged_kv
from kvbaton.plan import Pages, compile_pair
from kvbaton.plan.tokens import MAX_CLASSES, Repeated, choose_holders, owned_mask


@given(
    st.sets(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 90), st.integers(41, 60), st.integers(0, 300)
)
def test_repeated(offsets, begin, step, length):
    first = np.array(sorted(offsets), np.int64) + begin
    end = begin + length
    right = [at for turn in range(10) for at in (first + turn * step).tolist() if at < end]
    found = Repeated.until(first, step, begin, end)
    assert found.spelt_out().tolist() == right
    assert found.total == len(right)
    if right:
        assert found.last == right[-1]


@st.composite
def sides(draw):
    """``(page size, ownership, whether it is a ring)``."""
    modulus, unit = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2, 4)))
    owned = Ownership(unit, modulus, draw(st.integers(0, modulus - 1)))
    return draw(st.sampled_from((1, 2, 3, 4, 8))), owned, draw(st.booleans())


@given(sides(), sides(), st.integers(0, 400), st.integers(1, 400), st.randoms(use_true_random=False))
def test_long_ranges_select_what_a_loop_does(source, destination, first, count, random):
    last = first + count
    layouts, pages, places = [], [], []
    for page_size, owned, ring in (source, destination):
        held = -(-owned.local_count(last) // page_size) - owned.local_count(first) // page_size
        start = 0 if ring else owned.local_count(first) // page_size * page_size
        # One row more than the pages in use: a ring whose oldest page is used half is not yet overwritten.
        rows = random.sample(range(512), max(1, held + random.randrange(2) if ring else held))
        kv = paged_kv(layers=[0], rows=512, page_size=page_size, heads=1, head_dim=1, dtype="uint8")
        kind = Kind(window=1 << 20, reused=False, ring=ring)
        layouts.append(RankLayout((Component("kv", kind, kv.tensors[:1], page_size),), owned=owned))
        pages.append(Pages(np.array(rows), start))
        place = {}
        for token in range(first, last):
            if token // owned.unit % owned.modulus == owned.remainder:
                page, inside = divmod(owned.local_count(token) - start, page_size)
                place[token] = rows[page % len(rows)] * page_size + inside
        places.append(place)
    right = {(places[0][token], places[1][token]) for token in places[0].keys() & places[1].keys()}
    moved = []
    for transfer in compile_pair(*layouts).bind("kv", (first, last), *pages):
        assert transfer.boxes.shape.shape == (1, 3)
        run = math.prod(transfer.boxes.shape[0].tolist())
        ends = zip(transfer.source_units.tolist(), transfer.destination_units.tolist(), strict=True)
        moved += [(at * run + byte, to * run + byte) for at, to in ends for byte in range(run)]
    assert len(moved) == len(right)
    assert set(moved) == right


@pytest.mark.parametrize(
    ("unit", "modulus", "page_sizes", "busy"),
    [
        # 24 holders, of which 8 own each token, with pages of 1 and 64 tokens.
        (5, 3, [1, 64], 24),
        # A stripe of any length would take too long to come round: the first holder of each token sends.
        (251, 3, [64, 4093], 3),
    ],
)
def test_stripes_that_repeat_too_late_are_shorter_or_none(unit, modulus, page_sizes, busy):
    holders = [Ownership(unit, modulus, rank % modulus) for rank in range(24)]
    destination = Ownership(3, 3, 1)
    sent, missing = choose_holders(holders, destination, page_sizes, 0, striped=True)
    assert missing is None
    assert sum(tokens is not None for tokens in sent) == busy
    times = np.zeros(20_000, np.int64)
    for holder, tokens in zip(holders, sent, strict=True):
        if tokens is not None:
            mine = owned_mask(holder, np.arange(len(times)))
            chosen = owned_mask(tokens, np.arange(len(times)))
            times += mine if chosen is None else mine & chosen
    needed = owned_mask(destination, np.arange(len(times)))
    assert (times[needed] == 1).all()


def test_ownerships_that_repeat_too_late_are_refused():
    holders = [Ownership(1, 251, rank) for rank in range(251)]
    with pytest.raises(LayoutMismatch, match=f"{MAX_CLASSES} units, .* choose units that divide each other"):
        choose_holders(holders, Ownership(1, 263, 0), [1, 1], 0, striped=True)
