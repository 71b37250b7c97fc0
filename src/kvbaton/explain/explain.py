"""Runs the planner on two sides as a handshake and a request would, and notes what it says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbaton.errors import ConfigurationError, HandshakeError, LayoutMismatch
from kvbaton.explain import ranks, result
from kvbaton.explain.casts import Casts
from kvbaton.explain.request import Request
from kvbaton.explain.runs import RunLengths, merge_runs, run_lengths
from kvbaton.explain.transports import available, capabilities_of, executor_of
from kvbaton.layout import Component, RankLayout
from kvbaton.plan import Pages, PairPlan, Part, Share, Transfer, assign, compile_pair
from kvbaton.protocol.handshake import common_transports
from kvbaton.topology import Topology, lay_out
from kvbaton.transport import Capabilities
from kvbaton.transport.executor import ExecutorOption

MAX_PAIRS = 1 << 14
"""Pairs of ranks that can be explained."""
MAX_TENSORS = 1 << 22
"""Tensors of all destinations together, counted once for each source."""


class Ranks(NamedTuple):
    """One side: the layouts of its ranks, and what is said about it. ``transports`` are in order of preference."""

    layouts: Sequence[RankLayout]
    transports: Sequence[str] = ("shm", "tcp")
    title: str = ""
    model: str = ""
    replicas: int = 1


@dataclass
class _Clock:
    assign: float = 0.0
    compile: float = 0.0
    bind: float = 0.0


@dataclass
class _Found:
    pairs: list[result.Pair] = field(default_factory=list)
    refusals: list[result.Refusal] = field(default_factory=list)
    runs: dict[str, list[RunLengths]] = field(default_factory=dict)
    casts: dict[str, Casts] = field(default_factory=dict)
    clock: _Clock = field(default_factory=_Clock)


class _Rules(NamedTuple):
    striped: bool
    cast: bool


class _Way(NamedTuple):
    """The transport that both sides have, and what the user says of executors; None: there is no such transport."""

    capabilities: Capabilities | None
    wanted: ExecutorOption


def explain(source: Topology, destination: Topology, request: Request, *, timed: bool = False) -> result.Explanation:
    """Explain what ``source`` hands to ``destination``, which says whether it is striped and casts, for one request.

    Raises `ShardError` or `LayoutError` where a side cannot be laid out, and `ConfigurationError` for an unknown
    transport. A pair that does not fit is no error: it is among the refusals.
    """
    sides = [side_of(topology, request) for topology in (source, destination)]
    return explain_ranks(sides[0], sides[1], request, striped=destination.striped, cast=destination.cast, timed=timed)


def side_of(topology: Topology, request: Request) -> Ranks:
    """The ranks of ``topology`` with pools for ``request``; raises as `explain` does."""
    layouts = lay_out(topology, request.tokens)
    return Ranks(layouts, topology.transports, topology.title, topology.model.title, topology.dp)


def explain_ranks(
    source: Ranks,
    destination: Ranks,
    request: Request,
    *,
    striped: bool = False,
    cast: bool = False,
    timed: bool = False,
    executor: ExecutorOption = "auto",
) -> result.Explanation:
    """As `explain`, for layouts that were made in another way; all must have passed `check_layout`.

    ``executor`` is the option of that name of one-sided transports. Raises `ConfigurationError` for more of them than
    can be explained, and for an unknown transport.
    """
    for name in (*source.transports, *destination.transports):
        capabilities_of(name)
    check_pairs(len(source.layouts), len(destination.layouts))
    tensors = sum(len(component.tensors) for layout in destination.layouts for component in layout.components)
    if len(source.layouts) * tensors > MAX_TENSORS:
        raise ConfigurationError(
            f"{len(source.layouts)} sources times {tensors} tensors of the destinations are more than "
            f"the {MAX_TENSORS} that can be explained; choose fewer ranks or layers"
        )
    found = _Found()
    transport = ""
    try:
        transport = common_transports(source.transports, destination.transports)[0]
    except HandshakeError as error:
        for number in range(len(destination.layouts)):
            found.refusals.append(result.Refusal(None, number, type(error).__name__, str(error)))
    rules = _Rules(striped, cast)
    way = _Way(capabilities_of(transport) if transport else None, executor)
    for number in range(len(destination.layouts)):
        _destination(source.layouts, destination.layouts[number], number, request, rules, way, found)
    sent, received = ranks.by_rank(found.pairs, source.layouts, destination.layouts)
    return result.Explanation(
        schema=result.SCHEMA_VERSION,
        tokens=request.tokens,
        prefix=request.prefix,
        pages="contiguous" if request.contiguous else "shuffled",
        striped=striped,
        nbytes=sum(pair.nbytes for pair in found.pairs),
        pieces=sum(pair.pieces for pair in found.pairs),
        source=ranks.side(source.title, source.model, source.replicas, sent),
        destination=ranks.side(destination.title, destination.model, destination.replicas, received),
        transport=result.Transport(
            transport, available(transport), tuple(source.transports), tuple(destination.transports)
        ),
        components=tuple(
            ranks.component(name, source.layouts, destination.layouts, merge_runs(runs), found.casts[name].told())
            for name, runs in found.runs.items()
        ),
        pairs=tuple(sorted(found.pairs, key=lambda pair: (pair.source, pair.destination))),
        refusals=tuple(found.refusals),
        planner=_times(found.clock) if timed else None,
        cast=cast,
    )


def check_pairs(sources: int, destinations: int) -> None:
    """Raise `ConfigurationError` for more pairs of ranks than can be explained."""
    if sources * destinations > MAX_PAIRS:
        raise ConfigurationError(
            f"{sources} sources and {destinations} destinations are {sources * destinations} pairs of ranks, at most "
            f"{MAX_PAIRS} can be explained; choose smaller sizes in the same proportion"
        )


def _destination(
    sources: Sequence[RankLayout],
    destination: RankLayout,
    number: int,
    request: Request,
    rules: _Rules,
    way: _Way,
    found: _Found,
) -> None:
    began = time.perf_counter()
    try:
        shares = assign(sources, destination, destination_index=number, **rules._asdict())
    except LayoutMismatch as error:
        found.refusals.extend(_refusals(sources, destination, number, error, cast=rules.cast))
        return
    finally:
        found.clock.assign += time.perf_counter() - began
    for index, (source, share) in enumerate(zip(sources, shares, strict=True)):
        if share.empty:
            continue
        began = time.perf_counter()
        try:
            plan = compile_pair(source, destination, share, cast=rules.cast)
        except LayoutMismatch as error:
            found.refusals.append(result.Refusal(index, number, type(error).__name__, str(error)))
            continue
        finally:
            found.clock.compile += time.perf_counter() - began
        flows = {}
        moved: list[Transfer] = []
        for name in plan.components:
            flows[name], transfers = _flow(plan, share, name, source, destination, request, found)
            # Aux data travel in the message that ends a transfer, not through the transport.
            if not destination.component(name).kind.aux:
                moved += transfers
        found.pairs.append(_pair(index, number, tuple(flows.values()), *executor_of(moved, *way)))


def _refusals(
    sources: Sequence[RankLayout], destination: RankLayout, number: int, error: LayoutMismatch, *, cast: bool
) -> list[result.Refusal]:
    """The pairs that do not fit; where each fits by itself, the sources together lack something."""
    found = []
    for index, source in enumerate(sources):
        try:
            compile_pair(source, destination, cast=cast)
        except LayoutMismatch as mismatch:
            found.append(result.Refusal(index, number, type(mismatch).__name__, str(mismatch)))
    return found or [result.Refusal(None, number, type(error).__name__, str(error))]


def _flow(
    plan: PairPlan,
    share: Share,
    name: str,
    source: RankLayout,
    destination: RankLayout,
    request: Request,
    found: _Found,
) -> tuple[result.Flow, list[Transfer]]:
    first, last = request.needed(destination.component(name))
    rows = [
        request.pages(layout, layout.component(name), side)
        for side, layout in (("source", source), ("destination", destination))
    ]
    began = time.perf_counter()
    transfers = bind(plan, name, destination, (first, last), rows[0], rows[1])
    found.clock.bind += time.perf_counter() - began
    runs = run_lengths(transfers)
    found.runs.setdefault(name, []).append(runs)
    found.casts.setdefault(name, Casts()).add(share, source.component(name), destination.component(name))
    flow = result.Flow(
        component=name,
        nbytes=sum(transfer.nbytes for transfer in transfers),
        units=sum(len(transfer.source_units) for transfer in transfers),
        first=first,
        last=last,
        runs=ranks.runs(runs),
        parts=_parts(share, destination.component(name)),
    )
    return flow, transfers


def bind(
    plan: PairPlan,
    name: str,
    destination: RankLayout,
    tokens: tuple[int, int],
    source_rows: Pages,
    destination_rows: Pages,
) -> list[Transfer]:
    """The transfers of one component for one request, whatever its kind."""
    if destination.component(name).kind.has_tokens:
        return plan.bind(name, tokens, source_rows, destination_rows)
    return plan.bind_slots(name, source_rows.rows, destination_rows.rows)


def _parts(share: Share, component: Component) -> tuple[result.PartInfo, ...]:
    """The parts of one component: one for roles that are held alike, and for layers that are."""
    sizes = {tensor.role: {axis.name: axis.size for axis in tensor.axes} for tensor in component.tensors}
    layers: dict[Part, list[int]] = {}
    for part in share.parts:
        if part.component == component.name:
            layers.setdefault(part._replace(layers=()), []).extend(part.layers)
    roles: dict[tuple[Part, tuple[tuple[str, int], ...]], list[str]] = {}
    for part, listed in layers.items():
        own = tuple((axis, sizes[part.role][axis]) for axis, _ in part.block)
        roles.setdefault((part._replace(role="", layers=tuple(sorted(listed))), own), []).append(part.role)
    return tuple(
        result.PartInfo(tuple(named), part.layers, dict(part.block), dict(own), *part.tokens)
        for (part, own), named in roles.items()
    )


def _pair(source: int, destination: int, flows: tuple[result.Flow, ...], executor: str, why: str) -> result.Pair:
    nbytes, pieces = sum(flow.nbytes for flow in flows), sum(flow.runs.pieces for flow in flows)
    return result.Pair(source, destination, nbytes, pieces, executor, why, flows)


def _times(clock: _Clock) -> result.PlannerTime:
    return result.PlannerTime(*(round(1e3 * seconds, 3) for seconds in (clock.assign, clock.compile, clock.bind)))
