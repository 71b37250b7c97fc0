"""Boxes of one tensor by its axes alone: made once for all layers that are laid out alike."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Span
from kvbaton.plan.boxes import Int64s
from kvbaton.plan.stretch import Repeat, Stretch, Track, stretches

MAX_BOXES = 1 << 16
"""Bound of the boxes that one tensor of one pair of ranks may need."""


class Template(NamedTuple):
    """Boxes without a place: count0, count1 and elements of a run; then offset, stride0, stride1 on each track."""

    shape: Int64s
    places: tuple[Int64s, ...]


def template(
    source: tuple[Axis, ...],
    destination: tuple[Axis, ...],
    tracks: tuple[Track, ...],
    block: dict[str, tuple[Span, ...]],
    tokens: int,
    name: str,
) -> Template:
    """Return the boxes that copy ``block`` for ``tokens`` neighbouring tokens (0: rows without tokens).

    The first two of ``tracks`` are those of the source and the destination; the others are of scales: all elements of a
    run have the same one there. Raises `LayoutMismatch`, naming ``name``, where the two layouts break the rows into too
    many boxes.
    """
    others = {axis.name: axis for axis in source}
    fixed: list[Repeat] = []
    pieces: list[list[Stretch]] = []
    for axis in destination:
        steps = [track.steps.get(axis.name, (0, 0)) for track in tracks]
        if axis.name == TOKEN and tokens:
            fixed.append(Repeat(tokens, tuple(stride for _, stride in steps)))
        else:
            pieces.append(
                [
                    stretch
                    for at, to, count in common_pieces(others[axis.name].spans, axis.spans, block[axis.name])
                    for stretch in stretches([(at, to)[track.side] for track in tracks], count, steps)
                ]
            )
    total = math.prod(len(listed) for listed in pieces)
    rows: list[tuple[int, ...]] = []
    for combination in itertools.product(*pieces) if total <= MAX_BOXES else ():
        repeats = [*fixed, *(repeat for stretch in combination for repeat in stretch.repeats)]
        elements, repeats = collapse(repeats, tuple(track.itemsize for track in tracks))
        starts = tuple(map(sum, zip(*(stretch.offsets for stretch in combination), strict=True)))
        total += math.prod(repeat.times for repeat in repeats[:-2]) - 1
        if total > MAX_BOXES:
            break
        rows.extend(_expand(elements, repeats, starts or (0,) * len(tracks)))
    if total > MAX_BOXES:
        raise LayoutMismatch(f"{name}: the two layouts break each row into more than {MAX_BOXES} boxes")
    table = np.array(rows, np.int64).reshape(-1, 3 + 3 * len(tracks))
    return Template(table[:, :3], tuple(table[:, 3 * place : 3 * place + 3] for place in range(1, len(tracks) + 1)))


def common_pieces(
    source: tuple[Span, ...], destination: tuple[Span, ...], wanted: tuple[Span, ...]
) -> list[tuple[int, int, int]]:
    """``(source index, destination index, count)``, local indices, of what all three have in common."""
    places = [sorted(_locals(spans)) for spans in (source, destination, wanted)]
    positions = [0, 0, 0]
    found: list[tuple[int, int, int]] = []
    while all(position < len(listed) for position, listed in zip(positions, places, strict=True)):
        here = [listed[position] for position, listed in zip(positions, places, strict=True)]
        ends = [start + count for start, _, count in here]
        first, last = max(start for start, _, _ in here), min(ends)
        if first < last:
            at, to = (local + first - start for start, local, _ in here[:2])
            found.append((at, to, last - first))
        positions[ends.index(last)] += 1
    return found


def collapse(repeats: list[Repeat], itemsizes: tuple[int, ...]) -> tuple[int, list[Repeat]]:
    """Return the elements of the longest run and the repeats that are left, those with the two largest counts last."""
    left = [repeat for repeat in repeats if repeat.times > 1]
    elements, run = 1, itemsizes
    inner = next((repeat for repeat in left if repeat.steps == run), None)
    while inner is not None:
        elements *= inner.times
        run = tuple(size * elements for size in itemsizes)
        left.remove(inner)
        inner = next((repeat for repeat in left if repeat.steps == run), None)
    pair = _regular_pair(left)
    while pair is not None:
        outer, inside = pair
        left = [repeat for repeat in left if repeat not in pair]
        left.append(Repeat(outer.times * inside.times, inside.steps))
        pair = _regular_pair(left)
    left.sort(key=lambda repeat: repeat.times)
    # The two that stay repeats step from large to small; the others become boxes.
    return elements, left[:-2] + sorted(left[-2:], key=lambda repeat: -repeat.steps[0])


def _regular_pair(repeats: list[Repeat]) -> tuple[Repeat, Repeat] | None:
    for outer, inside in itertools.permutations(repeats, 2):
        if outer.steps == tuple(step * inside.times for step in inside.steps):
            return outer, inside
    return None


def _expand(elements: int, repeats: list[Repeat], starts: tuple[int, ...]) -> list[tuple[int, ...]]:
    kept = [Repeat(1, (0,) * len(starts))] * (2 - len(repeats[-2:])) + repeats[-2:]
    shape = (kept[0].times, kept[1].times, elements)
    rows: list[tuple[int, ...]] = []
    for index in itertools.product(*(range(repeat.times) for repeat in repeats[:-2])):
        row = list(shape)
        for track, start in enumerate(starts):
            offset = start + sum(i * repeat.steps[track] for i, repeat in zip(index, repeats, strict=False))
            row += (offset, kept[0].steps[track], kept[1].steps[track])
        rows.append(tuple(row))
    return rows


def _locals(spans: tuple[Span, ...]) -> list[tuple[int, int, int]]:
    """``(global start, local start, count)`` of each span."""
    listed: list[tuple[int, int, int]] = []
    local = 0
    for start, count in spans:
        listed.append((start, local, count))
        local += count
    return listed
