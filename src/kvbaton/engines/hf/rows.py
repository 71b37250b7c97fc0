"""Who has which rows: the free lists of an engine, and the rows of a request.

The tp ranks and pp stages of a cp rank use the same row numbers, and so have one free list for each component; each cp
rank has rows by its own tokens. All components without tokens and the aux table share one list: the slot of a request
is the same number in each of them, on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.engines.hf.grid import Grid
from kvbaton.engines.hf.shards import AUX, Group
from kvbaton.errors import RowsError
from kvbaton.layout import Coords, Ownership
from kvbaton.plan import Pages

Rows = npt.NDArray[np.int64]


class Aux(NamedTuple):
    """What the decode side needs besides the cache: the row of the aux table."""

    first_token: int
    prompt_tokens: int
    finished_at: float
    """When the prefill engine handed over the last rows (unix time)."""


class FreeList:
    """Numbers from 0 to ``count`` - 1 that are taken and given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Rows | None:
        """The next ``count`` numbers, those that were free longest first; None if there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._taken.update(taken)
        return np.array(taken, dtype=np.int64)

    def give(self, rows: Iterable[int]) -> None:
        """Give numbers back. Raises `RowsError` for one that is not taken."""
        for row in rows:
            if int(row) not in self._taken:
                raise RowsError(f"row {int(row)} was given back, but it is not in use")
            self._taken.discard(int(row))
            self._free.append(int(row))


@dataclass
class Allocation:
    """The rows of one request of ``tokens`` tokens.

    ``pages[cp rank][component]`` are its pages in the order of that rank's tokens; a component of which the request
    needs nothing has no rows, and no cp rank of another process is listed.
    """

    tokens: int
    slot: int
    pages: dict[int, dict[str, Pages]] = field(default_factory=dict)


class Allocator:
    """The free lists for ``groups`` of an engine with room for ``pool_tokens`` tokens and ``slots`` requests.

    ``cp_ranks`` are those whose rows it gives out.
    """

    def __init__(
        self, groups: Sequence[Group], grid: Grid, *, pool_tokens: int, slots: int, cp_ranks: Iterable[int]
    ) -> None:
        self._grid = grid
        self._groups = [group for group in groups if group.kind.has_tokens]
        self._pool_tokens = pool_tokens
        self._slots = FreeList(slots)
        self.counts = {group.name: self._row_count(group, slots) for group in groups} | {AUX: slots}
        """How many rows each component has on each rank."""
        self._pages = {
            rank: {group.name: FreeList(self.counts[group.name]) for group in self._groups} for rank in sorted(cp_ranks)
        }

    def check_fits(self, tokens: int) -> None:
        """Raise `RowsError`, with both numbers, if a request of ``tokens`` tokens can never get its pages."""
        for rank, lists in self._pages.items():
            for group in self._groups:
                count, total = self._needed(group, rank, tokens)[0], lists[group.name].count
                if count > total:
                    where = f" of cp rank {rank}" if self._grid.cp > 1 else ""
                    raise RowsError(
                        f"a request of {tokens} tokens needs {count} pages of component {group.name}, but the pool"
                        f"{where} has {total} of {group.page_size} tokens; shorten the prompt or raise pool_tokens "
                        f"(now {self._pool_tokens})"
                    )

    def allocate(self, tokens: int) -> Allocation | None:
        """Rows for a request of ``tokens`` tokens, or None while there are not enough of them."""
        needed = {
            rank: {group.name: self._needed(group, rank, tokens) for group in self._groups} for rank in self._pages
        }
        short = any(
            count > len(self._pages[rank][name]) for rank, each in needed.items() for name, (count, _) in each.items()
        )
        if short or not len(self._slots):
            return None
        slot = self._slots.take(1)
        assert slot is not None
        allocation = Allocation(tokens, int(slot[0]))
        for rank, each in needed.items():
            allocation.pages[rank] = {}
            for name, (count, start) in each.items():
                rows = self._pages[rank][name].take(count)
                assert rows is not None
                allocation.pages[rank][name] = Pages(rows, start)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give the rows of a request back."""
        for rank, each in allocation.pages.items():
            for name, pages in each.items():
                self._pages[rank][name].give(pages.rows)
        self._slots.give([allocation.slot])

    def free_rows(self) -> dict[str, tuple[int, int]]:
        """Free rows and all rows of each component with pages, over all cp ranks, and of the slots (``slots``)."""
        counts = {
            group.name: (
                sum(len(lists[group.name]) for lists in self._pages.values()),
                sum(lists[group.name].count for lists in self._pages.values()),
            )
            for group in self._groups
        }
        return {**counts, "slots": (len(self._slots), self._slots.count)}

    def rows_of(
        self, allocation: Allocation, cp_rank: int, groups: Mapping[str, Group], tokens: tuple[int, int]
    ) -> dict[str, Rows]:
        """The rows of each of ``groups`` on a cp rank that hold ``tokens``; those of a ring are all that there are.

        A component of which the request needs nothing is left out.
        """
        found = {}
        for name, group in groups.items():
            first, last = group.kind.needed(allocation.tokens)
            rows, start = allocation.pages[cp_rank][name]
            if first == last:
                continue
            if not group.kind.ring:
                owned, size = self._owned(group, cp_rank), group.page_size
                begin, end = owned.local_count(tokens[0]), owned.local_count(tokens[1])
                rows = rows[(begin - start) // size : -((start - end) // size)] if end > begin else rows[:0]
            found[name] = rows
        return found

    def _owned(self, group: Group, cp_rank: int) -> Ownership:
        return self._grid.owned(Coords(cp=(cp_rank, self._grid.cp)), group.kind.ratio)

    def _needed(self, group: Group, cp_rank: int, tokens: int) -> tuple[int, int]:
        """How many pages, and the local token with which the first begins."""
        if group.kind.ring:
            return self._ring_rows(group), 0
        owned, size = self._owned(group, cp_rank), group.page_size
        first, last = (owned.local_count(token) for token in group.kind.needed(tokens))
        if first == last:
            return 0, 0
        return -(-last // size) - first // size, first // size * size

    def _ring_rows(self, group: Group) -> int:
        """Rows for all tokens that a ring can have to hold."""
        return -(-(group.kind.window or group.kind.tail) // group.page_size)

    def _row_count(self, group: Group, slots: int) -> int:
        if not group.kind.has_tokens:
            return slots
        if group.kind.ring:
            return slots * self._ring_rows(group)
        tokens = self._pool_tokens // self._grid.page_size * self._grid.page_size
        # The first cp rank has most tokens of any request.
        rows = -(-self._owned(group, 0).local_count(tokens) // group.page_size)
        return min(rows, slots * (-(-group.kind.window // group.page_size) + 1)) if group.kind.window else rows
