"""Aux data: the small values of a request that travel inside Done, packed in the order of the pair's plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvbaton import copy
from kvbaton.plan import PairPlan, Transfer
from kvbaton.runtime.context import Context


def pack_aux(context: Context, plan: PairPlan, row: int) -> tuple[bytes, dict[str, int]]:
    """What this prefill rank sends of aux slot ``row``: its bytes, and how many of them by component."""
    packed = bytearray()
    moved: dict[str, int] = {}
    for name, transfer in _transfers(context, plan, row, 0):
        boxes, part = transfer.boxes, bytearray(transfer.nbytes)
        copy.gather(boxes.shape, boxes.source, transfer.source_units, context.bases(), part, cast=boxes.cast)
        packed += part
        moved[name] = moved.get(name, 0) + len(part)
    return bytes(packed), moved


def aux_nbytes(context: Context, plan: PairPlan) -> int:
    """How many bytes `pack_aux` makes at the other end."""
    return sum(transfer.nbytes for _, transfer in _transfers(context, plan, 0, 0))


def unpack_aux(context: Context, plan: PairPlan, row: int, packed: bytes) -> None:
    """Put what `pack_aux` made at the other end into aux slot ``row`` of this decode rank."""
    at = 0
    for _, transfer in _transfers(context, plan, 0, row):
        part = packed[at : at + transfer.nbytes]
        copy.scatter(
            transfer.boxes.shape, transfer.boxes.destination, transfer.destination_units, context.bases(), part
        )
        at += transfer.nbytes


def _transfers(context: Context, plan: PairPlan, source: int, destination: int) -> Iterator[tuple[str, Transfer]]:
    """The transfers by component. Only this rank's end is used: the other rank's row is its own business."""
    for component in context.layout.components:
        if component.kind.aux and component.name in plan.components:
            rows = np.array([[source], [destination]], np.int64)
            for transfer in plan.bind_slots(component.name, rows[0], rows[1]):
                yield component.name, transfer
