"""The oracle: what every byte of a rank's memory must be.

It knows the dimensions of the model, which logical elements each rank holds and where (the nouns of `kvbaton.layout`),
and one sentence: after the transfer every logical element that the receiver needs equals the sender's, and no other
byte has changed. It shares no code with the planner.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.layout import DTYPE_BYTES, TOKEN, Axis, Component, Kind, Ownership, RankLayout, Tensor

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

CANARIES = 16
"""Bytes without meaning in front of every region and behind it."""


class RequestRows(NamedTuple):
    """The rows that a request has of one component on one rank.

    ``start`` is the first local token of ``rows[0]``. Without tokens ``rows[i]`` is the request's slot ``i``.
    """

    rows: Int64s
    start: int = 0


class Memory:
    """The memory of one rank: all its regions in one array of ``bytes``, with canaries around each of them."""

    def __init__(self, layout: RankLayout, seed: int) -> None:
        """Every byte is random at first; ``seed`` says which."""
        self.layout = layout
        self.sizes = region_sizes(layout)
        steps = np.array([size + CANARIES for size in self.sizes], np.int64)
        self.bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)]) + CANARIES
        total = int(self.bases[-1])
        self.bytes: Bytes = np.frombuffer(np.random.default_rng(seed).bytes(total), np.uint8).copy()

    def region_of(self, address: int) -> tuple[int, int]:
        """The region that ``address`` lies in, and the byte within it."""
        region = int(np.searchsorted(self.bases[:-1], address, side="right")) - 1
        return max(region, 0), address - int(self.bases[max(region, 0)])


class Block(NamedTuple):
    """Elements of one role in several layers: arrays ``[layer, entry, inner]``, inner running over all other axes.

    ``addresses`` are those of the first byte of each element in `Memory.bytes`; ``numbers`` their logical content.
    """

    component: Component
    tensors: list[Tensor]
    entries: Int64s
    addresses: Int64s
    numbers: UInt64s

    def byte_addresses(self) -> Int64s:
        """The address of each byte: ``[layer, entry, inner, byte]``."""
        return np.asarray(self.addresses[..., None] + np.arange(self.tensors[0].itemsize))


def region_sizes(layout: RankLayout) -> list[int]:
    """The bytes that each region must have so that all rows lie inside."""
    ends: dict[int, int] = {}
    for component in layout.components:
        for tensor in component.tensors:
            end = 0
            if tensor.rows:
                inside = sum((sum(count for _, count in axis.spans) - 1) * axis.stride for axis in tensor.axes)
                last = (tensor.rows - 1) * tensor.row_stride
                end = tensor.offset + last + inside + DTYPE_BYTES[tensor.dtype]
            ends[tensor.region] = max(ends.get(tensor.region, 0), end)
    return [ends.get(region, 0) for region in range(max(ends, default=-1) + 1)]


def needed_entries(kind: Kind, tokens: int, prefix: int) -> Int64s:
    """The entries of a request that a receiver with ``prefix`` tokens lacks: those whose last token it needs."""
    last_tokens = np.arange(kind.ratio - 1, tokens, kind.ratio, dtype=np.int64)
    needed = np.ones(len(last_tokens), np.bool_)
    if kind.reused:
        needed &= last_tokens >= prefix
    if kind.window:
        needed &= last_tokens >= tokens - kind.window
    if kind.tail:
        needed &= last_tokens >= tokens - tokens % kind.tail
    return np.flatnonzero(needed)


def local_places(owned: Ownership, ratio: int, tokens: int) -> Int64s:
    """The local position of each entry of a request on a rank, in entries; -1 for those that it does not own."""
    first_tokens = np.arange(0, tokens - ratio + 1, ratio, dtype=np.int64)
    mine = first_tokens // owned.unit % owned.modulus == owned.remainder
    return np.where(mine, np.cumsum(mine) - 1, -1)


def held_entries(layout: RankLayout, component: Component, request: RequestRows, tokens: int) -> Int64s:
    """The entries (or slots) that the rows of a request hold once it has ``tokens`` tokens."""
    if not component.kind.has_tokens:
        return np.arange(len(request.rows))
    places = local_places(layout.owned_of(component), component.kind.ratio, tokens)
    room = len(request.rows) * (component.page_size // component.kind.ratio)
    first = request.start // component.kind.ratio
    if component.kind.ring:
        first = int(places.max(initial=-1)) + 1 - room
    return np.flatnonzero((places >= max(first, 0)) & (places < first + room))


def blocks(memory: Memory, component: Component, request: RequestRows, entries: Int64s, tokens: int) -> Iterator[Block]:
    """Where ``entries`` (or slots) of a request lie, for those that this rank holds; tensors without rows are left out.

    ``tokens`` is the number of tokens of the request.
    """
    places, inside = request.rows[entries] if not component.kind.has_tokens else entries, entries * 0
    if component.kind.has_tokens:
        local = local_places(memory.layout.owned_of(component), component.kind.ratio, tokens)[entries]
        entries, local = entries[local >= 0], local[local >= 0]
        per_row = component.page_size // component.kind.ratio
        pages, inside = np.divmod(local - request.start // component.kind.ratio, per_row)
        places = request.rows[pages % len(request.rows) if component.kind.ring else pages] if len(pages) else pages
    if not len(entries):
        return
    groups: dict[tuple[str, str, int, int, tuple[Axis, ...]], list[Tensor]] = {}
    for tensor in component.tensors:
        if tensor.rows:
            key = (tensor.role, tensor.dtype, tensor.region, tensor.row_stride, tensor.axes)
            groups.setdefault(key, []).append(tensor)
    for (role, _, region, row_stride, axes), tensors in groups.items():
        offsets = np.array([tensor.offset for tensor in tensors], np.int64) + memory.bases[region]
        layers = np.array([tensor.layer for tensor in tensors], np.uint64) * _constant("layer")
        token_stride, inner, inner_numbers = _inner(axes)
        addresses = offsets[:, None, None] + (places * row_stride + inside * token_stride)[None, :, None] + inner
        numbers = layers[:, None, None] + (entries.astype(np.uint64) * _constant("entry"))[None, :, None]
        numbers = _mixed(numbers + inner_numbers + _constant(f"{component.name}/{role}"))
        yield Block(component, tensors, entries, addresses, numbers)


def element_bytes(numbers: UInt64s, sent: str, kept: str) -> Bytes:
    """The bytes ``[..., byte]`` of logical elements that are sent as dtype ``sent`` and kept as dtype ``kept``."""
    if sent != kept:
        raise NotImplementedError(f"the oracle does not know what becomes of {sent} in memory of {kept}")
    little = np.ascontiguousarray(numbers, dtype="<u8")
    return little.view(np.uint8).reshape(*numbers.shape, 8)[..., : DTYPE_BYTES[kept]]


def write_content(memory: Memory, component: Component, request: RequestRows, entries: Int64s, tokens: int) -> None:
    """Put the logical content of ``entries`` (or slots) into ``memory``, as its rank lays it out."""
    for block in blocks(memory, component, request, entries, tokens):
        dtype = block.tensors[0].dtype
        memory.bytes[block.byte_addresses()] = element_bytes(block.numbers, dtype, dtype)


def expect(
    memory: Memory, rows: dict[str, RequestRows], tokens: int, prefix: int, dtypes: dict[tuple[str, str], str]
) -> tuple[Bytes, Bools]:
    """What ``memory`` must be after the transfer, and which of its bytes must have been written, once each.

    ``dtypes`` are those of the senders by component and role.
    """
    right, written = memory.bytes.copy(), np.zeros(len(memory.bytes), np.bool_)
    for component in memory.layout.components:
        if component.name not in rows:
            continue
        request = rows[component.name]
        kind = component.kind
        entries = needed_entries(kind, tokens, prefix) if kind.has_tokens else np.arange(len(request.rows))
        for block in blocks(memory, component, request, entries, tokens):
            addresses, tensor = block.byte_addresses(), block.tensors[0]
            sent = dtypes.get((component.name, tensor.role), tensor.dtype)
            right[addresses] = element_bytes(block.numbers, sent, tensor.dtype)
            written[addresses] = True
    return right, written


@functools.lru_cache(1 << 10)
def _inner(axes: tuple[Axis, ...]) -> tuple[int, Int64s, UInt64s]:
    """The stride of the token axis; relative address and share of the content of each element of one entry."""
    addresses, numbers = np.zeros(1, np.int64), np.zeros(1, np.uint64)
    token_stride = 0
    for axis in axes:
        if axis.name == TOKEN:
            token_stride = axis.stride
            continue
        indices = np.concatenate([np.arange(start, start + count) for start, count in axis.spans])
        addresses = (addresses[:, None] + np.arange(len(indices)) * axis.stride).reshape(-1)
        numbers = (numbers[:, None] + indices.astype(np.uint64) * _constant(axis.name)).reshape(-1)
    return token_stride, addresses, numbers


@functools.lru_cache(1 << 10)
def _constant(name: str) -> np.uint64:
    constant: np.uint64 = np.uint64(
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
    )
    return constant


def _mixed(numbers: UInt64s) -> UInt64s:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))
