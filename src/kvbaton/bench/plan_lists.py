"""The same plans as lists of pieces, in Python: what a connector does that loops over layers and pages.

Written to be fast for what it is: whatever is equal for all layers is computed once, and neighbouring bytes of a row
are one piece where both sides have them so.
"""

from __future__ import annotations

import math

from kvbaton.layout import TOKEN, Axis, RankLayout, Tensor
from kvbaton.plan import Pages

Piece = tuple[int, int, int]
"""``(source byte, destination byte, bytes)``; every region begins at 0."""


def pieces_of_request(
    source: RankLayout, destination: RankLayout, tokens: tuple[int, int], at: Pages, to: Pages
) -> list[Piece]:
    """List the pieces of ``tokens`` in the one component of two layouts, of which all tensors are alike."""
    (before,), (after,) = source.components, destination.components
    step = _step(source, destination)
    inside = _pieces(before.tensors[0], after.tensors[0], step)
    places = _places(source, destination, tokens, at, to, step)
    pairs = [(one.offset, other.offset) for one, other in zip(before.tensors, after.tensors, strict=True)]
    return [
        (base + begin + low, base_to + begin_to + low_to, run)
        for base, base_to in pairs
        for begin, begin_to in places
        for low, low_to, run in inside
    ]


def pieces_of_rows(source: RankLayout, destination: RankLayout) -> list[Piece]:
    """List the pieces of one row (of the smaller page) in every tensor that both layouts have."""
    pieces: list[Piece] = []
    for after in destination.components:
        before = source.component(after.name)
        held = {(tensor.role, tensor.layer): tensor for tensor in before.tensors}
        step = min(before.entries_per_row, after.entries_per_row)
        for tensor in after.tensors:
            other = held.get((tensor.role, tensor.layer))
            if other is not None:
                found = _pieces(other, tensor, step)
                pieces += [(other.offset + low, tensor.offset + low_to, run) for low, low_to, run in found]
    return pieces


def _step(source: RankLayout, destination: RankLayout) -> int:
    """Entries that lie together on both sides whatever the rows: one, or what both page sizes are multiples of."""
    (before,), (after,) = source.components, destination.components
    return math.gcd(before.entries_per_row, after.entries_per_row) if source.owned == destination.owned else 1


def _places(
    source: RankLayout, destination: RankLayout, tokens: tuple[int, int], at: Pages, to: Pages, step: int
) -> list[tuple[int, int]]:
    """Bytes from the beginning of a tensor to each group of ``step`` entries, on both sides."""
    (before,), (after,) = source.components, destination.components
    ratio = before.kind.ratio
    page, page_to = before.entries_per_row, after.entries_per_row
    row, row_to = before.tensors[0].row_stride, after.tensors[0].row_stride
    token, token_to = _stride(before.tensors[0]), _stride(after.tensors[0])
    mine, other = source.owned, destination.owned
    rows, rows_to = at.rows.tolist(), to.rows.tolist()
    skip, skip_to = at.start // ratio, to.start // ratio
    turn, turn_to = len(rows), len(rows_to)
    places: list[tuple[int, int]] = []
    for entry in range(tokens[0] // ratio, tokens[1] // ratio, step):
        if entry % mine.modulus != mine.remainder or entry % other.modulus != other.remainder:
            continue
        index = entry // mine.modulus - skip
        index_to = entry // other.modulus - skip_to
        places.append(
            (
                rows[index // page % turn] * row + index % page * token,
                rows_to[index_to // page_to % turn_to] * row_to + index_to % page_to * token_to,
            )
        )
    return places


def _pieces(source: Tensor, destination: Tensor, entries: int) -> list[Piece]:
    """Pieces of ``entries`` neighbouring entries of one row, without the offsets of the tensors."""
    others = {axis.name: axis for axis in source.axes}
    pieces = [(0, 0, destination.itemsize)]
    for axis in sorted(destination.axes, key=lambda axis: axis.stride):
        other = others[axis.name]
        runs = [(0, 0, entries)] if axis.name == TOKEN else _runs(other, axis)
        if len(pieces) == 1 and other.stride == axis.stride == pieces[0][2]:
            ((begin, begin_to, run),) = pieces
            pieces = [(begin + low * run, begin_to + low_to * run, count * run) for low, low_to, count in runs]
        else:
            pieces = [
                (begin + (low + index) * other.stride, begin_to + (low_to + index) * axis.stride, run)
                for low, low_to, count in runs
                for index in range(count)
                for begin, begin_to, run in pieces
            ]
    return pieces


def _runs(source: Axis, destination: Axis) -> list[tuple[int, int, int]]:
    """Find what both hold: ``(local index, local index, count)``."""
    runs: list[tuple[int, int, int]] = []
    local = 0
    for start, count in source.spans:
        local_to = 0
        for start_to, count_to in destination.spans:
            first, last = max(start, start_to), min(start + count, start_to + count_to)
            if first < last:
                runs.append((local + first - start, local_to + first - start_to, last - first))
            local_to += count_to
        local += count
    return runs


def _stride(tensor: Tensor) -> int:
    return next(axis.stride for axis in tensor.axes if axis.name == TOKEN)


def group_in_lists(source: list[int], destination: list[int]) -> list[tuple[int, int, int]]:
    """Join neighbours that are consecutive on both sides: ``(source, destination, count)``."""
    runs: list[tuple[int, int, int]] = []
    begin, begin_to, count = source[0], destination[0], 0
    for row, row_to in zip(source, destination, strict=True):
        if row == begin + count and row_to == begin_to + count:
            count += 1
        else:
            runs.append((begin, begin_to, count))
            begin, begin_to, count = row, row_to, 1
    runs.append((begin, begin_to, count))
    return runs
