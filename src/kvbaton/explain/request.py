"""A made-up request: which rows hold its tokens on a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvbaton.layout import Component, RankLayout
from kvbaton.plan import Int64s, Pages

_TURN = {"source": 0.618034, "destination": 0.381966}
"""Each page lies about so far behind the last one, as a part of the pool: no two neighbours lie side by side."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of ``tokens`` tokens, the first ``prefix`` of which the destination has already.

    ``contiguous``: its pages lie side by side, instead of spread over the pool.
    """

    tokens: int
    prefix: int = 0
    contiguous: bool = False

    def needed(self, component: Component) -> tuple[int, int]:
        """The tokens ``[first, last)`` of ``component`` that move; an empty range for rows without tokens."""
        return component.kind.needed(self.tokens, self.prefix)

    def pages(self, layout: RankLayout, component: Component, side: str) -> Pages:
        """The rows of the request on one rank. ``component`` must have a tensor with rows."""
        first, last = self.needed(component)
        kind, size = component.kind, component.page_size
        if not kind.has_tokens:
            return Pages(self._rows(1, component, side), 0)
        owned = layout.owned_of(component)
        if kind.ring:
            # A ring that is longer than the request is used from its first row on.
            held = max(owned.local_count(last), 1)
            count = -(-min(kind.window or kind.tail or held, held) // size)
            return Pages(self._rows(count, component, side), 0)
        begin, end = owned.local_count(first) // size, math.ceil(owned.local_count(last) / size)
        return Pages(self._rows(max(end - begin, 0), component, side), begin * size)

    def _rows(self, count: int, component: Component, side: str) -> Int64s:
        pool = min(tensor.rows for tensor in component.tensors if tensor.rows)
        if self.contiguous:
            return np.arange(count, dtype=np.int64)
        step = max(int(pool * _TURN[side]), 1)
        while math.gcd(step, pool) > 1:
            step += 1
        return np.arange(1, count + 1, dtype=np.int64) * step % pool
