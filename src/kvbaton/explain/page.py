"""The bytes of one page: which runs of a row at the source go where in a row at the destination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbaton.explain.explain import Ranks, bind
from kvbaton.explain.request import Request
from kvbaton.layout import Component, RankLayout
from kvbaton.plan import Int64s, PairPlan, Transfer, assign, compile_pair

MAX_ROWS = 4
"""Rows of each side that are shown."""
MAX_LINES = 8
"""Lines that a row is drawn in, at most."""
MAX_RUNS = 256
"""Runs that are shown."""


class Place(NamedTuple):
    """Rows in memory: those that share bytes with one tensor. ``line`` is a natural number of bytes for a line."""

    region: int
    base: int
    stride: int
    line: int
    what: str


class Run(NamedTuple):
    """``nbytes`` bytes from one row to another; ``source`` and ``destination`` are ``(place in rows, byte)``.

    ``read`` are the bytes at the source: others than ``nbytes`` where elements are cast.
    """

    source: tuple[int, int]
    destination: tuple[int, int]
    nbytes: int
    read: int


class PageView(NamedTuple):
    """Some rows of one component on both sides, and the runs between them, in the order in which they move."""

    component: str
    tokens: tuple[int, int]
    source: Place
    destination: Place
    source_rows: tuple[int, ...]
    destination_rows: tuple[int, ...]
    runs: tuple[Run, ...]
    more: int
    """Runs between these rows that are left out."""


def view_pages(
    source: Ranks,
    destination: Ranks,
    request: Request,
    pair: tuple[int, int],
    *,
    striped: bool = False,
    cast: bool = False,
) -> list[PageView]:
    """The first pages of each component that ``pair`` (numbers of a source and a destination) moves."""
    at, to = source.layouts[pair[0]], destination.layouts[pair[1]]
    shares = assign(source.layouts, to, destination_index=pair[1], striped=striped, cast=cast)
    plan = compile_pair(at, to, shares[pair[0]], cast=cast)
    views = (_view(plan, name, at, to, request) for name in plan.components)
    return [view for view in views if view is not None]


def _view(plan: PairPlan, name: str, source: RankLayout, destination: RankLayout, request: Request) -> PageView | None:
    ends = source.component(name), destination.component(name)
    first, last = request.needed(ends[1])
    rows = [
        request.pages(layout, end, side)
        for layout, end, side in zip((source, destination), ends, ("source", "destination"), strict=True)
    ]
    transfers = bind(plan, name, destination, (first, last), rows[0], rows[1])
    if not transfers:
        return None
    anchor = transfers[0].boxes
    places = [_place(end, getattr(anchor, side)[0]) for end, side in zip(ends, ("source", "destination"), strict=True)]
    moved = np.concatenate([_pieces(transfer, places) for transfer in transfers])
    shown: list[list[int]] = []
    for column in (0, 2):
        order = list(dict.fromkeys(moved[:, column].tolist()))[:MAX_ROWS]
        moved = moved[np.isin(moved[:, column], order)]
        shown.append(order)
    shown[0] = [row for row in shown[0] if row in moved[:, 0]]
    runs = [
        Run((shown[0].index(row), byte), (shown[1].index(to_row), to_byte), nbytes, read)
        for row, byte, to_row, to_byte, nbytes, read in moved[:MAX_RUNS].tolist()
    ]
    more = max(len(moved) - MAX_RUNS, 0)
    return PageView(name, (first, last), places[0], places[1], tuple(shown[0]), tuple(shown[1]), tuple(runs), more)


def _place(component: Component, box: Int64s) -> Place:
    """The rows that ``box``, one line of a table of boxes, lies in."""
    region, offset, stride = int(box[0]), int(box[1]), int(box[2])
    alike = [tensor for tensor in component.tensors if (tensor.region, tensor.row_stride) == (region, stride)]
    alike = [tensor for tensor in alike if tensor.rows]
    base = min(tensor.offset for tensor in alike if tensor.offset <= offset < tensor.offset + stride)
    inside = [tensor for tensor in alike if base <= tensor.offset < base + stride]
    line = max((axis.stride for tensor in inside for axis in tensor.axes if axis.local_size > 1), default=stride)
    while stride / line > MAX_LINES:
        line *= 2
    while line % 2 == 0 and 2 * stride / line <= MAX_LINES:
        line //= 2
    roles = dict.fromkeys(tensor.role for tensor in inside)
    layers = sorted({tensor.layer for tensor in inside})
    shown = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return Place(region, base, stride, line, f"{', '.join(roles)} of {shown}")


def _pieces(transfer: Transfer, places: Sequence[Place]) -> Int64s:
    """``(source row, byte, destination row, byte, length, length at the source)`` of pieces between ``places``."""
    boxes, source_units, destination_units = transfer
    keep = np.ones(len(boxes.shape), np.bool_)
    for side, place in zip((boxes.source, boxes.destination), places, strict=True):
        begin = side[:, 1] - place.base
        keep &= (side[:, 0] == place.region) & (begin >= 0) & (begin < place.stride)
    # A row has at most so many units: what lies further back cannot be in the rows that are shown.
    most = MAX_ROWS * int(max(boxes.source[:, 3].max(), boxes.destination[:, 3].max()))
    read = boxes.source_shape[:, 2]
    made: list[Int64s] = []
    for index in np.flatnonzero(keep).tolist():
        outer, inner, run = (int(value) for value in boxes.shape[index])
        grid = np.indices((outer, inner)).reshape(2, -1)
        columns: list[Int64s] = []
        for table, units, place in (
            (boxes.source, source_units[:most], places[0]),
            (boxes.destination, destination_units[:most], places[1]),
        ):
            _, offset, _, per_row, unit_stride, first, second = (int(value) for value in table[index])
            byte = offset - place.base + units % per_row * unit_stride
            inside = grid[0] * first + grid[1] * second
            columns += [np.repeat(units // per_row, inside.size), (byte[:, None] + inside).reshape(-1)]
        columns += [np.full(len(columns[0]), length, np.int64) for length in (run, int(read[index]))]
        made.append(np.stack(columns, axis=1))
    return np.concatenate(made) if made else np.empty((0, 6), np.int64)
