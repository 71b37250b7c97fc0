from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engines.sglang.chunks import Chunks, length


@given(
    page_size=st.sampled_from([1, 4, 16, 64]),
    total=st.integers(1, 2000),
    prefix_pages=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 9), max_size=30),
)
def test_chunks_cover_what_decode_lacks(page_size, total, prefix_pages, cuts):
    prefix = min(prefix_pages * page_size, (total - 1) // page_size * page_size)
    pages = -(-(total - prefix) // page_size)
    chunks = Chunks(page_size)
    assert chunks.skip(prefix) == prefix
    chunks.begin(pages)
    left, at, spans = pages, prefix, []
    for cut in [*cuts, pages]:
        count = min(cut, left)
        left -= count
        if not count:
            continue
        end = min(at + count * page_size, total)
        chunk = chunks.take(count, end - at)
        assert chunk.final == (left == 0)
        spans.append(chunk)
        at = end
    assert [chunk.first for chunk in spans] == [prefix, *(chunk.last for chunk in spans[:-1])]
    assert spans[-1].last == total


def test_a_prefix_is_cut_down_to_whole_pages_of_this_side():
    chunks = Chunks(64)
    assert chunks.skip(80) == 64
    assert chunks.prefix == 64


def test_a_request_that_decode_has_already_is_one_empty_chunk():
    chunks = Chunks(16)
    chunks.skip(64)
    chunks.begin(0)
    assert chunks.take(0, 0) == (64, 64, True)


def test_without_a_count_pages_are_full():
    chunks = Chunks(16)
    chunks.begin(3)
    assert chunks.take(2, None) == (0, 32, False)
    assert chunks.take(1, None) == (32, 48, True)


def test_an_attempt_that_starts_over_counts_anew():
    chunks = Chunks(16)
    chunks.begin(2)
    chunks.take(1, 16)
    chunks.begin(2)
    assert chunks.take(2, 30) == (0, 30, True)


@pytest.mark.parametrize(
    ("exact", "offered", "expected"),
    [(100, 100, 100), (100, 112, 112), (96, 96, 96), (100, 128, 100), (100, 99, 100), (0, 0, 0)],
)
def test_the_length_is_what_both_sides_can_agree_on(exact, offered, expected):
    assert length(exact, offered, 16) == expected
