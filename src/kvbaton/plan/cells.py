"""Cells: the blocks of global indices between all boundaries that any rank draws on any axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import Span

MAX_CELLS = 1 << 14
"""Bound of the cells of one tensor."""

MAX_HOLDINGS = 1 << 20
"""Bound of cells times source ranks, for one tensor."""

Cell = tuple[Span, ...]
"""One interval on each axis."""
Block = tuple[tuple[Span, ...], ...]
"""Intervals on each axis: all their combinations."""
Bools = npt.NDArray[np.bool_]


def intervals(needed: Sequence[Span], others: Sequence[Sequence[Span]]) -> list[Span]:
    """Cut the spans in ``needed`` at every boundary of ``others``."""
    bounds = np.unique([at for spans in (needed, *others) for start, count in spans for at in (start, start + count)])
    cut: list[Span] = []
    for start, count in needed:
        first, last = np.searchsorted(bounds, (start, start + count))
        edges = bounds[first : last + 1].tolist()
        cut.extend((low, high - low) for low, high in itertools.pairwise(edges))
    return cut


def held_by(cut: Sequence[Span], spans: Sequence[Span]) -> Bools:
    """Which of the intervals in ``cut`` lie inside ``spans``; no boundary of ``spans`` lies inside an interval."""
    ordered = np.array(sorted(spans), np.int64)
    starts = np.array([start for start, _ in cut], np.int64)
    position = np.searchsorted(ordered[:, 0], starts, side="right") - 1
    inside = starts < ordered[position, 0] + ordered[position, 1]
    return np.asarray((position >= 0) & inside)


def partition(
    needed: Sequence[Sequence[Span]], sources: Sequence[Sequence[Sequence[Span]]], name: str
) -> tuple[list[list[Span]], Bools]:
    """Cut what is needed into cells, and say which source holds each.

    ``needed`` has the spans of each axis; ``sources[i]`` those of source ``i``. Gives the intervals of each axis, and
    an array ``[source, *intervals of each axis]``. Raises `LayoutMismatch`, naming ``name``, where there are too many
    cells.
    """
    cuts = [intervals(spans, [source[axis] for source in sources]) for axis, spans in enumerate(needed)]
    total = math.prod(len(cut) for cut in cuts)
    if total > MAX_CELLS or total * len(sources) > MAX_HOLDINGS:
        raise LayoutMismatch(
            f"{name}: the spans of {len(sources)} source ranks and the destination make {total} cells; at most "
            f"{MAX_CELLS} are allowed, and {MAX_HOLDINGS} over all source ranks"
        )
    holds = np.ones((len(sources), *(len(cut) for cut in cuts)), np.bool_)
    for number, source in enumerate(sources):
        for axis, cut in enumerate(cuts):
            shape = [1] * len(cuts)
            shape[axis] = len(cut)
            holds[number] &= held_by(cut, source[axis]).reshape(shape)
    return cuts, holds


def merge(cells: list[Cell]) -> list[Block]:
    """Join cells into as few blocks as one pass along each axis finds; together they hold the same indices."""
    blocks: list[Block] = [tuple((span,) for span in cell) for cell in cells]
    for axis in reversed(range(len(cells[0]) if cells else 0)):
        lines: dict[Block, list[Span]] = {}
        for block in blocks:
            lines.setdefault(block[:axis] + block[axis + 1 :], []).extend(block[axis])
        blocks = [(*rest[:axis], _join(sorted(spans)), *rest[axis:]) for rest, spans in lines.items()]
    return sorted(blocks)


def every_cell(cuts: Sequence[Sequence[Span]]) -> list[Cell]:
    """All cells, in the order of the flattened array of `partition`."""
    return list(itertools.product(*cuts))


def _join(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, count in spans:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((start, count))
    return tuple(joined)
