"""Cuts transfers into chunks that are fast to copy: one tensor after the other, not one row of each in turn.

The rows of one tensor lie near each other, and those of another one far away. Who copies the boxes of a row in turn
jumps from tensor to tensor with each piece; who copies all rows of a box first stays in one place for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvbaton.plan.boxes import Transfer


def split_boxes(transfer: Transfer, nbytes: int) -> Iterator[Transfer]:
    """Cut a transfer into transfers of all its units and as few boxes as still move ``nbytes`` bytes together.

    Boxes that move less are put together with those after them; no transfer is made for a few bytes, but for the last.
    """
    ends = np.cumsum(transfer.boxes.shape.prod(axis=1)) * len(transfer.source_units)
    # A cut after each box that brings the sum past another multiple.
    cuts = np.flatnonzero(np.diff(ends // nbytes)) + 1
    if not len(cuts):
        yield transfer
        return
    for first, last in zip((0, *cuts.tolist()), (*cuts.tolist(), len(ends)), strict=True):
        yield transfer._replace(boxes=transfer.boxes.pick(slice(first, last)))


def chunks(transfers: Iterable[Transfer], nbytes: int) -> Iterator[tuple[Transfer, int, int]]:
    """All bytes of ``transfers``, each once, as ``(transfer, begin, end)`` with at most ``nbytes`` bytes."""
    for transfer in transfers:
        total = transfer.nbytes
        if total <= nbytes:
            yield transfer, 0, total
            continue
        for part in split_boxes(transfer, nbytes):
            total = part.nbytes
            for begin in range(0, total, nbytes):
                yield part, begin, min(begin + nbytes, total)
