"""Whether the bytes are right: each side looks at its own pool, piece by piece, with torch's indexing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbaton.plan import Int64s, Transfer

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
STEP_BYTES = 256 << 20


def places(transfer: Transfer, side: str) -> Int64s:
    """Where each piece lies in the first region of a side, unit by unit."""
    table = getattr(transfer.boxes, side)
    units = getattr(transfer, f"{side}_units")
    found = []
    for (count0, count1, _), row in zip(transfer.boxes.shape.tolist(), table.tolist(), strict=True):
        _, offset, row_stride, parts, unit_stride, stride0, stride1 = row
        inside = (np.arange(count0)[:, None] * stride0 + np.arange(count1)[None, :] * stride1).reshape(-1)
        start = units // parts * row_stride + units % parts * unit_stride + offset
        found.append(start[:, None] + inside)
    return np.concatenate(found, axis=1).reshape(-1).astype(np.int64)


def sizes(transfer: Transfer) -> Int64s:
    """The bytes of each piece, in the same order."""
    shape = transfer.boxes.shape
    return np.tile(np.repeat(shape[:, 2], shape[:, 0] * shape[:, 1]), len(transfer.source_units)).astype(np.int64)


def digests(transfers: Sequence[Transfer], side: str, pool: torch.Tensor, *, empty: bool = False) -> list[int]:
    """A number for what each box of each transfer finds or leaves in ``pool``.

    It depends on every byte and on the order of the pieces. With ``empty`` they are overwritten with zeros.
    """
    found = []
    for transfer in transfers:
        for box in range(len(transfer.boxes.shape)):
            one = transfer._replace(boxes=transfer.boxes.pick(slice(box, box + 1)))
            found.append(_digest(one, side, pool, empty))
    return found


def _digest(transfer: Transfer, side: str, pool: torch.Tensor, empty: bool) -> int:
    starts, run = places(transfer, side), int(transfer.boxes.shape[0, 2])
    both = np.gcd.reduce([run, *(np.gcd.reduce(places(transfer, each)) for each in ("source", "destination"))])
    word = int(np.gcd(both, 8))
    words = pool.view(WORDS[word])
    inside = torch.arange(run // word, device=pool.device)
    total, step = 0, max(1, STEP_BYTES // (8 * len(inside)))
    for first in range(0, len(starts), step):
        at = torch.from_numpy(starts[first : first + step] // word).to(pool.device)
        index = (at[:, None] + inside).reshape(-1)
        numbers = torch.arange(first * len(inside), first * len(inside) + len(index), device=pool.device)
        total += int((words[index].to(torch.int64) * (2 * numbers + 1) * 0x9E3779B1).sum())
        if empty:
            words[index] = 0
    return total & (1 << 64) - 1
