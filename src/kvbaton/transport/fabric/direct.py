"""Boxes as contiguous writes: what the direct executor posts. Numpy over boxes and units, no loop over pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.fabric.base import FabricLimits, Writes

PIECES = 1 << 16
"""Pieces that are computed at a time, about: some milliseconds."""


def direct_writes(
    transfers: Iterable[Transfer], local_numbers: Int64s, remote_numbers: Int64s, limits: FabricLimits
) -> Iterator[Writes]:
    """All bytes of ``transfers``, each once, as writes that stay within ``limits``; none of them casts.

    ``local_numbers`` and ``remote_numbers`` give the fabric's number of each region. Runs that touch on both sides are
    one write, as far as they are computed together.
    """
    for transfer in transfers:
        shape = transfer.boxes.shape
        step = max(1, PIECES // int((shape[:, 0] * shape[:, 1]).sum()))
        for first in range(0, len(transfer.source_units), step):
            chosen = slice(first, first + step)
            part = Transfer(transfer.boxes, transfer.source_units[chosen], transfer.destination_units[chosen])
            yield from _cut(*_merged(*_pieces(part)), local_numbers, remote_numbers, limits)


def _pieces(transfer: Transfer) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Region pairs, offsets on both sides, and lengths: a column for each piece, four rows in all."""
    boxes, source_units, destination_units = transfer
    counts = boxes.shape[:, 0] * boxes.shape[:, 1]
    box = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.divmod(number, boxes.shape[box, 1])
    local = _offsets(boxes.source, source_units, box, places)
    remote = _offsets(boxes.destination, destination_units, box, places)
    pairs = np.ascontiguousarray(np.stack([boxes.source[box, 0], boxes.destination[box, 0]], axis=1))
    units = len(source_units)
    return (
        np.repeat(pairs, units, axis=0),
        local.reshape(-1),
        remote.reshape(-1),
        np.repeat(boxes.shape[box, 2], units),
    )


def _offsets(side: Int64s, units: Int64s, box: Int64s, places: tuple[Int64s, Int64s]) -> Int64s:
    """Offsets of all pieces, ``[pieces of a unit, units]``."""
    row, part = np.divmod(units[None, :], side[:, 3, None])
    outer = row * side[:, 2, None] + part * side[:, 4, None] + side[:, 1, None]
    inner = places[0] * side[box, 5] + places[1] * side[box, 6]
    offsets: Int64s = outer[box] + inner[:, None]
    return offsets


def _merged(pairs: Int64s, local: Int64s, remote: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """The same bytes in order of pairs and remote offsets, with runs that touch on both sides put together."""
    order = np.lexsort((remote, pairs[:, 1], pairs[:, 0]))
    pairs, local, remote, lengths = pairs[order], local[order], remote[order], lengths[order]
    touch = (pairs[1:] == pairs[:-1]).all(axis=1)
    touch &= (local[1:] == local[:-1] + lengths[:-1]) & (remote[1:] == remote[:-1] + lengths[:-1])
    starts = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    return pairs[starts], local[starts], remote[starts], np.add.reduceat(lengths, starts)


def _cut(
    pairs: Int64s,
    local: Int64s,
    remote: Int64s,
    lengths: Int64s,
    local_numbers: Int64s,
    remote_numbers: Int64s,
    limits: FabricLimits,
) -> Iterator[Writes]:
    """Cut to the limits: bytes of a write, writes of a post, and one pair of regions for each post."""
    if int(lengths.max()) > limits.write_bytes:
        parts = -(-lengths // limits.write_bytes)
        which = np.repeat(np.arange(len(lengths)), parts)
        skipped = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * limits.write_bytes
        pairs, local, remote = pairs[which], local[which] + skipped, remote[which] + skipped
        lengths = np.minimum(lengths[which] - skipped, limits.write_bytes)
    changes = np.flatnonzero((pairs[1:] != pairs[:-1]).any(axis=1)) + 1
    for first, last in zip((0, *changes.tolist()), (*changes.tolist(), len(lengths)), strict=True):
        source, destination = (int(number) for number in pairs[first])
        for begin in range(first, last, limits.writes):
            some = slice(begin, min(begin + limits.writes, last))
            yield Writes(
                int(local_numbers[source]), int(remote_numbers[destination]), local[some], remote[some], lengths[some]
            )
