"""Units: rows, or equal parts of rows, that hold given tokens."""

from __future__ import annotations

import numpy as np

from kvbaton.errors import RowsError
from kvbaton.plan.boxes import Int64s
from kvbaton.plan.pages import Pages
from kvbaton.plan.tokens import Repeated


def checked_rows(rows: object, where: str) -> Int64s:
    """``rows`` as a flat int64 array; raises `RowsError` where it is none."""
    try:
        array = np.asarray(rows)
    except (ValueError, OverflowError) as error:
        raise RowsError(f"{where}: rows must be a flat list of integers ({error})") from None
    if array.size == 0 and array.ndim <= 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        given = f"of type {array.dtype}" if array.ndim == 1 else f"an array of {array.ndim} dimensions"
        raise RowsError(f"{where}: rows must be a flat list of integers, but are {given}")
    return array.astype(np.int64, copy=False)


def checked_pages(pages: Pages, page_size: int, where: str, *, ring: bool = False) -> Pages:
    """``pages`` with an int64 array; raises `RowsError` where rows or start cannot be."""
    if ring and pages.start:
        raise RowsError(f"{where}: pages start at local token {pages.start}, but the rows of a ring begin at 0")
    if pages.start < 0 or pages.start % page_size:
        raise RowsError(
            f"{where}: pages start at local token {pages.start}, which is not a multiple of the page size {page_size}"
        )
    return Pages(checked_rows(pages.rows, where), int(pages.start))


def check_range(rows: Int64s, limit: int, where: str) -> None:
    """Raise `RowsError` for a row that is not one of the ``limit`` registered ones."""
    # As unsigned numbers, negative ones are larger than any limit.
    if rows.size and int(rows.view(np.uint64).max()) >= limit:
        low, high = int(rows.min()), int(rows.max())
        raise RowsError(f"{where}: row {low if low < 0 else high} is outside the {limit} registered rows")


def units_of_range(pages: Pages, page_size: int, unit: int, first: int, last: int, limit: int, where: str) -> Int64s:
    """Return the units that hold the local tokens from ``first`` to ``last``, both multiples of ``unit`` tokens."""
    _check_cover(pages, page_size, first, last, where)
    per_row = page_size // unit
    begin, end = (first - pages.start) // page_size, -((pages.start - last) // page_size)
    rows: Int64s = pages.rows[begin:end]
    check_range(rows, limit, where)
    if per_row == 1:
        return np.array(rows, np.int64)
    units = (rows[:, None] * per_row + np.arange(per_row, dtype=np.int64)).reshape(-1)
    skipped = (first - pages.start) // unit - begin * per_row
    chosen: Int64s = units[skipped : skipped + (last - first) // unit]
    return chosen


def units_of_tokens(
    pages: Pages, page_size: int, unit: int, tokens: Repeated, limit: int, where: str, *, ring: bool = False
) -> Int64s:
    """Return the units that begin at each of the local ``tokens``: multiples of ``unit``, in turns of whole pages.

    The rows of a ``ring`` hold whatever `check_ring` lets pass.
    """
    first = int(tokens.first[0])
    if not ring:
        _check_cover(pages, page_size, first, tokens.last + unit, where)
    inside = tokens.first - pages.start
    index = inside // page_size
    if ring:
        # A ring is read once round at most: counted from its first turn, the index wraps a single time.
        index -= first // page_size // len(pages.rows) * len(pages.rows)
    every = tokens.turns()[:, None] // page_size + index
    # The last turn may be cut short: what lies beyond is no row, and is dropped.
    units = np.take(pages.rows, every, mode="wrap" if ring else "clip")
    check_range(units.reshape(-1)[: tokens.total], limit, where)
    per_row = page_size // unit
    if per_row > 1:
        units *= per_row
        units += inside % page_size // unit
    return np.asarray(units.reshape(-1)[: tokens.total])


def _check_cover(pages: Pages, page_size: int, first: int, last: int, where: str) -> None:
    end = pages.start + len(pages.rows) * page_size
    if first < pages.start or last > end:
        raise RowsError(
            f"{where}: {len(pages.rows)} rows of {page_size} tokens cover its local tokens {pages.start}..{end}, but "
            f"tokens {first}..{last} are needed"
        )


def check_ring(pages: Pages, page_size: int, first: int, last: int, where: str) -> None:
    """Raise `RowsError` where a ring cannot hold the local tokens from ``first`` to ``last`` all at once."""
    held = len(pages.rows) * page_size
    if last - first > held:
        raise RowsError(
            f"{where}: a ring of {len(pages.rows)} rows holds {held} tokens, but tokens {first}..{last} are needed"
        )
