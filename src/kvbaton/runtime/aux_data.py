"""Aux data: the small values of a request. They travel inside Done, packed in the order of the plan, or are written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvbaton.copy.movers import PackedBytes
from kvbaton.plan import PairPlan, Transfer
from kvbaton.runtime.context import Context


def bind_aux(context: Context, plan: PairPlan, source: int, destination: int) -> dict[str, list[Transfer]]:
    """What writes aux slot ``source`` of this prefill rank into slot ``destination`` of the peer, by component.

    Raises `RowsError` for a slot that is not registered.
    """
    bound: dict[str, list[Transfer]] = {}
    for name, transfer in _transfers(context, plan, source, destination):
        bound.setdefault(name, []).append(transfer)
    return bound


def pack_aux(context: Context, plan: PairPlan, row: int) -> tuple[bytes, dict[str, int]]:
    """What this prefill rank sends of aux slot ``row``: its bytes, and how many of them by component."""
    packed = bytearray()
    moved: dict[str, int] = {}
    for name, transfer in _transfers(context, plan, row, 0):
        boxes, part, bases = transfer.boxes, bytearray(transfer.nbytes), context.bases()
        context.movers.gather(
            boxes.shape, boxes.source, transfer.source_units, bases, PackedBytes.of(part), cast=boxes.cast
        )
        packed += part
        moved[name] = moved.get(name, 0) + len(part)
    return bytes(packed), moved


def aux_nbytes(context: Context, plan: PairPlan) -> dict[str, int]:
    """How many bytes aux data have here, by component: what `pack_aux` makes at the other end."""
    nbytes: dict[str, int] = {}
    for name, transfer in _transfers(context, plan, 0, 0):
        nbytes[name] = nbytes.get(name, 0) + transfer.nbytes
    return nbytes


def unpack_aux(context: Context, plan: PairPlan, row: int, packed: bytes) -> None:
    """Put what `pack_aux` made at the other end into aux slot ``row`` of this decode rank."""
    at = 0
    for _, transfer in _transfers(context, plan, 0, row):
        part = packed[at : at + transfer.nbytes]
        boxes, units = transfer.boxes, transfer.destination_units
        context.movers.scatter(boxes.shape, boxes.destination, units, context.bases(), PackedBytes.of(part))
        at += transfer.nbytes


def _transfers(context: Context, plan: PairPlan, source: int, destination: int) -> Iterator[tuple[str, Transfer]]:
    """The transfers by component. Who packs or unpacks uses its own end only, and may give any row for the other."""
    for component in context.layout.components:
        if component.kind.aux and component.name in plan.components:
            rows = np.array([[source], [destination]], np.int64)
            for transfer in plan.bind_slots(component.name, rows[0], rows[1]):
                yield component.name, transfer
