"""Arithmetic on tokens: who owns which, and who of several holders sends which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import Ownership
from kvbaton.plan.boxes import Int64s
from kvbaton.plan.share import EVERY_TOKEN, TokenClasses

MAX_CLASSES = 1 << 20
"""Bound of the token classes that a set of ranks may need (the period of all ownerships, over their common unit)."""

MAX_CHOICES = 1 << 22
"""Bound of these classes times the source ranks between which they are shared out."""

MAX_REPEAT = 1 << 24
"""Bound of that period, in tokens."""

MAX_STRIPE = 1 << 12
"""Longest stripe, in tokens, that is chosen so that it cuts no page."""


class Repeated(NamedTuple):
    """``total`` positions in turns: those of ``first`` (ascending), then all of them ``step`` further, and so on."""

    first: Int64s
    step: int
    total: int

    @classmethod
    def until(cls, first: Int64s, step: int, begin: int, end: int) -> Repeated:
        """Take all positions below ``end``; those of ``first`` lie within ``step`` from ``begin`` on."""
        turns, rest = divmod(end - begin, step)
        return cls(first, step, turns * len(first) + int(np.searchsorted(first, begin + rest)))

    @property
    def last(self) -> int:
        """The last position."""
        turns, place = divmod(self.total - 1, len(self.first))
        return int(self.first[place]) + turns * self.step

    def turns(self) -> Int64s:
        """How much further each turn lies than the first one."""
        return np.arange(-(-self.total // len(self.first)), dtype=np.int64) * self.step

    def spelt_out(self) -> Int64s:
        """All positions."""
        if self.total <= len(self.first):
            return self.first[: self.total]
        return np.asarray((self.turns()[:, None] + self.first).reshape(-1)[: self.total])


def owned_mask(owned: Ownership | TokenClasses, tokens: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    """Which of ``tokens`` belong; None for all of them."""
    if owned.modulus == 1:
        return None
    classes = tokens // owned.unit % owned.modulus
    if isinstance(owned, Ownership):
        return np.equal(classes, owned.remainder)
    member = np.zeros(owned.modulus, np.bool_)
    member[list(owned.remainders)] = True
    return np.asarray(member[classes])


def to_local(owned: Ownership, tokens: Int64s) -> Int64s:
    """Return the local position of each token on a rank that owns it."""
    if owned.modulus == 1:
        return tokens
    return tokens // (owned.unit * owned.modulus) * owned.unit + tokens % owned.unit


def choose_holders(
    holders: Sequence[Ownership], destination: Ownership, page_sizes: Sequence[int], turn: int, striped: bool
) -> tuple[list[TokenClasses | None], int | None]:
    """Which tokens, of those that ``destination`` owns, each of ``holders`` sends: every one exactly once.

    ``turn`` rotates the choice among equal holders. Gives None for a holder that sends nothing; the second value is a
    token that the destination owns and no holder does, if there is one.
    """
    repeating = [owned for owned in (*holders, destination) if owned.modulus > 1]
    units = [owned.unit for owned in repeating]
    periods = [owned.unit * owned.modulus for owned in repeating]
    # Stripes are no reason to refuse: shorter ones, or none, where they would make the period too long.
    for stripe in _stripes(page_sizes, periods) if striped and len(holders) > 1 else [0]:
        unit = math.gcd(stripe, *units) or 1
        modulus = math.lcm(stripe * len(holders) or 1, *periods) // unit
        if modulus <= min(MAX_CLASSES, MAX_CHOICES // len(holders)) and unit * modulus <= MAX_REPEAT:
            break
    else:
        raise LayoutMismatch(
            f"axis token: the ownerships of {len(holders)} source ranks and the destination repeat together only after "
            f"{unit * modulus} tokens in units of {unit}; at most {MAX_REPEAT} tokens, {MAX_CLASSES} units, and "
            f"{MAX_CHOICES} units times ranks are allowed: choose units that divide each other, or fewer ranks"
        )
    tokens = np.arange(modulus, dtype=np.int64) * unit
    every = np.ones(modulus, np.bool_)
    needed = _or_all(owned_mask(destination, tokens), every)
    owners = np.stack([_or_all(owned_mask(owned, tokens), every) for owned in holders]) & needed
    count = owners.sum(axis=0)
    turns = turn + tokens // stripe if stripe else np.full(modulus, turn, np.int64)
    order = np.cumsum(owners, axis=0) - 1
    chosen = owners & (order == turns % np.maximum(count, 1))
    missing = np.flatnonzero(needed & (count == 0))
    sent: list[TokenClasses | None] = []
    for mine, possible in zip(chosen, owners, strict=True):
        if not mine.any():
            sent.append(None)
        elif np.array_equal(mine, possible):
            # All that both ranks own: the ownerships say it already.
            sent.append(EVERY_TOKEN)
        else:
            sent.append(TokenClasses(unit, modulus, tuple(np.flatnonzero(mine).tolist())))
    return sent, int(tokens[missing[0]]) if missing.size else None


def _stripes(page_sizes: Sequence[int], periods: list[int]) -> list[int]:
    """Lengths of stripes in tokens, the best first: one that cuts no page, a page of the destination, none (0)."""
    whole = math.lcm(*page_sizes, *periods)
    return [*([whole] if whole <= MAX_STRIPE else []), page_sizes[-1], 0]


def _or_all(
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]] | None, every: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return every if mask is None else mask
