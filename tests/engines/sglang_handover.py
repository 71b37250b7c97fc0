"""Hands a request over between SGLang ranks in memory, as the runtime would: rows, plans, the copy kernel."""

from __future__ import annotations

import numpy as np

from kvbaton.copy import copy_boxes
from kvbaton.engines.sglang.layout import Described
from kvbaton.plan import assign, compile_pair
from kvbaton.runtime.rows import EngineRows


class Handed:
    """What the engine of one rank passes for one request: chunks of ``(pages, start, (first, last))``, then states."""

    def __init__(self, described: Described, chunks, states, aux=None):
        self.described, self.chunks, self.states, self.aux = described, chunks, states, aux
        self.bases = np.array([region.address for region in described.regions], np.int64)


def hand_over(sources, destinations, tokens, prefix=0):
    """Copy the request from all sources to all destinations; gives the bytes for each destination, by source."""
    moved = []
    for number, to in enumerate(destinations):
        layouts = [source.described.layout for source in sources]
        shares = assign(layouts, to.described.layout, destination_index=number, striped=True)
        count = to.described.tokens(tokens)
        slots = to.described.state_rows(to.states, tokens, prefix).slots
        (pages, start, _) = to.chunks[0]
        offered = {**to.described.kv_rows(pages, start), **slots}
        offer = EngineRows(to.described.layout, "decode").offered(offered, count, prefix)
        moved.append([_send(at, to, share, offer, count, prefix) for at, share in zip(sources, shares, strict=True)])
    return moved


def _send(at, to, share, offer, count, prefix):
    plan = compile_pair(at.described.layout, to.described.layout, share)
    rows, transfers = EngineRows(at.described.layout, "prefill"), []
    for number, (pages, start, span) in enumerate(at.chunks):
        last = number == len(at.chunks) - 1
        end = at.described.tokens(span[1]) if last else span[1]
        given = {**at.described.kv_rows(pages, start)}
        if last:
            given |= at.described.state_rows(at.states, count, prefix).slots
        chunk = rows.chunk(given, (span[0], end))
        ranges, ready = rows.ranges_and_slots(chunk, (span[0], end))
        for name in plan.components:
            component = to.described.layout.component(name)
            first, _ = component.kind.needed(count, prefix)
            if name in ranges:
                begin = max(first, ranges[name][0])
                transfers += plan.bind(name, (begin, max(begin, ranges[name][1])), chunk[name], offer[name])
            elif name in ready:
                transfers += plan.bind_slots(name, chunk[name].rows, offer[name].rows)
            elif component.kind.aux and last and at.aux is not None:
                transfers += plan.bind_slots(name, [at.aux], [to.aux])
    for transfer in transfers:
        copy_boxes(transfer, at.bases, to.bases)
    return sum(transfer.nbytes for transfer in transfers)
