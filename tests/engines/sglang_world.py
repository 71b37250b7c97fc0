"""A request between two grids of SGLang ranks, checked by content at the end."""

from __future__ import annotations

import itertools

import numpy as np
from sglang_handover import Handed, hand_over
from sglang_pools import Place, Side

from kvbaton.engines.sglang.layout import Ranks, describe

PAGES = 14


def chunks_of(pages, page_size, first, last, cut=None):
    """Page lists as SGLang's scheduler sends them, ``(pages, start, tokens)``: the last partial page waits."""
    cuts = [first, last] if cut is None else [first, cut // page_size * page_size, last]
    spans = itertools.pairwise(cuts)
    return [
        (pages[begin // page_size : -(-end // page_size)], begin // page_size * page_size, (begin, end))
        for begin, end in spans
    ]


class World:
    """A request between two grids of ranks: ``fill(side, place, whole)`` makes a rank's pools."""

    def __init__(self, *, tokens=45, prefix=0, cut=None, prefill_page=4, decode_page=4, seed=1):
        self.tokens, self.prefix, self.cut = tokens, prefix, cut
        self.sizes = {"prefill": prefill_page, "decode": decode_page}
        self.seed = seed
        rng = np.random.default_rng(seed)
        self.places = {
            role: Place(rng, size, -(-tokens // size), max(PAGES, tokens // size + 8))
            for role, size in self.sizes.items()
        }

    def positions(self, role, *, whole_pages=False):
        """The tokens that are to be in place: all at prefill, those after the prefix at decode."""
        first = 0 if role == "prefill" else self.prefix
        size = self.sizes[role]
        last = -(-self.tokens // size) * size if whole_pages else self.tokens
        return np.arange(first, last)

    def pages(self, role, first=None):
        """The places of the pages that hold those tokens."""
        size, first = self.sizes[role], (0 if role == "prefill" else self.prefix) if first is None else first
        return np.arange(first // size, -(-self.tokens // size))

    def ranks(self, role, fill, grid, states=None, **ranks):
        """One `Handed` and `Side` for each entry of ``grid``: keyword arguments of `Ranks`."""
        made, place, size = [], self.places[role], self.sizes[role]
        # What the test gives to `describe`, beside the coordinates of each rank.
        kind = {"memory": ranks.pop("memory", "device"), "device": ranks.pop("device", "host")}
        for number, own in enumerate(grid):
            tp = own.get("tp", (0, 1))
            side = Side(self.seed * 100 + number + (50 if role == "decode" else 0), size, tp=own.get("state_tp") or tp)
            side.role, side.own = role, own
            fill(self, side, place)
            # Of the stages of a pipeline only the last one has metadata that are of use.
            pp = own.get("pp", (0, 1))
            side.aux(place, known=role == "decode" or pp[0] == pp[1] - 1)
            if role == "prefill":
                side.fill()
            described = describe(side.args, Ranks(role=role, **ranks, **own), **kind)
            payloads = [] if states is None else states(self, side, place)
            first = self.prefix
            chunks = chunks_of(place.pages, size, first, self.tokens, self.cut if role == "prefill" else None)
            made.append((Handed(described, chunks, payloads, place.aux), side))
        return made

    def run(self, fill, prefill, decode, states=None, **ranks):
        """Hand over between two grids; gives the bytes for each decode rank, by source."""
        sources = self.ranks("prefill", fill, prefill, states, **ranks)
        return self.hand_over(sources, self.ranks("decode", fill, decode, states, **ranks))

    def hand_over(self, sources, destinations):
        """The same between ranks made with `ranks`; what is in place is compared with what belongs there."""
        moved = hand_over([each for each, _ in sources], [each for each, _ in destinations], self.tokens, self.prefix)
        for number, (_, side) in enumerate(destinations):
            assert side.wrong_buffers() == [], f"decode rank {number}"
        return moved


def tp(size):
    return [{"tp": (rank, size)} for rank in range(size)]
