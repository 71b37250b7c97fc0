"""Packed writes against direct ones over the same library, in one run, every byte checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.bench.contenders.work import Work
from kvbaton.bench.pairs import Contender
from kvbaton.bench.report import Figure, absent, at_least
from kvbaton.bench.transfer import MOST_PIECES, SLOW_SECONDS, size_words
from kvbaton.bench.turns import Outcome, take_turns


@dataclass(frozen=True)
class Way:
    """One library over one protocol: how to start it, and how often faster packed writes must be."""

    transport: str
    needs: str
    target: float
    environment: Mapping[str, str] = field(default_factory=dict)
    direct_options: tuple[str, ...] = ()
    """Options that make its direct writes faster: they are measured beside it."""


# UCX needs tcp beside shared memory, to notice that a peer died; the bytes go through shared memory.
WAYS = {
    "nixl over shm": Way("nixl", "nixl_cu13", 3.0, {"UCX_TLS": "tcp,posix,sysv,cma"}, ("num_threads=8",)),
    "nixl over tcp": Way("nixl", "nixl_cu13", 20.0, {"UCX_TLS": "tcp"}),
    "mooncake over tcp": Way("mooncake", "mooncake.engine", 20.0, {"MC_FORCE_TCP": "1", "GLOG_minloglevel": "1"}),
}


def run(ways: Sequence[str], pieces: Sequence[int], megabytes: int, runs: int) -> list[Figure]:
    """All figures, in GiB/s: for each way and size of pieces packed against direct, then what is chosen by itself."""
    figures = []
    for piece in pieces:
        work = Work.of(piece, min(megabytes << 20, MOST_PIECES * piece))
        for way in ways:
            figures += _figures(way, work, take_turns(_contenders(way), work._asdict(), runs, SLOW_SECONDS))
    return figures


def _contenders(name: str) -> list[Contender]:
    way = WAYS[name]
    variants: dict[str, tuple[str, ...]] = {executor: (f"executor={executor}",) for executor in _EXECUTORS}
    if way.direct_options:
        variants[f"direct, {', '.join(way.direct_options)}"] = ("executor=direct", *way.direct_options)
    return [
        Contender(f"{name}, {variant}", "fabric", (way.transport, *options), way.needs, way.environment, own=True)
        for variant, options in variants.items()
    ]


_EXECUTORS = ("packed", "auto", "direct")


def _figures(name: str, work: Work, outcomes: dict[str, Outcome]) -> list[Figure]:
    words = f"{size_words(work.piece)} pieces, {work.nbytes / 2**20:.0f} MiB"
    rates = {key: work.nbytes / 2**30 / outcome.seconds for key, outcome in outcomes.items() if outcome.timings}
    figures = []
    for key, outcome in outcomes.items():
        if key not in rates:
            figures.append(absent(f"{key}, {words}", "GiB/s", "", outcome.missing))
        elif not key.startswith(f"{name}, direct"):
            target = WAYS[name].target if key == f"{name}, packed" else None
            figures += [
                at_least(f"{key}, {words}", rates[key], "GiB/s", peer, rates[peer], target)
                for peer in rates
                if peer.startswith(f"{name}, direct")
            ]
        else:
            figures.append(Figure(f"{key}, {words}", rates[key], "GiB/s"))
    return figures
