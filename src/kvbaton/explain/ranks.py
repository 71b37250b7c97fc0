"""Totals over pairs: by rank, by side and by component."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvbaton.explain import result
from kvbaton.explain.runs import RunLengths
from kvbaton.layout import TOKEN, Coords, RankLayout, Tensor


def label(coords: Coords, number: int) -> str:
    """A short name: the coordinates that tell ranks of a replica apart, or the rank's number where there is one."""
    named = zip(("pp", "cp", "tp"), (coords.pp, coords.cp, coords.tp), strict=True)
    return " ".join(f"{name}{rank}" for name, (rank, size) in named if size > 1) or f"rank {number}"


def by_rank(
    pairs: Sequence[result.Pair], sources: Sequence[RankLayout], destinations: Sequence[RankLayout]
) -> tuple[list[result.RankInfo], list[result.RankInfo]]:
    """What each source sends, and what each destination receives."""

    def told(layouts: Sequence[RankLayout], side: str) -> list[result.RankInfo]:
        listed = []
        for number, layout in enumerate(layouts):
            mine = [pair for pair in pairs if getattr(pair, side) == number]
            listed.append(
                result.RankInfo(
                    number,
                    label(layout.coords, number),
                    str(layout.coords),
                    tuple(component.name for component in layout.components),
                    sum(pair.nbytes for pair in mine),
                    sum(pair.pieces for pair in mine),
                    len(mine),
                )
            )
        return listed

    return told(sources, "source"), told(destinations, "destination")


def side(title: str, model: str, replicas: int, ranks: Sequence[result.RankInfo]) -> result.Side:
    """One side with its balance (1.0 where every rank moves as much, and where nothing moves)."""
    total = sum(rank.nbytes for rank in ranks)
    balance = max(rank.nbytes for rank in ranks) * len(ranks) / total if total else 1.0
    return result.Side(title, model, replicas, tuple(ranks), round(balance, 3))


def runs(lengths: RunLengths) -> result.Runs:
    """The figures that tell about ``lengths``."""
    return result.Runs(lengths.pieces, lengths.shortest, lengths.median, lengths.longest)


def component(
    name: str,
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    lengths: RunLengths,
    casts: tuple[result.CastInfo, ...] = (),
) -> result.ComponentInfo:
    """Totals of one component, and how many ranks of each side hold an element of it."""
    kind = next(entry.kind for layout in destinations for entry in layout.components if entry.name == name)
    return result.ComponentInfo(
        name, str(kind), lengths.nbytes, runs(lengths), _copies(name, sources), _copies(name, destinations), casts
    )


def _copies(name: str, layouts: Sequence[RankLayout]) -> float:
    held, whole = 0.0, {}
    for layout in layouts:
        for entry in layout.components:
            if entry.name != name:
                continue
            share = 1 / layout.owned_of(entry).modulus
            for tensor in entry.tensors:
                if tensor.rows:
                    whole[tensor.role, tensor.layer] = _bytes(tensor, local=False)
                    held += share * _bytes(tensor, local=True)
    return round(held / sum(whole.values()), 3) if whole else 0.0


def _bytes(tensor: Tensor, *, local: bool) -> int:
    """Bytes of one entry: what the rank holds of it, or all of it."""
    sizes = [axis.local_size if local else axis.size for axis in tensor.axes if axis.name != TOKEN]
    return math.prod(sizes) * tensor.itemsize
