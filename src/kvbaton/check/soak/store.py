"""The memory of one rank: rows that are given out again at once, content that is known, canaries everywhere else."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.layout import TOKEN, Component, Coords, RankLayout, Tensor, build
from kvbaton.memory import Region, SharedMemory

PAGE = 16
"""Tokens in a page."""
LAYERS = 2
HEADS = 4
CANARY = np.uint64(0xA5A5A5A5A5A5A5A5)
_STEPS = tuple(np.uint64(step) for step in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))

Words = npt.NDArray[np.uint64]


def make_layout(rank: int, size: int, replica: tuple[int, int], pages: int, slots: int) -> RankLayout:
    """What rank ``rank`` of ``size`` holds: keys and values in pages, one state and one aux row for each request."""
    kv = build.paged_kv(
        layers=range(LAYERS),
        rows=pages,
        page_size=PAGE,
        heads=HEADS,
        head_dim=32,
        dtype="float32",
        head_spans=build.replicated_spans(HEADS, rank, size),
    )
    offset = build.required_bytes([kv])[0]
    state = build.recurrent_state(
        "state", layers=[LAYERS], rows=slots, heads=HEADS, shape=(8, 8), dtype="float32", rank=rank, size=size,
        offset=offset,
    )  # fmt: skip
    offset = build.required_bytes([kv, state])[0]
    aux = build.aux_fields({"values": ("int64", 4)}, rows=slots, offset=offset)
    return RankLayout((kv, state, aux), Coords(tp=(rank, size), dp=replica))


class Store:
    """The rows of one rank. ``pages`` and ``slots`` are the free ones; what came back last goes out first."""

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        self.memory = SharedMemory(build.required_bytes(layout.components)[0])
        self.region = Region.of(self.memory)
        self._words = {
            (tensor.role, tensor.layer): self._view(tensor)
            for component in layout.components
            for tensor in component.tensors
        }
        self.pages = list(range(layout.component("kv").tensors[0].rows))
        self.slots = list(range(layout.component("state").tensors[0].rows))
        self.wipe_all()

    def _view(self, tensor: Tensor) -> Words:
        shape = [axis.local_size for axis in tensor.axes]
        shape[-1] = shape[-1] * tensor.itemsize // 8
        nbytes = tensor.rows * tensor.row_stride
        flat = self.memory.array[tensor.offset : tensor.offset + nbytes].view(np.uint64)
        return flat.reshape(tensor.rows, *shape)

    def wipe_all(self) -> None:
        """Canaries in every row."""
        self.memory.array[:] = int(CANARY) & 0xFF

    def take(self, pages: int) -> tuple[list[int], int] | None:
        """Pages and a slot, or None if too few are free."""
        if len(self.pages) < pages or not self.slots:
            return None
        return [self.pages.pop() for _ in range(pages)], self.slots.pop()

    def give(self, pages: Sequence[int], slot: int) -> None:
        """Rows come back, and are used again at once."""
        self.pages += pages
        self.slots.append(slot)

    def fill(self, room: int, pages: Sequence[int], slot: int) -> None:
        """Write the content of a room into its rows."""
        for component, tensor, rows, firsts in self._parts(pages, slot):
            self._words[tensor.role, tensor.layer][rows] = self._expected(component, tensor, room, firsts)

    def wipe(self, pages: Sequence[int], slot: int) -> None:
        """Canaries in these rows."""
        for _, tensor, rows, _ in self._parts(pages, slot):
            self._words[tensor.role, tensor.layer][rows] = CANARY

    def wrong(self, room: int, tokens: int, pages: Sequence[int], slot: int) -> int:
        """How many words of these rows are not what they must be: the content up to ``tokens``, then canaries."""
        count = 0
        for component, tensor, rows, firsts in self._parts(pages, slot):
            expected = self._expected(component, tensor, room, firsts)
            if component.kind.has_tokens:
                left = (firsts.astype(np.int64)[:, None] + np.arange(PAGE)) >= tokens
                expected[left] = CANARY
            found = self._words[tensor.role, tensor.layer][rows]
            count += int((found != expected).sum())
        return count

    def touched(self, pages: Sequence[int], slot: int) -> int:
        """How many words of these rows are no canaries."""
        return sum(
            int((self._words[tensor.role, tensor.layer][rows] != CANARY).sum())
            for _, tensor, rows, _ in self._parts(pages, slot)
        )

    def _parts(self, pages: Sequence[int], slot: int) -> list[tuple[Component, Tensor, npt.NDArray[np.int64], Words]]:
        at_pages, firsts = np.array(pages, np.int64), np.arange(len(pages), dtype=np.uint64) * np.uint64(PAGE)
        at_slot, zero = np.array([slot], np.int64), np.zeros(1, np.uint64)
        return [
            (component, tensor, *((at_pages, firsts) if component.kind.has_tokens else (at_slot, zero)))
            for component in self.layout.components
            for tensor in component.tensors
        ]

    def _expected(self, component: Component, tensor: Tensor, room: int, firsts: Words) -> Words:
        dimensions = 1 + len(tensor.axes)
        key = np.uint64(zlib.crc32(f"{tensor.role} {tensor.layer} {room}".encode()) << 32 | room & 0xFFFFFFFF)
        value: Words = np.full((len(firsts), *[1] * len(tensor.axes)), key, np.uint64)
        for number, axis in enumerate(tensor.axes):
            index = np.concatenate([np.arange(start, start + size) for start, size in axis.spans]).astype(np.uint64)
            if number == len(tensor.axes) - 1:
                index = index[: axis.local_size * tensor.itemsize // 8]
            shape = [1] * dimensions
            shape[number + 1] = len(index)
            if axis.name == TOKEN:
                shape[0] = len(firsts)
                index = firsts[:, None] + index
            value = value + index.reshape(shape) * _STEPS[number]
        # Far from neighbours, so that a row in a wrong place never looks right.
        mixed: Words = (value ^ (value >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return mixed
