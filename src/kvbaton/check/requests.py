"""The rows of one request on one rank, scattered."""

from __future__ import annotations

import math
from random import Random

import numpy as np

from kvbaton.check.content import Int64s
from kvbaton.check.oracle import RequestRows, local_places, needed_entries
from kvbaton.errors import RowsError
from kvbaton.layout import Component, RankLayout


def choose_rows(
    layout: RankLayout, tokens: int, prefix: int, chance: Random | None, *, slots: int = 1
) -> dict[str, RequestRows]:
    """Choose rows of every component for a request of ``tokens`` tokens of which ``prefix`` are not needed.

    Pages begin at the first one that is needed, or earlier; a ring has as few rows as hold what is needed, or more.
    Without ``chance`` rows are in ascending order, and as few as can be. Raises `RowsError` where too few are
    registered.
    """
    return {component.name: _rows(layout, component, tokens, prefix, chance, slots) for component in layout.components}


def rows_of_chunk(
    layout: RankLayout, component: Component, request: RequestRows, tokens: int, chunk: tuple[int, int]
) -> RequestRows:
    """Those rows of a request that hold the tokens of ``chunk``; all of them for a ring."""
    if component.kind.ring or not component.kind.has_tokens:
        return request
    size, ratio = component.page_size, component.kind.ratio
    places = local_places(layout.owned_of(component), ratio, tokens)
    last_tokens = np.arange(ratio - 1, tokens, ratio)
    inside = places[(last_tokens >= chunk[0]) & (last_tokens < chunk[1]) & (places >= 0)] * ratio
    inside = inside[inside >= request.start]
    if not inside.size:
        return RequestRows(request.rows[:0], request.start)
    first, last = int(inside[0]) // size, int(inside[-1]) // size + 1
    begin = request.start // size
    return RequestRows(request.rows[first - begin : last - begin], first * size)


def _rows(
    layout: RankLayout, component: Component, tokens: int, prefix: int, chance: Random | None, slots: int
) -> RequestRows:
    registered = min((tensor.rows for tensor in component.tensors if tensor.rows), default=None)
    if not component.kind.has_tokens:
        count = 1 if component.kind.aux else slots
        return RequestRows(_pick(component, registered, count, chance))
    ratio, size = component.kind.ratio, component.page_size
    places = local_places(layout.owned_of(component), ratio, tokens)
    needed = places[needed_entries(component.kind, tokens, prefix)]
    needed = needed[needed >= 0]
    if component.kind.ring:
        count = max(math.ceil(needed.size * ratio / size), 1)
        if chance is not None and registered is not None:
            count = max(min(count + chance.randrange(3), registered), count)
        return RequestRows(_pick(component, registered, count, chance))
    pages = math.ceil((int(places.max(initial=-1)) + 1) * ratio / size)
    first = int(needed[0]) * ratio // size if needed.size else pages
    if chance is not None:
        earliest = 0 if registered is None else max(0, pages - registered)
        first = chance.choice((first, chance.randrange(min(earliest, first), first + 1)))
        pages += chance.randrange(2) if registered is None or pages - first < registered else 0
    return RequestRows(_pick(component, registered, pages - first, chance), first * size)


def _pick(component: Component, registered: int | None, count: int, chance: Random | None) -> Int64s:
    if registered is None:
        return np.arange(count, dtype=np.int64)
    if count > registered:
        raise RowsError(
            f"component {component.name}: the request needs {count} rows, but {registered} are registered; register "
            "more rows or check a request with fewer tokens"
        )
    if chance is None:
        return np.arange(count, dtype=np.int64)
    return np.array(chance.sample(range(registered), count), np.int64)
