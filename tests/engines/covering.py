"""A covering array: few rows in which every pair of values of two factors is met, made greedily from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

CANDIDATES = 20


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def allowed_pairs(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> set[Pair]:
    """Every pair that some allowed row has. The first value of each factor must be the one that bounds mind least."""
    least = {name: values[0] for name, values in factors.items()}
    found = set()
    for (one, ones), (other, others) in itertools.combinations(factors.items(), 2):
        for pair in itertools.product(ones, others):
            if allowed({**least, one: pair[0], other: pair[1]}):
                found.add(((one, pair[0]), (other, pair[1])))
    return found


def covering_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], *, at_least: int, seed: int
) -> list[Row]:
    """Rows that meet every allowed pair, and at least so many of them; the same for the same seed."""
    dice = random.Random(seed)
    uncovered = allowed_pairs(factors, allowed)
    rows: list[Row] = []
    while uncovered or len(rows) < at_least:
        best: Row = {}
        gain = -1
        listed = sorted(uncovered, key=repr)
        for _ in range(CANDIDATES):
            row = _fill(factors, allowed, dict(dice.choice(listed)) if listed else {}, uncovered, dice)
            if row not in rows and len(pairs_of(row) & uncovered) > gain:
                best, gain = row, len(pairs_of(row) & uncovered)
        assert best, "there are not so many different rows"
        rows.append(best)
        uncovered -= pairs_of(best)
    return rows


def _fill(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    begun: Row,
    uncovered: set[Pair],
    dice: random.Random,
) -> Row:
    """Choose the other values one after the other, each so that it meets most uncovered pairs with those before."""
    chosen = dict(begun)
    least = {name: values[0] for name, values in factors.items()}
    for name in dice.sample(list(factors), len(factors)):
        if name in chosen:
            continue
        values = [value for value in factors[name] if allowed({**least, **chosen, name: value})]
        dice.shuffle(values)

        def gain(value: Any, name: str = name) -> int:
            row = {each: {**chosen, name: value}[each] for each in factors if each in chosen or each == name}
            return len(pairs_of(row) & uncovered)

        chosen[name] = max(values, key=gain)
    return {name: chosen[name] for name in factors}
