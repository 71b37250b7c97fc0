"""From SGLang's page lists and state payloads to rows of the registered components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.engines.sglang.layout.states import TAIL_ENTRY_BYTES
from kvbaton.errors import RowsError
from kvbaton.layout import Component, RankLayout
from kvbaton.memory import Region
from kvbaton.plan import Pages

Int64s = npt.NDArray[np.int64]

TAIL_FIELDS = 6
"""Row, start and count of a first run, start and count of a second one, entries of a ring."""


class StateRows(NamedTuple):
    """Rows of the states of one request: of components with tokens, with those tokens, and of the others."""

    paged: dict[str, tuple[Pages, tuple[int, int]]]
    slots: dict[str, Int64s]


class Described:
    """The layout of one SGLang rank, the regions to register, and the rows that its indices stand for.

    ``layout`` and ``regions`` are arguments of `Manager`. Immutable, and safe to use from several threads.
    """

    def __init__(
        self,
        layout: RankLayout,
        regions: Sequence[Region],
        page_size: int,
        paged: Sequence[str],
        states: Sequence[str],
        tails: dict[str, int],
        *,
        opaque: bool,
    ) -> None:
        """``paged``: components that the main page list addresses; ``states``: those of ``state_types``, in order.

        ``tails``: the bytes of a request's ring, for states whose rows are entries of rings. ``opaque``: pages of the
        main cache move as a whole only.
        """
        self.layout = layout
        self.regions = list(regions)
        self.page_size = page_size
        self._paged = [layout.component(name) for name in paged]
        self._states = tuple(states)
        self._tails = tails
        self._opaque = opaque

    def tokens(self, count: int) -> int:
        """What to call the number of tokens of a request of ``count`` tokens, in `finish` and in `offer`.

        It is rounded up to whole pages where pages move as a whole, as SGLang moves them.
        """
        return -(-count // self.page_size) * self.page_size if self._opaque else count

    def kv_rows(self, pages: Any, start: int, *, device_pages: Any = None) -> dict[str, Pages]:
        """Rows of the main cache and of the draft's: ``pages`` are SGLang's page indices, the first holds ``start``.

        ``device_pages`` are those of the draft where the main cache lies in host pages. Raises `RowsError`.
        """
        found: dict[str, Pages] = {}
        for component in self._paged:
            draft = component.name == "draft"
            if device_pages is not None and self._opaque:
                raise RowsError(f"component {component.name}: pages in host and in device memory cannot be told apart")
            indices = device_pages if draft and device_pages is not None else pages
            rows = _flat(indices, component.name)
            found[component.name] = Pages(rows, self._local_start(component, start))
        return found

    def _local_start(self, component: Component, start: int) -> int:
        owned, size = self.layout.owned_of(component), component.page_size
        return owned.local_count(start) // size * size

    def state_rows(self, state_indices: Sequence[Any] | None, tokens: int, prefix: int) -> StateRows:
        """Rows of the states: ``state_indices`` are SGLang's payloads, one for each of ``state_types``.

        ``tokens`` are those of the request, and ``prefix`` those that the decode side has. Raises `RowsError` where
        there are more or fewer payloads than states, or where one cannot be read.
        """
        payloads = list(state_indices or ())
        if len(payloads) != len(self._states):
            raise RowsError(
                f"{len(payloads)} state payloads are given for {len(self._states)} registered states "
                f"({', '.join(self._states) or 'none'}); pass one for each"
            )
        slots: dict[str, Int64s] = {}
        for name, payload in zip(self._states, payloads, strict=True):
            rows = _flat([] if payload is None else payload, name)
            slots[name] = self._tail_rows(name, rows) if name in self._tails else rows
        return StateRows({}, slots)

    def _tail_rows(self, name: str, payload: Int64s) -> Int64s:
        """Entries of a ring, in the order of their tokens."""
        if not payload.size:
            return payload
        if len(payload) != TAIL_FIELDS:
            raise RowsError(
                f"component {name}: a payload has {len(payload)} numbers; SGLang's tails have {TAIL_FIELDS}"
            )
        row, first, first_count, second, second_count, ring = payload.tolist()
        registered = self._tails[name] // TAIL_ENTRY_BYTES
        if ring != registered:
            raise RowsError(
                f"component {name}: its ring has {ring} entries by the payload, {registered} are registered"
            )
        runs = ((first, first_count), (second, second_count))
        if row < 0 or any(begin < 0 or count < 0 or begin + count > ring for begin, count in runs):
            raise RowsError(f"component {name}: {payload.tolist()} leaves the ring of {ring} entries of a row")
        entries = [np.arange(begin, begin + count, dtype=np.int64) for begin, count in runs]
        return np.asarray(row * ring + np.concatenate(entries), np.int64)


def _flat(indices: Any, component: str) -> Int64s:
    """Indices as SGLang gives them (an array, a list of numbers, a list of one array) as a flat array."""
    try:
        array = np.asarray(indices)
    except ValueError as error:
        raise RowsError(f"component {component}: indices are no flat list of integers ({error})") from None
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise RowsError(f"component {component}: indices are of type {array.dtype}, not integers")
    return array.reshape(-1).astype(np.int64)
