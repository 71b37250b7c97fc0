"""Checks a pair of grids: moves one request through the planner, and compares every byte with the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np

from kvbaton.check.content import Int64s
from kvbaton.check.digests import DigestCheck
from kvbaton.check.execute import BrokenTransfer, execute
from kvbaton.check.explain import Problem, compare
from kvbaton.check.oracle import (
    Memory,
    RequestRows,
    Senders,
    expect,
    held_entries,
    needed_entries,
    region_sizes,
    write_content,
)
from kvbaton.check.requests import choose_rows, rows_of_chunk
from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.layout import Component, RankLayout, check_layout
from kvbaton.plan import Pages, PairPlan, Share, Transfer, assign, compile_pair

MAX_RANK_BYTES = 1 << 30
"""Most bytes of memory that a checked rank may have."""


@dataclass
class Report:
    """What a check found: nothing, if ``ok``.

    ``pairs`` are the pairs of ranks between which something moved; ``pieces`` and ``nbytes`` what moved in all.
    """

    problems: list[Problem] = field(default_factory=list)
    destinations: int = 0
    pairs: int = 0
    pieces: int = 0
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether every element arrived and no other byte changed."""
        return not self.problems

    def text(self) -> str:
        """The problems, one a line."""
        return "\n".join(f"{problem.where}: {problem.what}" for problem in self.problems) or "no problem"

    def raise_if_failed(self) -> None:
        """Raise ``AssertionError`` with `text` where there are problems."""
        if self.problems:
            raise AssertionError(self.text())


class Request(NamedTuple):
    """One request: its ``tokens``, of which the destination has ``prefix``, in chunks that end at ``cuts``.

    ``seed`` chooses rows, canaries and the order of chunks; 0 is the plainest choice.
    """

    tokens: int
    prefix: int = 0
    cuts: tuple[int, ...] = ()
    seed: int = 0


class Rules(NamedTuple):
    """What the decode side allows: that replicas share the work, and that elements change on their way."""

    striped: bool = False
    cast: bool = False


def check_pair(
    sources: Sequence[RankLayout],
    destinations: Sequence[RankLayout],
    *,
    tokens: int,
    prefix: int = 0,
    seed: int = 0,
    striped: bool = True,
    cast: bool = False,
    cuts: Sequence[int] | None = None,
    most_destinations: int | None = None,
    device: str = "",
) -> Report:
    """Hand one request of ``tokens`` tokens over from ``sources`` to each of ``destinations``, and check every byte.

    All ranks of both grids are needed, each with the layout that it would register; their memory is made here, so let
    the layouts have few rows. ``prefix`` tokens are at the destination already. ``seed`` chooses which rows the request
    has, how it is cut into chunks (which end at ``cuts`` if they are given) and in which order they arrive; 0 is the
    plainest choice. With ``striped`` replicas share the work, as they do by default; with ``cast`` dtypes, factors and
    scales may differ. With ``most_destinations`` only so many are checked. On the ``device`` "cuda" the GPU's
    kernels move the bytes.

    What is wrong is in the report, whether a layout was refused, a byte is missing or one was changed that should not
    have been. Raises `ConfigurationError` for a request that makes no sense, and for ranks of more than 1 GiB.
    """
    _check_grid("sources", sources)
    _check_grid("destinations", destinations)
    if not 0 <= prefix <= tokens:
        raise ConfigurationError(f"prefix is {prefix}, it must be from 0 to the {tokens} tokens of the request")
    chance = Random(seed) if seed else None
    if cuts is None:
        cuts = () if chance is None else sorted(chance.randrange(tokens + 1) for _ in range(chance.randrange(3)))
    report = Report()
    try:
        for layout in (*sources, *destinations):
            _check_registered(layout)
        pair = _Check(tuple(sources), Request(tokens, prefix, tuple(cuts), seed), Rules(striped, cast), report, chance)
        pair.device = device
        numbers = list(range(len(destinations)))
        if most_destinations is not None and len(numbers) > most_destinations:
            numbers = sorted((chance or Random(0)).sample(numbers, most_destinations))
        for number in numbers:
            pair.destination(number, destinations[number])
    except (KVBatonError, BrokenTransfer) as error:
        if isinstance(error, ConfigurationError):
            raise
        report.problems.append(Problem("planner", f"{type(error).__name__}: {error}"))
    return report


def _check_grid(side: str, layouts: object) -> None:
    """Raise `ConfigurationError` for what is no list of layouts."""
    if isinstance(layouts, RankLayout):
        raise ConfigurationError(
            f"{side} is one RankLayout; pass a list with those of all ranks, [layout] if it is alone"
        )
    for number, layout in enumerate(layouts if isinstance(layouts, Sequence) else [layouts]):
        if not isinstance(layout, RankLayout):
            raise ConfigurationError(f"{side}[{number}] is of type {type(layout).__name__}, not a RankLayout")


def _check_registered(layout: RankLayout) -> None:
    sizes = region_sizes(layout)
    if sum(sizes) > MAX_RANK_BYTES:
        raise ConfigurationError(
            f"rank {layout.coords} has {sum(sizes)} bytes of memory, more than {MAX_RANK_BYTES}; check layouts with "
            "fewer rows"
        )
    check_layout(layout, sizes)


class _Check:
    """Sources with their memory, filled when something of it is sent."""

    def __init__(
        self,
        sources: tuple[RankLayout, ...],
        request: Request,
        rules: Rules,
        report: Report,
        chance: Random | None,
    ) -> None:
        self._sources = sources
        self._request = request
        self._rules = rules
        self._report = report
        self._chance = chance
        self._slots = 1 if chance is None else chance.randrange(1, 3)
        self._filled: dict[int, tuple[Memory, dict[str, RequestRows]]] = {}
        self._senders = Senders(sources)
        self.device = ""

    def destination(self, index: int, layout: RankLayout) -> None:
        """Move the request to destination ``index`` and compare its memory with what it must be."""
        tokens, prefix, _, seed = self._request
        memory = Memory(layout, seed * 1009 + 500 + index)
        rows = choose_rows(layout, tokens, prefix, self._chance, slots=self._slots)
        expected = expect(memory, rows, tokens, prefix, self._senders)
        before = memory.bytes.copy()
        writes = np.zeros(len(memory.bytes), np.int64)
        shares = assign(self._sources, layout, destination_index=index, **self._rules._asdict())
        if len(shares) != len(self._sources):
            raise BrokenTransfer(f"{len(shares)} shares for {len(self._sources)} sources")
        self._digests = DigestCheck(memory, tokens, prefix)
        work: list[tuple[Memory, Transfer]] = []
        for number, share in enumerate(shares):
            if not share.empty:
                work.extend(self._transfers(number, layout, share, rows))
                self._report.pairs += 1
        if self._chance is not None and self._chance.random() < 0.5:
            self._chance.shuffle(work)
        written: list[int] = []
        for source, transfer in work:
            moved = execute(transfer, source, memory, writes, self.device)
            written += moved.destination[(seed * 7919) % len(moved.destination) :][:1].tolist()
            self._report.pieces += transfer.pieces
            self._report.nbytes += transfer.nbytes
        self._report.destinations += 1
        self._report.problems += compare(memory, before, expected, writes, rows, tokens, index)
        where = f"destination {index} ({layout.coords})"
        # Whether each byte counts is asked of every fourth example: it takes twice as long as all the rest of digests.
        chosen = written[seed % max(1, len(written)) :][:1] if seed % 4 == 0 else []
        self._report.problems += self._digests.problems(chosen, where)

    def _transfers(
        self, number: int, destination: RankLayout, share: Share, rows: dict[str, RequestRows]
    ) -> list[tuple[Memory, Transfer]]:
        layout = self._sources[number]
        # The only source may leave out its share: then it sends all that both hold.
        alone = len(self._sources) == 1 and self._chance is not None and self._chance.random() < 0.5
        plan = compile_pair(layout, destination, None if alone else share, cast=self._rules.cast)
        memory, held = self._source(number)
        made: list[Transfer] = []
        for component in destination.components:
            name = component.name
            if name not in held:
                continue
            if component.kind.has_tokens:
                bound = self._bind(number, plan, (layout, destination), component, held[name], rows[name])
            else:
                bound = plan.bind_slots(name, held[name].rows, rows[name].rows)
                self._digests.rows(number, plan, name, memory, held[name].rows, rows[name].rows)
            self._compare_bytes(plan, name, bound, len(rows[name].rows))
            made += bound
        return [(memory, transfer) for transfer in made]

    def _compare_bytes(self, plan: PairPlan, name: str, bound: list[Transfer], rows: int) -> None:
        """What a plan says beforehand of the bytes of a request is what moves."""
        said = plan.moved_bytes(name, self._request.tokens, self._request.prefix, rows)
        moved = sum(transfer.nbytes for transfer in bound)
        if said != moved:
            self._report.problems.append(Problem(f"component {name}", f"{moved} bytes move, the plan said {said}"))

    def _bind(
        self,
        number: int,
        plan: PairPlan,
        layouts: tuple[RankLayout, RankLayout],
        component: Component,
        source: RequestRows,
        destination: RequestRows,
    ) -> list[Transfer]:
        tokens, prefix, cuts, _ = self._request
        own_pages = self._chance is not None and self._chance.random() < 0.5
        first = _first_token(component, tokens, prefix)
        made: list[Transfer] = []
        for chunk in itertools.pairwise((0, *sorted(cuts), tokens)):
            begin, end = max(chunk[0], first), max(chunk[1], first)
            given = source
            if own_pages:
                given = rows_of_chunk(layouts[0], layouts[0].component(component.name), source, tokens, (begin, end))
            made += plan.bind(component.name, (begin, end), _pages(given), _pages(destination))
            memory, _ = self._source(number)
            self._digests.tokens(number, plan, component.name, memory, (begin, end), _pages(given), _pages(destination))
        return made

    def _source(self, number: int) -> tuple[Memory, dict[str, RequestRows]]:
        """The memory of a source as it is when it has computed the whole request."""
        if number not in self._filled:
            tokens, prefix, _, seed = self._request
            layout = self._sources[number]
            memory = Memory(layout, seed * 1009 + number)
            rows = choose_rows(layout, tokens, prefix, self._chance, slots=self._slots)
            for component in layout.components:
                request = rows[component.name]
                entries = held_entries(layout, component, request, tokens)
                write_content(memory, component, request, entries, tokens, self._senders)
            self._filled[number] = memory, rows
        return self._filled[number]


def _first_token(component: Component, tokens: int, prefix: int) -> int:
    """The first token of the first entry that the destination needs; all before it is not offered."""
    needed = needed_entries(component.kind, tokens, prefix)
    if not needed.size:
        return tokens
    first: int = int(needed[0]) * component.kind.ratio
    return first


def _pages(request: RequestRows) -> Pages:
    rows: Int64s = request.rows
    return Pages(rows, request.start)
