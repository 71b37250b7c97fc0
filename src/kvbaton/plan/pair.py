"""What moves between one source rank and one destination rank, ready for the rows of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvbaton.errors import RowsError
from kvbaton.layout import Kind, Ownership
from kvbaton.plan.boxes import Boxes, Int64s, Transfer
from kvbaton.plan.half import Half, Side
from kvbaton.plan.pages import Pages
from kvbaton.plan.share import TokenClasses
from kvbaton.plan.tokens import Repeated, owned_mask, to_local
from kvbaton.plan.units import check_range, check_ring, checked_pages, checked_rows, units_of_range, units_of_tokens


@dataclass(frozen=True, slots=True)
class End:
    """One component on one side.

    ``page_size`` and ``owned`` count entries. ``rows`` is the least number of registered rows of the tensors involved.
    ``ring``: the rows of a request are used in turn.
    """

    side: Side
    component: str
    page_size: int
    rows: int
    owned: Ownership
    ring: bool

    @property
    def where(self) -> str:
        """The words that begin an error."""
        return f"{self.side}: component {self.component}"


Ends = tuple[tuple[End, Pages], ...]
"""Sides of a component, each with the rows of a request."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Boxes that move for the same tokens. Everything here counts entries, each of ``ratio`` tokens.

    ``whole`` applies to units of ``unit`` entries, ``single`` to units of one entry (the same table if ``unit`` is 1).
    ``aligned``: both ranks own the same entries and all of them move, so that local positions are equal.
    """

    source: End
    destination: End
    ratio: int
    tokens: TokenClasses
    unit: int
    aligned: bool
    whole: Boxes
    single: Boxes

    def check_rings(self, first: int, last: int, source: Pages, destination: Pages) -> None:
        """Raise `RowsError` where a ring cannot hold the entries that end in ``[first, last)`` of the tokens."""
        for end, pages in ((self.source, source), (self.destination, destination)):
            if end.ring:
                start, stop = (end.owned.local_count(token // self.ratio) for token in (first, last))
                check_ring(pages, end.page_size, start, stop, end.where)

    def bind(self, first: int, last: int, source: Pages, destination: Pages) -> list[Transfer]:
        """Return the transfers for the entries that end in ``[first, last)`` of the tokens; raises `RowsError`."""
        self.check_rings(first, last, source, destination)
        first, last = first // self.ratio, last // self.ratio
        source, destination = (Pages(pages.rows, pages.start // self.ratio) for pages in (source, destination))
        if self.aligned:
            first, last = self.source.owned.local_count(first), self.source.owned.local_count(last)
        low, high = -(-first // self.unit) * self.unit, last // self.unit * self.unit
        if low >= high:
            return self._apply(self.single, 1, [(first, last)], source, destination)
        return [
            *self._apply(self.whole, self.unit, [(low, high)], source, destination),
            *self._apply(self.single, 1, [(first, low), (high, last)], source, destination),
        ]

    def moved_bytes(self, first: int, last: int) -> int:
        """Bytes that `bind` moves for the entries that end in ``[first, last)`` of the tokens."""
        first, last = first // self.ratio, last // self.ratio
        if self.aligned:
            return (self.source.owned.local_count(last) - self.source.owned.local_count(first)) * self._entry_bytes
        period = math.lcm(self.unit, *(owned.unit * owned.modulus for owned in self._owned))
        tokens = np.arange(first, min(last, first + period), dtype=np.int64)
        for owned in self._owned:
            mask = owned_mask(owned, tokens)
            if mask is not None:
                tokens = tokens[mask]
        return Repeated.until(tokens, period, first, max(first, last)).total * self._entry_bytes

    @property
    def _entry_bytes(self) -> int:
        return self.single.bytes_per_unit

    def _apply(
        self, boxes: Boxes, unit: int, ranges: list[tuple[int, int]], source: Pages, destination: Pages
    ) -> list[Transfer]:
        select = self._select_aligned if self.aligned else self._select
        found = [select(unit, first, last, source, destination) for first, last in ranges if first < last]
        found = [units for units in found if units[0].size]
        if not found:
            return []
        if len(found) == 1:
            return [Transfer(boxes, *found[0])]
        return [Transfer(boxes, *(np.concatenate(side) for side in zip(*found, strict=True)))]

    def _select_aligned(
        self, unit: int, first: int, last: int, source: Pages, destination: Pages
    ) -> tuple[Int64s, Int64s]:
        ends = ((self.source, source), (self.destination, destination))
        at, to = (units_of_range(pages, end.page_size, unit, first, last, end.rows, end.where) for end, pages in ends)
        return at, to

    def _select(self, unit: int, first: int, last: int, source: Pages, destination: Pages) -> tuple[Int64s, Int64s]:
        ends = (self.source, source), (self.destination, destination)
        moving, turn = self._moving(unit, first, last, ends)
        if not moving.total:
            return moving.first[:0], moving.first[:0]
        at, to = (self._units(unit, end, pages, moving, turn) for end, pages in ends)
        return at, to

    def _moving(self, unit: int, first: int, last: int, ends: Ends) -> tuple[Repeated, int]:
        """The entries that move, in turns; and the length of a turn, in which all ``ends`` fill whole pages."""
        period = math.lcm(self.unit, *(owned.unit * owned.modulus for owned in self._owned))
        last = min(last, self._certain_end(first, period, ends))
        # Which tokens move repeats after a period: what holds for the first one holds for all.
        tokens = np.arange(first, min(last, first + period), unit, dtype=np.int64)
        for owned in self._owned:
            mask = owned_mask(owned, tokens)
            if mask is not None:
                tokens = tokens[mask]
        # Where they lie inside pages repeats after a larger one, in which both sides fill whole pages.
        turn = math.lcm(period, *(end.page_size * end.owned.modulus for end, _ in ends))
        tokens = Repeated.until(tokens, period, first, min(last, first + turn)).spelt_out()
        return Repeated.until(tokens, turn, first, last), turn

    @staticmethod
    def _units(unit: int, end: End, pages: Pages, moving: Repeated, turn: int) -> Int64s:
        local = Repeated(to_local(end.owned, moving.first), turn // end.owned.modulus, moving.total)
        return units_of_tokens(pages, end.page_size, unit, local, end.rows, end.where, ring=end.ring)

    def half(self, side: Side, first: int, last: int, pages: Pages) -> tuple[Int64s, Int64s]:
        """The entries that `bind` moves, one by one and on one side only: the unit of each, and its number.

        The number is the same on both sides, and whatever chunk the entry belongs to. Raises `RowsError`.
        """
        end = self.source if side == "source" else self.destination
        first, last = first // self.ratio, last // self.ratio
        pages = Pages(pages.rows, pages.start // self.ratio)
        if self.aligned:
            first, last = end.owned.local_count(first), end.owned.local_count(last)
        if first >= last:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if end.ring:
            # Of an aligned stream these are local positions already.
            start, stop = (first, last) if self.aligned else (end.owned.local_count(entry) for entry in (first, last))
            check_ring(pages, end.page_size, start, stop, end.where)
        if self.aligned:
            units = units_of_range(pages, end.page_size, 1, first, last, end.rows, end.where)
            return units, np.arange(first, last, dtype=np.int64)
        moving, turn = self._moving(1, first, last, ((end, pages),))
        if not moving.total:
            return moving.first[:0], moving.first[:0]
        return self._units(1, end, pages, moving, turn), moving.spelt_out()

    @property
    def _owned(self) -> tuple[Ownership | TokenClasses, ...]:
        return self.source.owned, self.destination.owned, self.tokens

    @staticmethod
    def _certain_end(first: int, period: int, ends: Ends) -> int:
        """Return a token at which it is certain whether the rows of all ``ends`` cover what moves.

        It lies a period behind the first token that a side cannot hold: if anything more moved, something in that
        period would. Without it a range of absurd length would be spelt out before it is refused.
        """
        known = []
        for end, pages in ends:
            begin = end.owned.local_count(first) if end.ring else pages.start
            known.append(end.owned.global_token(begin + len(pages.rows) * end.page_size))
        return (max(min(known), first) // period + 2) * period


class PairPlan:
    """What one source rank sends to one destination rank: made once by `compile_pair`, bound for each request.

    Immutable, and safe to use from several threads.
    """

    def __init__(self, streams: Mapping[str, tuple[Stream, ...]], kinds: Mapping[str, Kind]) -> None:
        """``streams`` by component, those that move something; ``kinds`` of all components of both sides."""
        self._streams = dict(streams)
        self._kinds = dict(kinds)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components in which this pair moves something, in the order of the destination's layout."""
        return tuple(self._streams)

    def bind(self, component: str, tokens: tuple[int, int], source: Pages, destination: Pages) -> list[Transfer]:
        """Return the transfers that copy the tokens from ``tokens[0]`` to ``tokens[1]`` of a component with tokens.

        Exactly those tokens move that this pair's share holds and both ranks own; no byte of another token is touched.
        Of compressed entries those move whose last token lies in the range. The rows of a ring are all that the request
        has, and begin at 0. Gives an empty list where nothing moves. Raises `RowsError` where the rows of a side do not
        cover the tokens that move, where a row is not registered, and for a component that neither side has or that has
        no tokens.
        """
        streams = self._known(component, has_tokens=True)
        first, last = int(tokens[0]), int(tokens[1])
        if not 0 <= first <= last < 1 << 50:
            raise RowsError(f"component {component}: tokens {first}..{last} are no range of tokens")
        transfers: list[Transfer] = []
        for position, stream in enumerate(streams):
            if position == 0:
                source, destination = (
                    checked_pages(pages, end.page_size * stream.ratio, end.where, ring=end.ring)
                    for pages, end in ((source, stream.source), (destination, stream.destination))
                )
            transfers.extend(stream.bind(first, last, source, destination))
        return transfers

    def check_rings(self, component: str, tokens: int, prefix: int, source: Pages, destination: Pages) -> None:
        """Raise `RowsError` where the rows of a ring cannot hold all that a request needs at once.

        The request has ``tokens`` tokens, of which the receiver has ``prefix``. `bind` sees one chunk of them only.
        """
        kind = self._kinds.get(component)
        needed = (0, 0) if kind is None else kind.needed(tokens, prefix)
        for stream in self._streams.get(component, ()):
            stream.check_rings(*needed, source, destination)

    def bind_slots(self, component: str, source_rows: object, destination_rows: object) -> list[Transfer]:
        """Return the transfers that copy ``source_rows[i]`` to ``destination_rows[i]`` of a component without tokens.

        Raises `RowsError` where the counts differ, where a row is not registered, and for a component that neither side
        has or that has tokens.
        """
        streams = self._known(component, has_tokens=False)
        at = checked_rows(source_rows, f"source: component {component}")
        to = checked_rows(destination_rows, f"destination: component {component}")
        if len(at) != len(to):
            raise RowsError(
                f"component {component}: {len(at)} rows at the source and {len(to)} at the destination; pass as many "
                f"on both sides, they are matched by position"
            )
        if not len(at):
            return []
        for stream in streams:
            check_range(at, stream.source.rows, stream.source.where)
            check_range(to, stream.destination.rows, stream.destination.where)
        return [Transfer(stream.whole, at, to) for stream in streams]

    def halves(self, component: str, side: Side, tokens: tuple[int, int], pages: Pages) -> list[Half]:
        """What `bind` moves for these tokens, seen from one side, entry by entry.

        Both sides give the same pieces with the same numbers, and the pieces of two ranges that follow each other are
        those of both together. Raises `RowsError` as `bind` does.
        """
        halves: list[Half] = []
        for number, stream in enumerate(self._known(component, has_tokens=True)):
            end = stream.source if side == "source" else stream.destination
            checked = checked_pages(pages, end.page_size * stream.ratio, end.where, ring=end.ring)
            halves.append(Half(stream.single, side, number, *stream.half(side, *tokens, checked)))
        return halves

    def slot_halves(self, component: str, side: Side, rows: object) -> list[Half]:
        """What `bind_slots` moves for ``rows``, seen from one side. Raises `RowsError` as `bind_slots` does."""
        found = checked_rows(rows, f"{side}: component {component}")
        halves: list[Half] = []
        for number, stream in enumerate(self._known(component, has_tokens=False)):
            end = stream.source if side == "source" else stream.destination
            check_range(found, end.rows, end.where)
            halves.append(Half(stream.whole, side, number, found, np.arange(len(found), dtype=np.int64)))
        return halves

    def bytes_per_row(self, component: str) -> int:
        """Return the bytes that one row of a component without tokens moves, in all streams together."""
        return sum(stream.whole.bytes_per_unit for stream in self._known(component, has_tokens=False))

    def check_rows(self, component: str, side: Side, rows: object) -> None:
        """Raise `RowsError` where one of ``rows`` is not registered in all the tensors that this pair moves."""
        checked = checked_rows(rows, f"{side}: component {component}")
        for stream in self._known(component):
            end = stream.source if side == "source" else stream.destination
            check_range(checked, end.rows, end.where)

    def moved_bytes(self, component: str, tokens: int, prefix: int, rows: int) -> int:
        """Return the bytes that a component moves for a request of ``tokens`` tokens, whose first ``prefix`` are there.

        ``rows`` is how many rows it offers of a component without tokens. Raises `RowsError` for a component that
        neither side has.
        """
        streams = self._known(component)
        kind = self._kinds[component]
        if not kind.has_tokens:
            return rows * sum(stream.whole.bytes_per_unit for stream in streams)
        first, last = kind.needed(tokens, prefix)
        return sum(stream.moved_bytes(first, last) for stream in streams)

    def bytes_per_token(self, component: str) -> int:
        """Return the bytes that one entry of a component with tokens moves, in all streams together."""
        return sum(stream.single.bytes_per_unit for stream in self._known(component, has_tokens=True))

    def _known(self, component: str, *, has_tokens: bool | None = None) -> tuple[Stream, ...]:
        kind = self._kinds.get(component)
        if kind is None:
            raise RowsError(
                f"component {component} is not registered; registered are {', '.join(self._kinds) or 'none'}"
            )
        if has_tokens is not None and has_tokens != kind.has_tokens:
            other = "bind" if kind.has_tokens else "bind_slots"
            raise RowsError(f"component {component} is of kind {kind}: use {other}")
        return self._streams.get(component, ())
