"""Turns the rows that an engine passes into `Pages`, and refuses at once what does not fit the registered layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import numpy as np
import numpy.typing as npt

from kvbaton.errors import RowsError
from kvbaton.layout import Component, Ownership, RankLayout
from kvbaton.plan import Pages
from kvbaton.plan.units import checked_rows
from kvbaton.protocol.messages import MAX_TOKENS

RowsLike = Union[Pages, Sequence[int], "npt.NDArray[np.integer]"]
"""Row indices: a list or an integer array; or `Pages`, where the first row is not the one that the tokens imply."""


def to_pages(layout: RankLayout, component: Component, rows: RowsLike, tokens: tuple[int, int], side: str) -> Pages:
    """Rows that hold ``tokens`` (first, last) of a component with tokens, or the rows of one without.

    The rows of a ring are all that the request has. Raises `RowsError` where the number of rows is not what the tokens
    need, or a row is not registered.
    """
    if isinstance(rows, Pages):
        pages = Pages(_int64(component, rows.rows, side), rows.start)
        if pages.start < 0 or pages.start % component.page_size:
            raise RowsError(
                f"{side}: component {component.name}: pages start at token {pages.start}, which is not a multiple of "
                f"the page size {component.page_size}"
            )
    elif component.kind.ring or not component.kind.has_tokens:
        pages = Pages(_int64(component, rows, side), 0)
    else:
        owned = layout.owned_of(component)
        first, last = (owned.local_count(token) for token in tokens)
        size = component.page_size
        array = _int64(component, rows, side)
        expected = -(-last // size) - first // size if last > first else 0
        if len(array) != expected and (len(array) or component.kind.has_entries(tokens)):
            raise RowsError(
                f"{side}: component {component.name}: {len(array)} rows given for tokens {tokens[0]}..{tokens[1]}, "
                f"which lie in {expected} pages of {size} tokens; pass kvbaton.Pages(rows, start) where the rows begin "
                "elsewhere"
            )
        pages = Pages(array, first // size * size)
    _check_registered(component, pages.rows, side)
    return pages


def _int64(component: Component, rows: object, side: str) -> npt.NDArray[np.int64]:
    # A copy: the engine may reuse its array as soon as the call returns.
    return np.array(checked_rows(rows, f"{side}: component {component.name}"), np.int64)


def _check_registered(component: Component, rows: npt.NDArray[np.int64], side: str) -> None:
    registered = min((tensor.rows for tensor in component.tensors if tensor.rows), default=None)
    if registered is None or not rows.size:
        return
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= registered:
        raise RowsError(
            f"{side}: component {component.name}: row {low if low < 0 else high} is outside the {registered} "
            "registered rows"
        )


def offered_pages(layout: RankLayout, rows: Mapping[str, RowsLike], tokens: int, prefix: int) -> dict[str, Pages]:
    """`pages_by_component` for the rows of an offer. Raises `RowsError` also where a row would be written twice."""
    needed = {component.name: component.kind.needed(tokens, prefix) for component in layout.components}
    pages = pages_by_component(layout, rows, needed, "decode")
    for component in layout.components:
        if component.name in pages:
            _check_places(component, pages[component.name], layout.owned_of(component), needed[component.name])
    return pages


def _check_places(component: Component, pages: Pages, owned: Ownership, tokens: tuple[int, int]) -> None:
    rows = pages.rows
    if component.kind.has_tokens and not component.kind.ring:
        # Rows of other tokens are not written: many engines fill their lists up with a row that holds nothing.
        first, last = (max(owned.local_count(token) - pages.start, 0) for token in tokens)
        rows = rows[first // component.page_size : -(-last // component.page_size)]
    elif component.kind.ring:
        local = [owned.local_count(token) for token in tokens]
        if local[1] - local[0] > len(rows) * component.page_size:
            raise RowsError(
                f"decode: component {component.name}: a ring of {len(rows)} rows holds "
                f"{len(rows) * component.page_size} tokens, but {local[1] - local[0]} are needed ({tokens[0]} to "
                f"{tokens[1]}); offer more rows"
            )
    if rows.size and np.bincount(rows - rows.min()).max() > 1:
        twice = int(rows.min() + np.argmax(np.bincount(rows - rows.min()) > 1))
        raise RowsError(
            f"decode: component {component.name}: row {twice} is offered for two places of the request; each needs a "
            f"row of its own"
        )


def pages_by_component(
    layout: RankLayout, rows: Mapping[str, RowsLike], ranges: Mapping[str, tuple[int, int]], side: str
) -> dict[str, Pages]:
    """`to_pages` for each component in ``rows``; ``ranges`` gives the tokens of the paged ones.

    Raises `RowsError` for a component that is not registered.
    """
    known = {component.name: component for component in layout.components}
    pages = {}
    for name, value in rows.items():
        if name not in known:
            raise RowsError(f"{side}: component {name} is not registered; registered are {', '.join(known)}")
        if known[name].kind.aux:
            raise RowsError(f"{side}: component {name} is aux data: pass its row as aux=, not with the other rows")
        pages[name] = to_pages(layout, known[name], value, ranges.get(name, (0, 0)), side)
    return pages


def chunk_pages(layout: RankLayout, rows: Mapping[str, RowsLike], tokens: tuple[int, int]) -> dict[str, Pages]:
    """`pages_by_component` for the rows of one chunk at prefill."""
    return pages_by_component(layout, rows, {component.name: tokens for component in layout.components}, "prefill")


def checked_tokens(room: int, tokens: tuple[int, int]) -> tuple[int, int]:
    """The range of one chunk at prefill as plain ints. Raises `RowsError` if it is none."""
    first, last = int(tokens[0]), int(tokens[1])
    if not 0 <= first <= last <= MAX_TOKENS:
        raise RowsError(f"prefill: room {room}: tokens {first}..{last} are no range of tokens")
    return first, last


def ranges_and_slots(
    layout: RankLayout, pages: Mapping[str, Pages], tokens: tuple[int, int]
) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
    """What a chunk holds: the token ranges of its paged components, and the names of its slot components."""
    ranges, slots = {}, set()
    for component in layout.components:
        if component.name not in pages:
            continue
        if component.kind.has_tokens:
            first = _first_token(layout, component, pages[component.name], tokens)
            if first < tokens[1]:
                ranges[component.name] = (first, tokens[1])
        elif not component.kind.aux:
            slots.add(component.name)
    return ranges, frozenset(slots)


def _first_token(layout: RankLayout, component: Component, pages: Pages, tokens: tuple[int, int]) -> int:
    """The first of ``tokens`` that ``pages`` hold: they may hold only the end of a chunk."""
    owned, size = layout.owned_of(component), component.page_size
    if component.kind.ring:
        start = owned.local_count(tokens[1]) - len(pages.rows) * size
        held = start > owned.local_count(tokens[0])
    else:
        start = pages.start
        # A rank that owns some of the tokens has no row of the others, and still gives all of its own.
        held = start > owned.local_count(tokens[0]) // size * size
    # From the token after the last one that the rank owns and these rows lack: those between are others' business.
    return max(tokens[0], owned.global_token(start - 1) + 1) if held else tokens[0]


def aux_row(layout: RankLayout, row: int, side: str) -> int:
    """The aux slot as a plain int. Raises `RowsError` if no component of kind ``aux`` is registered, or no such row."""
    rows = [to_pages(layout, each, [row], (0, 0), side).rows for each in layout.components if each.kind.aux]
    if not rows:
        raise RowsError(f"{side}: aux slot {row} is given, but no component of kind aux is registered")
    return int(rows[0][0])
