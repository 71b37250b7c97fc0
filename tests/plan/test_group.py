import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import RowsError
from kvbaton.plan import group_rows


def grouped(source, destination):
    return list(zip(*(column.tolist() for column in group_rows(source, destination)), strict=True))


D13 = {
    "a": ([5, 6, 7, 9, 10, 2], [20, 21, 22, 24, 25, 23], [(5, 20, 3), (9, 24, 2), (2, 23, 1)]),
    "b": ([1, 2, 3, 4], [8, 9, 20, 21], [(1, 8, 2), (3, 20, 2)]),
    "c": ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
    "d": ([], [], []),
    "e": (range(193), range(500, 693), [(0, 500, 193)]),
    "f": (range(8), range(7, -1, -1), [(i, 7 - i, 1) for i in range(8)]),
    "one": ([4], [5], [(4, 5, 1)]),
}


@pytest.mark.parametrize(("source", "destination", "right"), D13.values(), ids=D13.keys())
def test_d13(source, destination, right):
    assert grouped(source, destination) == right


def test_d13_g_unequal_lengths_are_refused():
    with pytest.raises(RowsError, match="3 rows at the source and 4 at the destination"):
        group_rows([1, 2, 3], [1, 2, 3, 4])


def test_many_runs():
    starts = np.arange(100) * 5000
    rows = (starts[:, None] + np.arange(1000)).reshape(-1)
    assert grouped(rows, rows + 7) == [(start, start + 7, 1000) for start in starts.tolist()]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_groups_spell_out_the_same_rows(pairs):
    source, destination = [a for a, _ in pairs], [b for _, b in pairs]
    runs = grouped(source, destination)
    assert [(a + i, b + i) for a, b, count in runs for i in range(count)] == pairs
    for (a, b, count), (following, other, _) in itertools.pairwise(runs):
        assert (a + count, b + count) != (following, other), "two runs could be one"
