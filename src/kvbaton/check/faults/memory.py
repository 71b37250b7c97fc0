"""The memory of one rank: rows that are lent to requests, and every byte of them under watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from kvbaton.check.faults.content import CANARY, POISON, Bytes, Int64s, Places, places_of
from kvbaton.check.faults.models import nbytes_of
from kvbaton.layout import RankLayout
from kvbaton.memory import Region


@dataclass(eq=False)
class Lease:
    """Rows that one request has for a while."""

    number: int
    request: int
    rows: dict[str, list[int]]
    owned: Int64s
    """Every byte of them."""
    needed: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Bytes that the request's data belong into ..."""
    content: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    """... and what they are."""
    tokens: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """What `Memory.expect` was told."""
    failed: bool = False
    """Whether its room has failed: nobody will read what comes."""


class Memory:
    """``array`` is what is registered.

    ``violate`` is told what is wrong with it; ``later(request)`` are the requests
    that use its room number after it.

    ``shadow`` is what it held when it was last looked at, ``expected`` what each byte may become: the content of the
    request that has its row, or the canary.
    """

    def __init__(
        self,
        layout: RankLayout,
        violate: Callable[[str], None],
        later: Callable[[int], Sequence[int]] = lambda request: (),
    ) -> None:
        nbytes = nbytes_of(layout)
        self.array: Bytes = np.full(nbytes, CANARY, np.uint8)
        self.region = Region.of(self.array)
        self.leases: dict[int, Lease] = {}
        self._layout = layout
        self._violate = violate
        self._later = later
        self.mixed_up = 0
        """Times that a late Offer of a room that failed brought data of the next room of its number."""
        self._places = places_of(layout)
        self._shadow = self.array.copy()
        self._expected = self.array.copy()
        self._owner: npt.NDArray[np.int64] = np.zeros(nbytes, np.int64)
        self._free = {
            name: list(range(min(tensor.rows for tensor in each.component.tensors)))
            for name, each in self._places.items()
        }
        self._next = 1

    @property
    def places(self) -> Mapping[str, Places]:
        """Where everything lies."""
        return self._places

    def lend(self, request: int, wanted: Mapping[str, int]) -> Lease | None:
        """Rows of each component for a request; None if there are too few, and then none is taken."""
        if any(len(self._free[name]) < count for name, count in wanted.items()):
            return None
        # Those that came back last are the first to go: whoever still writes into them is seen.
        rows = {name: [self._free[name].pop() for _ in range(count)] for name, count in wanted.items()}
        owned = [self._places[name].whole_rows(np.array(each, np.int64)) for name, each in rows.items() if each]
        lease = Lease(self._next, request, rows, np.concatenate(owned) if owned else np.empty(0, np.int64))
        self._next += 1
        self.leases[lease.number] = lease
        self._owner[lease.owned] = lease.number
        self._set(lease.owned, CANARY)
        return lease

    def expect(self, lease: Lease, tokens: Mapping[str, tuple[int, int, int]]) -> None:
        """The data of a request may come: of each component the tokens (first, last), the rows beginning at a third.

        What has no tokens is named with any numbers.
        """
        lease.tokens = tokens
        lease.needed, lease.content = self._all_of(lease, lease.request)
        self._expected[lease.needed] = lease.content

    def fill(self, lease: Lease, name: str, first: int, last: int, start: int) -> None:
        """The engine computes the content of some tokens (or of a state)."""
        where, what = self._of(lease, name, first, last, start)
        self.array[where] = what
        self._shadow[where] = what
        self._expected[where] = what

    def _all_of(self, lease: Lease, request: int) -> tuple[Int64s, Bytes]:
        found = [self._of(lease, name, *where, request) for name, where in lease.tokens.items()]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        return tuple(np.concatenate([part[side].reshape(-1) for part in found]) for side in (0, 1))  # type: ignore[return-value]

    def _of(
        self, lease: Lease, name: str, first: int, last: int, start: int, request: int | None = None
    ) -> tuple[Int64s, Bytes]:
        request = lease.request if request is None else request
        places, rows = self._places[name], np.array(lease.rows[name], np.int64)
        if places.component.kind.has_tokens:
            positions = np.arange(first, last, dtype=np.int64)
            at, inside = np.divmod(positions - start, places.component.page_size)
            return places.addresses(rows[at], inside), places.content(request, positions)
        zeros = np.zeros(len(rows), np.int64)
        return places.addresses(rows, zeros), places.content(request, zeros)

    def take_back(self, lease: Lease, *, poison: bool = False) -> None:
        """The rows are free again."""
        del self.leases[lease.number]
        self.look("before rows were given back")
        self._owner[lease.owned] = 0
        self._set(lease.owned, POISON if poison else CANARY)
        for name, rows in lease.rows.items():
            self._free[name] += rows

    def look(self, when: str) -> None:
        """Look at every byte: what has changed must belong to the request that has the row, and be right."""
        if np.array_equal(self.array, self._shadow):
            return
        changed = np.flatnonzero(self.array != self._shadow)
        wrong = changed[self.array[changed] != self._expected[changed]]
        if len(wrong) and not self._is_mixed_up(wrong):
            self._violate(f"{when}: {self._describe(wrong)}")
        self._shadow[changed] = self.array[changed]

    def _is_mixed_up(self, wrong: Int64s) -> bool:
        """Whether all of it is data of a later room of the same number, in rows of one that failed and still has them.

        Its number was used again while its Offer was on its way: that is what may come of it, and nothing worse.
        """
        owners = [self.leases.get(number) for number in np.unique(self._owner[wrong]).tolist()]
        if len(owners) != 1 or owners[0] is None or not owners[0].failed:
            return False
        for request in self._later(owners[0].request):
            where, what = self._all_of(owners[0], request)
            allowed = self._expected.copy()
            allowed[where] = what
            if np.array_equal(self.array[wrong], allowed[wrong]):
                self.mixed_up += 1
                return True
        return False

    def flip(self, before: Bytes, chance: Random) -> bool:
        """Change one bit of what has landed since ``before``, and say so to nobody. False where nothing has."""
        landed = np.flatnonzero(self.array != before)
        if not len(landed):
            return False
        at = landed[chance.randrange(len(landed))]
        self.array[at] ^= 1 << chance.randrange(8)
        # It is no write of its own: only `check_complete` is to see it.
        self._shadow[at] = self.array[at]
        return True

    def check_complete(self, lease: Lease) -> None:
        """Every byte of the request must be there, and nothing else in its rows."""
        wrong = lease.needed[self.array[lease.needed] != lease.content]
        if len(wrong):
            self._violate(f"a room succeeded without its bytes: {self._describe(wrong)}")
        wrong = lease.owned[self.array[lease.owned] != self._expected[lease.owned]]
        if len(wrong):
            self._violate(f"a room succeeded with bytes that it did not ask for: {self._describe(wrong)}")

    @property
    def free(self) -> dict[str, int]:
        """How many rows are free, by component."""
        return {name: len(rows) for name, rows in self._free.items()}

    def _set(self, where: Int64s, value: int) -> None:
        self.array[where] = value
        self._shadow[where] = value
        self._expected[where] = value

    def _describe(self, wrong: Int64s) -> str:
        at = int(wrong[0])
        owner = self.leases.get(int(self._owner[at]))
        whose = "rows that nobody has" if owner is None else f"rows of request {owner.request}"
        return (
            f"{len(wrong)} bytes of {whose} are wrong; the first is byte {at} ({self._name_of(at)}): "
            f"{self.array[at]} where {self._expected[at]} belongs"
        )

    def _name_of(self, at: int) -> str:
        for name, places in self._places.items():
            for row in range(min(tensor.rows for tensor in places.component.tensors)):
                if at in places.whole_rows(np.array([row], np.int64)):
                    return f"component {name}, row {row}"
        return "no component"
