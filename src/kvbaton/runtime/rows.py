"""Turns the rows that an engine passes into `Pages`, and refuses at once what does not fit the registered layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import numpy as np
import numpy.typing as npt

from kvbaton.copy import extent
from kvbaton.errors import RowsError
from kvbaton.layout import Component, RankLayout
from kvbaton.plan import Pages
from kvbaton.plan.units import checked_rows
from kvbaton.protocol.messages import MAX_TOKENS

RowsLike = Union[Pages, Sequence[int], "npt.NDArray[np.integer]"]
"""Row indices: a list or an integer array; or `Pages`, where the first row is not the one that the tokens imply."""


class EngineRows:
    """What one rank's layout says of the rows that its engine passes. ``side`` begins every error."""

    def __init__(self, layout: RankLayout, side: str) -> None:
        self._layout = layout
        self._side = side
        self._components = {component.name: component for component in layout.components}
        self._owned = {component.name: layout.owned_of(component) for component in layout.components}
        self._registered = {
            component.name: min((tensor.rows for tensor in component.tensors if tensor.rows), default=None)
            for component in layout.components
        }
        """The least rows of the tensors of a component; None where it has none."""

    def offered(self, rows: Mapping[str, RowsLike], tokens: int, prefix: int) -> dict[str, Pages]:
        """The pages of an offer, by component. Raises `RowsError` also where a row would be written twice."""
        needed = {name: each.kind.needed(tokens, prefix) for name, each in self._components.items()}
        pages = {name: self._pages(name, value, needed.get(name, (0, 0))) for name, value in rows.items()}
        for name, found in pages.items():
            self._check_places(self._components[name], found, needed[name])
        return pages

    def chunk(self, rows: Mapping[str, RowsLike], tokens: tuple[int, int]) -> dict[str, Pages]:
        """The pages of one chunk at prefill, by component. Raises `RowsError`."""
        return {name: self._pages(name, value, tokens) for name, value in rows.items()}

    def ranges_and_slots(
        self, pages: Mapping[str, Pages], tokens: tuple[int, int]
    ) -> tuple[dict[str, tuple[int, int]], frozenset[str]]:
        """What a chunk holds: the token ranges of its paged components, and the names of its slot components."""
        ranges, slots = {}, set()
        for name, component in self._components.items():
            if name not in pages:
                continue
            if component.kind.has_tokens:
                first = self._first_token(component, pages[name], tokens)
                if first < tokens[1]:
                    ranges[name] = (first, tokens[1])
            elif not component.kind.aux:
                slots.add(name)
        return ranges, frozenset(slots)

    def aux(self, row: int) -> int:
        """The aux slot as a plain int. Raises `RowsError` if no component of kind ``aux`` has it."""
        found = [self._to_pages(each, [row], (0, 0)).rows for each in self._components.values() if each.kind.aux]
        if not found:
            raise RowsError(f"{self._side}: aux slot {row} is given, but no component of kind aux is registered")
        return int(found[0][0])

    def _pages(self, name: str, rows: RowsLike, tokens: tuple[int, int]) -> Pages:
        component = self._components.get(name)
        if component is None:
            known = ", ".join(self._components)
            raise RowsError(f"{self._side}: component {name} is not registered; registered are {known}")
        if component.kind.aux:
            raise RowsError(
                f"{self._side}: component {name} is aux data: pass its row as aux=, not with the other rows"
            )
        return self._to_pages(component, rows, tokens)

    def _to_pages(self, component: Component, rows: RowsLike, tokens: tuple[int, int]) -> Pages:
        """Rows that hold ``tokens`` (first, last) of a component with tokens, or the rows of one without.

        The rows of a ring are all that the request has. Raises `RowsError` where the number of rows is not what the
        tokens need, or a row is not registered.
        """
        size = component.page_size
        if isinstance(rows, Pages):
            pages = Pages(self._taken(component, rows.rows), rows.start)
            if pages.start < 0 or pages.start % size:
                raise RowsError(
                    f"{self._side}: component {component.name}: pages start at token {pages.start}, which is not a "
                    f"multiple of the page size {size}"
                )
        elif component.kind.ring or not component.kind.has_tokens:
            pages = Pages(self._taken(component, rows), 0)
        else:
            owned = self._owned[component.name]
            first, last = (owned.local_count(token) for token in tokens)
            array = self._taken(component, rows)
            expected = -(-last // size) - first // size if last > first else 0
            if len(array) != expected and (len(array) or component.kind.has_entries(tokens)):
                raise RowsError(
                    f"{self._side}: component {component.name}: {len(array)} rows given for tokens "
                    f"{tokens[0]}..{tokens[1]}, which lie in {expected} pages of {size} tokens; pass "
                    "kvbaton.Pages(rows, start) where the rows begin elsewhere"
                )
            pages = Pages(array, first // size * size)
        self._check_registered(component, pages.rows)
        return pages

    def _taken(self, component: Component, rows: object) -> npt.NDArray[np.int64]:
        # A copy: the engine may reuse its array as soon as the call returns. By way of bytes, since numpy's own copies
        # let go of the interpreter's lock, and another thread may keep it for milliseconds.
        return np.frombuffer(checked_rows(rows, f"{self._side}: component {component.name}").tobytes(), np.int64)

    def _check_registered(self, component: Component, rows: npt.NDArray[np.int64]) -> None:
        registered = self._registered[component.name]
        if registered is None or not rows.size:
            return
        low, high = extent(rows)
        if low < 0 or high >= registered:
            raise RowsError(
                f"{self._side}: component {component.name}: row {low if low < 0 else high} is outside the "
                f"{registered} registered rows"
            )

    def _check_places(self, component: Component, pages: Pages, tokens: tuple[int, int]) -> None:
        rows, owned = pages.rows, self._owned[component.name]
        if component.kind.has_tokens and not component.kind.ring:
            # Rows of other tokens are not written: many engines fill their lists up with a row that holds nothing.
            first, last = (max(owned.local_count(token) - pages.start, 0) for token in tokens)
            rows = rows[first // component.page_size : -(-last // component.page_size)]
        elif component.kind.ring:
            local = [owned.local_count(token) for token in tokens]
            if local[1] - local[0] > len(rows) * component.page_size:
                raise RowsError(
                    f"{self._side}: component {component.name}: a ring of {len(rows)} rows holds "
                    f"{len(rows) * component.page_size} tokens, but {local[1] - local[0]} are needed ({tokens[0]} to "
                    f"{tokens[1]}); offer more rows"
                )
        if rows.size and np.bincount(rows - rows.min()).max() > 1:
            twice = int(rows.min() + np.argmax(np.bincount(rows - rows.min()) > 1))
            raise RowsError(
                f"{self._side}: component {component.name}: row {twice} is offered for two places of the request; each "
                "needs a row of its own"
            )

    def _first_token(self, component: Component, pages: Pages, tokens: tuple[int, int]) -> int:
        """The first of ``tokens`` that ``pages`` hold: they may hold only the end of a chunk."""
        owned, size = self._owned[component.name], component.page_size
        if component.kind.ring:
            start = owned.local_count(tokens[1]) - len(pages.rows) * size
            held = start > owned.local_count(tokens[0])
        else:
            start = pages.start
            # A rank that owns some of the tokens has no row of the others, and still gives all of its own.
            held = start > owned.local_count(tokens[0]) // size * size
        # From the token after the last one that the rank owns and these rows lack: those between are others' business.
        return max(tokens[0], owned.global_token(start - 1) + 1) if held else tokens[0]


def checked_tokens(room: int, tokens: tuple[int, int]) -> tuple[int, int]:
    """The range of one chunk at prefill as plain ints. Raises `RowsError` if it is none."""
    first, last = int(tokens[0]), int(tokens[1])
    if not 0 <= first <= last <= MAX_TOKENS:
        raise RowsError(f"prefill: room {room}: tokens {first}..{last} are no range of tokens")
    return first, last
