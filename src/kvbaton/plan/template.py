"""Boxes of one tensor by its axes alone: made once for all layers that are laid out alike."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from kvbaton.errors import LayoutMismatch
from kvbaton.layout import TOKEN, Axis, Span
from kvbaton.plan.boxes import Int64s

MAX_BOXES = 1 << 16
"""Bound of the boxes that one tensor of one pair of ranks may need."""


class Repeat(NamedTuple):
    """``times`` equal blocks, so many bytes apart on each side."""

    times: int
    source: int
    destination: int


class Template(NamedTuple):
    """Boxes without a place: columns count0, count1, run; then offset, stride0, stride1 of each side."""

    shape: Int64s
    source: Int64s
    destination: Int64s


def template(
    source: tuple[Axis, ...],
    destination: tuple[Axis, ...],
    itemsize: int,
    block: dict[str, tuple[Span, ...]],
    tokens: int,
    name: str,
) -> Template:
    """Return the boxes that copy ``block`` for ``tokens`` neighbouring tokens (0: rows without tokens).

    Raises `LayoutMismatch`, naming ``name``, where the two layouts break the rows into too many boxes.
    """
    others = {axis.name: axis for axis in source}
    fixed: list[Repeat] = []
    pieces: list[list[tuple[int, int, Repeat]]] = []
    for axis in destination:
        other = others[axis.name]
        if axis.name == TOKEN and tokens:
            fixed.append(Repeat(tokens, other.stride, axis.stride))
        else:
            pieces.append(
                [
                    (at * other.stride, to * axis.stride, Repeat(count, other.stride, axis.stride))
                    for at, to, count in common_pieces(other.spans, axis.spans, block[axis.name])
                ]
            )
    total = math.prod(len(listed) for listed in pieces)
    rows: list[tuple[int, ...]] = []
    for combination in itertools.product(*pieces) if total <= MAX_BOXES else ():
        run, repeats = collapse([*fixed, *(repeat for _, _, repeat in combination)], itemsize)
        start = (sum(at for at, _, _ in combination), sum(to for _, to, _ in combination))
        total += math.prod(repeat.times for repeat in repeats[:-2]) - 1
        if total > MAX_BOXES:
            break
        rows.extend(_expand(run, repeats, start))
    if total > MAX_BOXES:
        raise LayoutMismatch(f"{name}: the two layouts break each row into more than {MAX_BOXES} boxes")
    table = np.array(rows, np.int64).reshape(-1, 9)
    return Template(table[:, :3], table[:, 3:6], table[:, 6:])


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


def collapse(repeats: list[Repeat], run: int) -> tuple[int, list[Repeat]]:
    """Return the longest run of bytes and the repeats that are left, those with the two largest counts last."""
    left = [repeat for repeat in repeats if repeat.times > 1]
    inner = next((repeat for repeat in left if repeat.source == repeat.destination == run), None)
    while inner is not None:
        run *= inner.times
        left.remove(inner)
        inner = next((repeat for repeat in left if repeat.source == repeat.destination == run), None)
    pair = _regular_pair(left)
    while pair is not None:
        outer, inside = pair
        left = [repeat for repeat in left if repeat not in pair]
        left.append(Repeat(outer.times * inside.times, inside.source, inside.destination))
        pair = _regular_pair(left)
    left.sort(key=lambda repeat: repeat.times)
    # The two that stay repeats step from large to small; the others become boxes.
    return run, left[:-2] + sorted(left[-2:], key=lambda repeat: -repeat.source)


def _regular_pair(repeats: list[Repeat]) -> tuple[Repeat, Repeat] | None:
    for outer, inside in itertools.permutations(repeats, 2):
        if outer.source == inside.source * inside.times and outer.destination == inside.destination * inside.times:
            return outer, inside
    return None


def _expand(run: int, repeats: list[Repeat], start: tuple[int, int]) -> list[tuple[int, ...]]:
    kept = [Repeat(1, 0, 0)] * (2 - len(repeats[-2:])) + repeats[-2:]
    rows: list[tuple[int, ...]] = []
    for index in itertools.product(*(range(repeat.times) for repeat in repeats[:-2])):
        at = start[0] + sum(i * repeat.source for i, repeat in zip(index, repeats, strict=False))
        to = start[1] + sum(i * repeat.destination for i, repeat in zip(index, repeats, strict=False))
        rows.append(
            (
                kept[0].times,
                kept[1].times,
                run,
                at,
                kept[0].source,
                kept[1].source,
                to,
                kept[0].destination,
                kept[1].destination,
            )
        )
    return rows


def _locals(spans: tuple[Span, ...]) -> list[tuple[int, int, int]]:
    """``(global start, local start, count)`` of each span."""
    listed: list[tuple[int, int, int]] = []
    local = 0
    for start, count in spans:
        listed.append((start, local, count))
        local += count
    return listed
