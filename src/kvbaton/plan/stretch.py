"""Stretches: neighbours along one axis, cut so that every track steps through them evenly."""

from __future__ import annotations

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
    phases = {(block, start % block) for start, (block, _) in zip(starts, steps, strict=True) if block > 1}
    if not phases:
        yield Stretch(_offsets(starts, steps), (Repeat(count, _inside(steps)),))
        return
    block, phase = max(phases)
    head = min(-phase % block, count)
    if len(phases) > 1:
        # Blocks of several sizes, or begun at several places: one after the other, each with one element of that track.
        bounds = [0, *range(head or block, count, block), count]
    else:
        bounds = [0, head, head + (count - head) // block * block, count]
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        if first == last:
            continue
        here = [start + first for start in starts]
        if len(phases) > 1:
            fixed = [
                start % size == (phase + first) % block and size == block
                for start, (size, _) in zip(here, steps, strict=True)
            ]
            inner = [(0, 0) if alone else step for alone, step in zip(fixed, steps, strict=True)]
            base = [
                start // size * step if alone else 0
                for alone, start, (size, step) in zip(fixed, here, steps, strict=True)
            ]
            for stretch in stretches(here, last - first, inner):
                offsets = tuple(at + more for at, more in zip(stretch.offsets, base, strict=True))
                yield Stretch(offsets, stretch.repeats)
        elif first == head and last - first >= block:
            outer = tuple(step * block if size == 1 else step for size, step in steps)
            repeats = (Repeat((last - first) // block, outer), Repeat(block, _inside(steps)))
            yield Stretch(_offsets(here, steps), repeats)
        else:
            yield Stretch(_offsets(here, steps), (Repeat(last - first, _inside(steps)),))


def _offsets(starts: Sequence[int], steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(start // size * step if size else 0 for start, (size, step) in zip(starts, steps, strict=True))


def _inside(steps: Sequence[Step]) -> tuple[int, ...]:
    """The steps between neighbours that share their blocks."""
    return tuple(step if size == 1 else 0 for size, step in steps)
