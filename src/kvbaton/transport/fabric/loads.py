"""Cuts transfers into loads, each of which fits a slab: what the packed executor gathers, writes and announces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvbaton.copy import gather
from kvbaton.plan.boxes import Int64s, Transfer
from kvbaton.transport.fabric import side
from kvbaton.transport.wire import cut, encode_tables

LEAST_LOAD = 256 << 10
"""Smaller loads cost more to post and announce than it gives to have more of them under way."""
LOADS = 4
"""A write is cut into so many loads at least, so that packing, the wire and unpacking overlap."""


class Segment(NamedTuple):
    """Bytes ``[begin, end)`` of the packed stream of a transfer."""

    transfer: Transfer
    begin: int
    end: int


Load = list[Segment]


def load_bytes(nbytes: int, slab_bytes: int) -> int:
    """How large the loads of a write of ``nbytes`` bytes are, at most."""
    return min(slab_bytes, max(LEAST_LOAD, nbytes // LOADS))


def cut_loads(transfers: Iterable[Transfer], nbytes: int) -> Iterator[Load]:
    """All bytes of ``transfers``, each once, in loads of at most ``nbytes`` bytes."""
    load: Load = []
    left = nbytes
    for transfer in cut(transfers, nbytes):
        total = transfer.nbytes
        if total > left and load:
            yield load
            load, left = [], nbytes
        # Only one unit that is larger than a slab is cut within.
        for begin in range(0, total, nbytes):
            end = min(begin + nbytes, total)
            load.append(Segment(transfer, begin, end))
            left -= end - begin
            if left == 0:
                yield load
                load, left = [], nbytes
    if load:
        yield load


def pack(load: Load, bases: Int64s, slab: memoryview) -> int:
    """Gather a load into ``slab``; how many bytes it has."""
    at = 0
    for transfer, begin, end in load:
        boxes, units, _ = transfer
        part = slab[at : at + end - begin]
        gather(boxes.shape, boxes.source, units, bases, part, begin=begin, cast=boxes.cast)
        at += end - begin
    return at


def announce(load: Load, ticket: int, slab: int) -> bytes:
    """The frames that tell the peer what lies in its slab."""
    told = []
    at = 0
    for number, (transfer, begin, end) in enumerate(load, 1):
        kind = side.WHOLE if number == len(load) else side.PART
        counts = len(transfer.boxes.shape), len(transfer.destination_units)
        told.append(side.Header(kind, *counts, slab, ticket, at, begin, end - begin).encode())
        told.append(encode_tables(transfer))
        at += end - begin
    return b"".join(told)
