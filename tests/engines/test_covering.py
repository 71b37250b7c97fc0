from __future__ import annotations

from covering import allowed_pairs, covering_rows, pairs_of

FACTORS = {"a": (1, 2, 4), "b": (1, 2, 4), "c": ("x", "y"), "d": (False, True)}


def small(row):
    return row["a"] * row["b"] <= 4


def test_every_allowed_pair_is_met_and_no_row_is_outside_the_bound():
    rows = covering_rows(FACTORS, small, at_least=1, seed=3)
    assert all(small(row) for row in rows)
    met = set().union(*map(pairs_of, rows))
    assert (("a", 4), ("b", 1)) in met
    assert (("a", 4), ("b", 2)) not in allowed_pairs(FACTORS, small)
    assert met == allowed_pairs(FACTORS, small)
    # Three values of two factors each, less the pairs outside the bound, and not all combinations of the others.
    assert 6 <= len(rows) < 12


def test_rows_are_those_of_the_seed_and_as_many_as_asked_for():
    rows = covering_rows(FACTORS, small, at_least=20, seed=5)
    assert rows == covering_rows(FACTORS, small, at_least=20, seed=5)
    assert len(rows) == 20
    assert len({tuple(row.items()) for row in rows}) == 20
