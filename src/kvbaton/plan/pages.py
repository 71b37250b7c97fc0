"""The rows that hold a request's tokens on one rank."""

from __future__ import annotations

from typing import NamedTuple

from kvbaton.plan.boxes import Int64s


class Pages(NamedTuple):
    """Rows of a paged component, in token order: ``rows[i]`` holds the ``i``-th page from token ``start``.

    ``start`` is the position, on this rank's local token axis, of the first token of ``rows[0]``: a multiple of the
    page size. On a rank that owns every token the local axis is the request's.
    """

    rows: Int64s
    start: int
