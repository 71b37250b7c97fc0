"""Groups of alike: many ranks in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbaton.explain.result import Explanation, Pair, RankInfo, Refusal


class PairGroup(NamedTuple):
    """Pairs that move as much, in equal pieces, of equal layers; their indices differ."""

    pairs: tuple[Pair, ...]

    @property
    def first(self) -> Pair:
        """The one that stands for all."""
        return self.pairs[0]


def alike_pairs(pairs: Iterable[Pair]) -> list[PairGroup]:
    """``pairs`` in groups, in the order of the first of each."""
    groups: dict[object, list[Pair]] = {}
    for pair in pairs:
        flows = tuple(
            (flow.component, flow.nbytes, flow.runs, tuple((part.roles, part.layers) for part in flow.parts))
            for flow in pair.flows
        )
        groups.setdefault((pair.executor, flows), []).append(pair)
    return [PairGroup(tuple(group)) for group in groups.values()]


def alike_ranks(ranks: Iterable[RankInfo]) -> list[tuple[RankInfo, ...]]:
    """``ranks`` that move as much, with as many peers."""
    groups: dict[object, list[RankInfo]] = {}
    for rank in ranks:
        groups.setdefault((rank.nbytes, rank.pieces, rank.peers), []).append(rank)
    return [tuple(group) for group in groups.values()]


def alike_refusals(refusals: Iterable[Refusal]) -> list[tuple[Refusal, ...]]:
    """``refusals`` with the same reason."""
    groups: dict[object, list[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.error, refusal.reason), []).append(refusal)
    return [tuple(group) for group in groups.values()]


def pair_name(explanation: Explanation, source: int | None, destination: int) -> str:
    """``tp0 → tp1``; a destination alone where no source is named."""
    to = explanation.destination.ranks[destination].label
    return f"{explanation.source.ranks[source].label} → {to}" if source is not None else f"→ {to}"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of ``names``, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
