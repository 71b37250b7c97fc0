"""Compares memory with what it must be, and names the logical element of what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvbaton.check.content import Bytes, Int64s
from kvbaton.check.oracle import Expected, Memory, RequestRows, blocks, held_entries
from kvbaton.layout import TOKEN, Tensor


class Problem(NamedTuple):
    """Something wrong: ``where`` it was found (a rank, or the planner) and ``what`` it is."""

    where: str
    what: str


def compare(
    memory: Memory,
    before: Bytes,
    expected: Expected,
    writes: Int64s,
    rows: dict[str, RequestRows],
    tokens: int,
    index: int,
) -> list[Problem]:
    """What is wrong with ``memory`` after the transfer to destination ``index``.

    ``before`` is what it was, ``writes`` how often each byte was written. One problem for each way to be wrong, with
    the number of bytes and the first of them by name.
    """
    right, written = expected.settled(memory.bytes), expected.written
    times = writes.clip(0, 2)
    if np.array_equal(times, written) and np.array_equal(memory.bytes, right):
        return []
    faults = {
        "never written": written & (writes == 0),
        "written more than once": writes > 1,
        "written, but not part of what the destination needs": ~written & (writes > 0),
        "changed, though no transfer names it": (writes == 0) & (memory.bytes != before),
        "written with another content than the sender's": written & (writes == 1) & (memory.bytes != right),
    }
    where = f"destination {index} ({memory.layout.coords})"
    problems = []
    for what, wrong in faults.items():
        found = np.flatnonzero(wrong)
        if found.size:
            first = name_of(memory, int(found[0]), rows, tokens)
            count = f"{found.size} byte{'s' if found.size > 1 else ''}"
            problems.append(Problem(where, f"{count} {what}; first: {first}"))
    return problems


def name_of(memory: Memory, address: int, rows: dict[str, RequestRows], tokens: int) -> str:
    """The logical element of the request that has a byte at ``address``, in words; else the region and the byte."""
    region, byte = memory.region_of(address)
    for component in memory.layout.components:
        request = rows.get(component.name)
        if request is None:
            continue
        entries = held_entries(memory.layout, component, request, tokens)
        for block in blocks(memory, component, request, entries, tokens):
            found = np.argwhere(block.byte_addresses() == address)
            if found.size:
                layer, entry, inner, _ = found[0].tolist()
                tensor = block.tensors[layer]
                what = "slot" if not component.kind.has_tokens else "token" if component.kind.ratio == 1 else "entry"
                words = [f"component {component.name}", f"role {tensor.role}", f"layer {tensor.layer}"]
                words += [f"{what} {int(block.entries[entry])}", *_indices(tensor, inner)]
                return f"{', '.join(words)} (byte {byte} of region {region})"
    return f"byte {byte} of region {region}, which belongs to no element of the request"


def _indices(tensor: Tensor, inner: int) -> Iterator[str]:
    """``axis index`` of the element number ``inner`` of one entry."""
    axes = [axis for axis in tensor.axes if axis.name != TOKEN]
    places = np.unravel_index(inner, [axis.local_size for axis in axes]) if axes else ()
    for axis, place in zip(axes, places, strict=True):
        held = [index for start, count in axis.spans for index in range(start, start + count)]
        yield f"{axis.name} {held[int(place)]}"
