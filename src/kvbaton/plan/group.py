"""Groups of consecutive rows: few long operations instead of one for each row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbaton.errors import RowsError
from kvbaton.plan.boxes import Int64s
from kvbaton.plan.units import checked_rows


class Runs(NamedTuple):
    """``counts[i]`` rows from ``source[i]`` on go to those from ``destination[i]`` on."""

    source: Int64s
    destination: Int64s
    counts: Int64s


def group_rows(source: object, destination: object) -> Runs:
    """Join neighbours that are consecutive and ascending on both sides, in the order given.

    Raises `RowsError` where the two lists differ in length.
    """
    at, to = checked_rows(source, "source"), checked_rows(destination, "destination")
    if len(at) != len(to):
        raise RowsError(f"{len(at)} rows at the source and {len(to)} at the destination; pass as many on both sides")
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(to) != 1)) + 1
    heads = np.concatenate([np.zeros(min(len(at), 1), np.int64), breaks])
    return Runs(at[heads], to[heads], np.diff(heads, append=len(at)))
