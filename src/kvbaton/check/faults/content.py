"""The oracle: what every byte of a request is, from what it stands for, and where it lies in a rank's memory.

The byte of a request's component, layer, role, token and element is a number made of these words alone. The oracle
knows a layout as a description of memory; it knows nothing of plans, transfers or messages.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.check.content import mixed
from kvbaton.layout import TOKEN, Component, RankLayout, Tensor

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

CANARY = 0xA5
"""Bytes that nobody may have written."""
POISON = 0x5A
"""Bytes at the prefill side that nobody may read any more."""


class Places(NamedTuple):
    """Every byte of one entry (or of one row without tokens) of a component, in all its tensors."""

    component: Component
    first: Int64s
    """Its place in row 0, entry 0."""
    row_stride: Int64s
    entry_stride: Int64s
    identity: npt.NDArray[np.uint64]
    """A number for what it stands for; the same on every rank that holds it."""

    def addresses(self, rows: Int64s, inside: Int64s) -> Int64s:
        """Where the entries ``inside`` ``rows`` lie: ``[entry, byte]``."""
        found: Int64s = self.first + rows[:, None] * self.row_stride + inside[:, None] * self.entry_stride
        return found

    def whole_rows(self, rows: Int64s) -> Int64s:
        """Every byte of ``rows``, flat."""
        size = self.component.page_size if self.component.kind.has_tokens else 1
        inside = np.tile(np.arange(size, dtype=np.int64), len(rows))
        return self.addresses(np.repeat(rows, size), inside).reshape(-1)

    def content(self, request: int, positions: Int64s) -> Bytes:
        """What a request holds at token ``positions`` (0 for what has no tokens): ``[position, byte]``."""
        share = np.uint64(request * 0x9E3779B97F4A7C15 % (1 << 64))
        numbers = self.identity + positions.astype(np.uint64)[:, None] * np.uint64(0xD1342543DE82EF95) + share
        values: Bytes = (mixed(numbers) % np.uint64(254)).astype(np.uint8)
        # Neither of the two bytes that stand for nothing.
        values[values == POISON] = 254
        values[values == CANARY] = 255
        return values


@functools.lru_cache(1 << 10)
def places_of(layout: RankLayout) -> dict[str, Places]:
    """The places of each component."""
    return {component.name: _places(component) for component in layout.components}


def _places(component: Component) -> Places:
    columns = [_of_tensor(component, tensor) for tensor in component.tensors if tensor.rows]
    first, row_stride, entry_stride, identity = (np.concatenate(each) for each in zip(*columns, strict=True))
    return Places(component, first, row_stride, entry_stride, identity)


def _of_tensor(component: Component, tensor: Tensor) -> tuple[Int64s, Int64s, Int64s, npt.NDArray[np.uint64]]:
    offsets, numbers = np.zeros(1, np.int64), np.zeros(1, np.int64)
    entry_stride = 0
    for axis in sorted(tensor.axes, key=lambda axis: axis.name):
        if axis.name == TOKEN:
            entry_stride = axis.stride
            continue
        whole = np.concatenate([np.arange(start, start + count) for start, count in axis.spans])
        local = np.arange(axis.local_size, dtype=np.int64) * axis.stride
        offsets = (offsets[:, None] + local).reshape(-1)
        numbers = (numbers[:, None] * axis.size + whole).reshape(-1)
    byte = np.arange(tensor.itemsize, dtype=np.int64)
    offsets = tensor.offset + (offsets[:, None] + byte).reshape(-1)
    numbers = (numbers[:, None] * tensor.itemsize + byte).reshape(-1)
    word = zlib.crc32(f"{component.name}/{tensor.role}/{tensor.layer}".encode())
    identity = numbers.astype(np.uint64) + np.uint64(word << 20)
    shape = offsets.shape
    return offsets, np.full(shape, tensor.row_stride), np.full(shape, entry_stride), identity
