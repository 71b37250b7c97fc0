"""The oracle: what every byte of a rank's memory must be.

It knows the dimensions of the model, which logical elements each rank holds and where (the nouns of `kvbaton.layout`),
and one sentence: after the transfer every logical element that the receiver needs equals the sender's, and no other
byte has changed. Elements that the two sides store in unlike formats are equal as `kvbaton.check.values` says. It
shares no code with the planner and none with the copy kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.check.content import Bytes, Int64s, UInt64s, bytes_of, codes_of, constant, indices_of, mixed
from kvbaton.check.values import Cast, Codes, Stored, sizes_of, stored_in
from kvbaton.layout import DTYPE_BYTES, TOKEN, Axis, Component, Kind, Ownership, RankLayout, Tensor

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

    ``addresses`` are those of the first byte of each element in `Memory.bytes`; ``places`` ``[layer, entry, 1]`` and
    ``inside`` ``[inner]`` are the shares of layer and entry, and of the rest, in their logical content.
    """

    component: Component
    tensors: list[Tensor]
    entries: Int64s
    addresses: Int64s
    places: UInt64s
    inside: UInt64s

    @property
    def numbers(self) -> UInt64s:
        """The logical content of each element."""
        name = constant(f"{self.component.name}/{self.tensors[0].role}")
        return mixed(self.places + (self.inside + name))

    def byte_addresses(self) -> Int64s:
        """The address of each byte: ``[layer, entry, inner, byte]``."""
        return np.asarray(self.addresses[..., None] + np.arange(self.tensors[0].itemsize))


class Senders:
    """How the senders store each role of each layer of a component."""

    def __init__(self, layouts: Sequence[RankLayout]) -> None:
        self.stored: dict[tuple[str, str, int], Stored] = {}
        for layout in layouts:
            for component in layout.components:
                for (role, layer), stored in stored_in(component).items():
                    self.stored.setdefault((component.name, role, layer), stored)
        self.scales = {(name, stored.scale) for (name, _, _), stored in self.stored.items() if stored.scale}

    def casts_to(self, component: Component) -> dict[tuple[str, int], Cast]:
        """The tensors of ``component``, a receiver's, whose elements change on their way, by role and layer.

        Where the receiver has scales for them, those have the same value.
        """
        found: dict[tuple[str, int], Cast] = {}
        stored = stored_in(component)
        for tensor in component.tensors:
            kept = stored[tensor.role, tensor.layer]
            sent = self.stored.get((component.name, tensor.role, tensor.layer), kept)
            if sent != kept:
                cast = Cast(component.name, tensor.role, sizes_of(tensor.axes), sent, kept)
                found[tensor.role, tensor.layer] = cast
                if kept.scale:
                    found[kept.scale, tensor.layer] = cast
        return found


class Expected(NamedTuple):
    """What memory must be after the transfer, and which of its bytes must have been written, once each.

    Where an element may have one of several contents, ``memory`` has the least of them, and the rest is in ``loose``:
    addresses ``[n, byte]`` and `Codes` ``[n]`` of elements.
    """

    memory: Bytes
    written: Bools
    loose: list[tuple[Int64s, Codes]]

    def settled(self, found: Bytes) -> Bytes:
        """``memory``, with the content of ``found`` for the elements that may have it."""
        right: Bytes = self.memory.copy()
        for addresses, codes in self.loose:
            wide = np.zeros((len(addresses), 8), np.uint8)
            wide[:, : addresses.shape[1]] = found[addresses]
            read = wide.view("<u8")[:, 0]
            good = addresses[(read >= codes.low) & (read <= codes.high)]
            right[good] = found[good]
        return right


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
    for (_, _, region, row_stride, axes), tensors in groups.items():
        offsets = np.array([tensor.offset for tensor in tensors], np.int64) + memory.bases[region]
        layers = np.array([tensor.layer for tensor in tensors], np.uint64) * constant("layer")
        token_stride, inner, inner_numbers = _inner(axes)
        addresses = offsets[:, None, None] + (places * row_stride + inside * token_stride)[None, :, None] + inner
        numbers = layers[:, None, None] + (entries.astype(np.uint64) * constant("entry"))[None, :, None]
        yield Block(component, tensors, entries, addresses, numbers, inner_numbers)


def write_content(
    memory: Memory, component: Component, request: RequestRows, entries: Int64s, tokens: int, senders: Senders
) -> None:
    """Put the logical content of ``entries`` (or slots) into ``memory``, as its rank, a sender, lays it out."""
    for block in blocks(memory, component, request, entries, tokens):
        memory.bytes[block.byte_addresses()] = _as_sent(block, senders)


def expect(memory: Memory, rows: dict[str, RequestRows], tokens: int, prefix: int, senders: Senders) -> Expected:
    """What ``memory`` must be after the transfer."""
    right, written = memory.bytes.copy(), np.zeros(len(memory.bytes), np.bool_)
    expected = Expected(right, written, [])
    for component in memory.layout.components:
        if component.name not in rows:
            continue
        request = rows[component.name]
        kind = component.kind
        entries = needed_entries(kind, tokens, prefix) if kind.has_tokens else np.arange(len(request.rows))
        casts = senders.casts_to(component)
        for block in blocks(memory, component, request, entries, tokens):
            addresses, tensor = block.byte_addresses(), block.tensors[0]
            written[addresses] = True
            right[addresses] = _as_sent(block, senders)
            for cast, layers in _layers_by_cast(block, casts).items():
                codes = cast.codes(tensor, block.places[layers])
                changed = addresses[layers]
                right[changed] = bytes_of(codes.low, tensor.dtype)
                several = codes.low != codes.high
                if several.any():
                    expected.loose.append((changed[several], Codes(codes.low[several], codes.high[several])))
    return expected


def _layers_by_cast(block: Block, casts: dict[tuple[str, int], Cast]) -> dict[Cast, list[int]]:
    """Which layers of ``block`` go through each cast."""
    found: dict[Cast, list[int]] = {}
    if casts:
        for number, tensor in enumerate(block.tensors):
            cast = casts.get((tensor.role, tensor.layer))
            if cast is not None:
                found.setdefault(cast, []).append(number)
    return found


def _as_sent(block: Block, senders: Senders) -> Bytes:
    """The bytes of elements as the sender stores them."""
    tensor = block.tensors[0]
    is_scale = (block.component.name, tensor.role) in senders.scales
    return bytes_of(codes_of(block.numbers, tensor.dtype, scale=is_scale), tensor.dtype)


@functools.lru_cache(1 << 10)
def _inner(axes: tuple[Axis, ...]) -> tuple[int, Int64s, UInt64s]:
    """The stride of the token axis; relative address and share of the content of each element of one entry."""
    addresses, numbers = np.zeros(1, np.int64), np.zeros(1, np.uint64)
    token_stride = 0
    for axis in axes:
        if axis.name == TOKEN:
            token_stride = axis.stride
            continue
        addresses = (addresses[:, None] + np.arange(axis.local_size) * axis.stride).reshape(-1)
    for name, indices in indices_of(axes).items():
        numbers = numbers + indices.astype(np.uint64) * constant(name)
    return token_stride, addresses, numbers
