"""Cuts transfers into loads, each of which fits a slab: what the packed executor gathers, writes and announces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvbaton.copy.movers import PackedBytes
from kvbaton.plan.boxes import Transfer
from kvbaton.transport.fabric import side
from kvbaton.transport.table import RegionTable
from kvbaton.transport.wire import cut, encode_tables

LEAST_LOAD = 256 << 10
"""Smaller loads cost more to post and announce than it gives to have more of them under way: they share a slab."""
MOST_LOADS = 256
"""Loads that share a slab at most: packing them takes a few milliseconds, in which other peers wait."""
LOADS = 4
"""A write is cut into so many loads at least, so that packing, the wire and unpacking overlap."""


class Segment(NamedTuple):
    """Bytes ``[begin, end)`` of the packed stream of a transfer."""

    transfer: Transfer
    begin: int
    end: int


Load = list[Segment]


class Packed(NamedTuple):
    """A load of a ticket that lies in a slab from byte ``at``."""

    ticket: int
    load: Load
    at: int


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


def pack(load: Load, table: RegionTable, slab: PackedBytes) -> int:
    """Gather a load into ``slab``; how many bytes it has."""
    at = 0
    for transfer, begin, end in load:
        boxes, units, _ = transfer
        part = slab.part(at, end - begin)
        table.movers.gather(boxes.shape, boxes.source, units, table.bases, part, begin=begin, cast=boxes.cast)
        at += end - begin
    return at


def load_size(load: Load) -> int:
    """How many bytes a load has."""
    return sum(end - begin for _, begin, end in load)


def announce(loads: Sequence[Packed], slab: int) -> bytes:
    """The frames that tell the peer what lies in its slab."""
    told = []
    left = sum(len(packed.load) for packed in loads)
    for ticket, load, at in loads:
        for transfer, begin, end in load:
            left -= 1
            kind = side.PART if left else side.WHOLE
            counts = len(transfer.boxes.shape), len(transfer.destination_units)
            told.append(side.Header(kind, *counts, slab, ticket, at, begin, end - begin).encode())
            told.append(encode_tables(transfer))
            at += end - begin
    return b"".join(told)
