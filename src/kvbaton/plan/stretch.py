"""Stretches: neighbours along one axis, cut so that every track steps through them evenly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvbaton.layout import Tensor, block_sizes

Step = tuple[int, int]
"""How many neighbours share an element, and the bytes to the next one; 0 neighbours: all share one."""


class Track(NamedTuple):
    """One tensor that a box steps through: the source's, the destination's, or the scales of one of them.

    ``side`` is 0 for the source and 1 for the destination, ``itemsize`` the bytes that an element takes in a run (0 for
    scales: all elements of a run have the same). ``steps`` is by axis.
    """

    side: int
    itemsize: int
    steps: dict[str, Step]

    @classmethod
    def of(cls, side: int, tensor: Tensor) -> Track:
        """The track of a tensor's own elements."""
        return cls(side, tensor.itemsize, {axis.name: (1, axis.stride) for axis in tensor.axes})

    @classmethod
    def of_scales(cls, side: int, tensor: Tensor, scale: Tensor) -> Track:
        """The track of the scales of ``tensor``."""
        blocks = block_sizes(tensor, scale)
        return cls(side, 0, {axis.name: (blocks[axis.name], axis.stride) for axis in scale.axes})


class Repeat(NamedTuple):
    """``times`` equal blocks, so many bytes apart on each track."""

    times: int
    steps: tuple[int, ...]


class Stretch(NamedTuple):
    """Repeats inside each other, and where the first one begins on each track, in bytes."""

    offsets: tuple[int, ...]
    repeats: tuple[Repeat, ...]


def stretches(starts: Sequence[int], count: int, steps: Sequence[Step]) -> Iterator[Stretch]:
    """Cut ``count`` neighbours, of which the first has the local index ``starts[i]`` on track ``i``."""
    grids = {_grid(start, step) for start, step in zip(starts, steps, strict=True)} - {None}
    if not grids:
        yield Stretch(_offsets(starts, steps), (Repeat(count, _inside(steps)),))
        return
    grid = max(grid for grid in grids if grid is not None)
    block, phase = grid
    head = min(-phase % block, count)
    if len(grids) == 1:
        bounds = [0, head, head + (count - head) // block * block, count]
    else:
        bounds = [0, *range(head or block, count, block), count]
    for first, last in itertools.pairwise(bounds):
        here = [start + first for start in starts]
        if len(grids) > 1:
            # Blocks of several sizes, or that begin at several places: those of the largest one after the other.
            yield from _in_one_block(here, last - first, steps, (block, (phase + first) % block))
        elif last - first >= block:
            outer = tuple(stride * block if size == 1 else stride for size, stride in steps)
            repeats = Repeat((last - first) // block, outer), Repeat(block, _inside(steps))
            yield Stretch(_offsets(here, steps), repeats)
        elif last > first:
            yield Stretch(_offsets(here, steps), (Repeat(last - first, _inside(steps)),))


Grid = tuple[int, int]
"""The size of a track's blocks, and the place in its block at which something begins."""


def _grid(start: int, step: Step) -> Grid | None:
    return (step[0], start % step[0]) if step[0] > 1 else None


def _in_one_block(starts: Sequence[int], count: int, steps: Sequence[Step], grid: Grid) -> Iterator[Stretch]:
    """Cut neighbours that lie in one block of the tracks whose grid is ``grid``."""
    alone = [_grid(start, step) == grid for start, step in zip(starts, steps, strict=True)]
    fixed = _offsets(starts, [step if one else (0, 0) for one, step in zip(alone, steps, strict=True)])
    for stretch in stretches(starts, count, [(0, 0) if one else step for one, step in zip(alone, steps, strict=True)]):
        offsets = tuple(at + more for at, more in zip(stretch.offsets, fixed, strict=True))
        yield Stretch(offsets, stretch.repeats)


def _offsets(starts: Sequence[int], steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(start // size * stride if size else 0 for start, (size, stride) in zip(starts, steps, strict=True))


def _inside(steps: Sequence[Step]) -> tuple[int, ...]:
    """The bytes between neighbours that share their blocks."""
    return tuple(stride if size == 1 else 0 for size, stride in steps)
