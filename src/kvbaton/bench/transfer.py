"""Hands the same bytes over between two processes, by kvbaton and every contender in turn, and checks all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.bench.contenders.work import Work
from kvbaton.bench.pairs import Contender
from kvbaton.bench.report import Figure, absent, at_least, at_most
from kvbaton.bench.turns import Outcome, take_turns

MOST_PIECES = 262_144
"""The vendors' cost is that of the pieces: with more of them a run takes a minute and says the same."""
SLOW_SECONDS = 20.0

MEMCPY, MEMCPY_ONE, SOCKET = "memcpy, 2 threads", "memcpy, 1 thread", "raw socket, 1 stream"
NIXL_SHM, NIXL_TCP, NIXL_TCP_LARGE = "NIXL over shared memory", "NIXL over tcp", "NIXL over tcp, 4 MiB socket buffers"
MOONCAKE_TCP = "Mooncake over tcp"

FLOORS = (
    Contender(MEMCPY_ONE, "floors", ("memcpy1",)),
    Contender(MEMCPY, "floors", ("memcpy2",)),
    Contender(SOCKET, "floors", ("socket",)),
)
# Eight UCX threads are fastest over shared memory (SGLang sets them too), none over tcp. UCX is left to choose between
# its ways within a host. With larger socket buffers than its own its tcp is faster; no engine sets them, so this stands
# beside it. Mooncake refuses more than some 2,048 blocks at once unless its limits are raised.
_UCX_TCP = {"NIXL_THREADS": "0", "UCX_TLS": "tcp,self"}
_LARGE_BUFFERS = {"UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m"}
VENDORS = {
    "nixl": (
        Contender(NIXL_SHM, "nixl", (), "nixl_cu13", {"NIXL_THREADS": "8"}),
        Contender(NIXL_TCP, "nixl", (), "nixl_cu13", _UCX_TCP),
        Contender(NIXL_TCP_LARGE, "nixl", (), "nixl_cu13", {**_UCX_TCP, **_LARGE_BUFFERS}),
    ),
    "mooncake": (
        Contender(
            MOONCAKE_TCP,
            "mooncake",
            (),
            "mooncake.engine",
            {
                "MC_FORCE_TCP": "1",
                "GLOG_minloglevel": "1",
                "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
                "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
                "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
            },
        ),
    ),
}
PEERS = {"shm": (NIXL_SHM, MEMCPY, MEMCPY_ONE), "tcp": (NIXL_TCP, NIXL_TCP_LARGE, MOONCAKE_TCP, SOCKET)}

TARGETS = {
    ("shm", 256, NIXL_SHM): 40.0,
    ("shm", 256, MEMCPY): 0.35,
    ("shm", 2048, NIXL_SHM): 5.0,
    ("shm", 2048, MEMCPY): 0.5,
    ("shm", 131072, NIXL_SHM): 2.0,
    ("shm", 131072, MEMCPY): 0.9,
    ("tcp", 2048, NIXL_TCP): 20.0,
    ("tcp", 2048, SOCKET): 0.8,
    ("tcp", 131072, NIXL_TCP): 1.2,
    ("tcp", 131072, SOCKET): 0.9,
}
PROCESSOR_TARGET = 0.2
"""Processor time of the source's process, 2 KiB pieces over shared memory, as a part of NIXL's."""


def size_words(nbytes: int) -> str:
    """A size as people say it: "2 KiB"."""
    for unit, words in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and not nbytes % unit:
            return f"{nbytes // unit} {words}"
    return f"{nbytes} B"


def run(
    transports: Sequence[str], against: Sequence[str], pieces: Sequence[int], megabytes: int, runs: int
) -> list[Figure]:
    """All figures, in GiB/s: each transport of kvbaton against its peers, then every contender by itself."""
    ours = [Contender(name, "baton", (name,)) for name in transports]
    others = [contender for name in against for contender in VENDORS[name]]
    rows: list[Figure] = []
    plain: list[Figure] = []
    for piece in pieces:
        work = Work.of(piece, min(megabytes << 20, MOST_PIECES * piece))
        outcomes = take_turns([*FLOORS, *ours, *others], work._asdict(), runs, SLOW_SECONDS)
        for name in transports:
            rows += _compare(name, work, outcomes)
        plain += [_alone(work, outcome) for outcome in outcomes.values()]
    return [*rows, *plain]


def _rate(work: Work, outcome: Outcome) -> float:
    return work.nbytes / 2**30 / outcome.seconds


def _alone(work: Work, outcome: Outcome) -> Figure:
    name = f"{outcome.contender.name}: {size_words(work.piece)} pieces, {work.nbytes / 2**20:.0f} MiB"
    if not outcome.timings:
        return absent(name, "GiB/s", "", outcome.missing)
    return Figure(name, _rate(work, outcome), "GiB/s")


def _compare(name: str, work: Work, outcomes: dict[str, Outcome]) -> list[Figure]:
    words = f"{name}, {size_words(work.piece)} pieces"
    ours = outcomes[name]
    figures = []
    for peer in (peer for peer in PEERS[name] if peer in outcomes):
        target = TARGETS.get((name, work.piece, peer))
        theirs = outcomes[peer]
        if not ours.timings:
            figures.append(absent(words, "GiB/s", "", ours.missing, target))
            continue
        if not theirs.timings:
            figures.append(absent(words, "GiB/s", peer, theirs.missing, target, _rate(work, ours)))
            continue
        figures.append(at_least(words, _rate(work, ours), "GiB/s", peer, _rate(work, theirs), target))
        if peer in (NIXL_SHM, NIXL_TCP):
            at = f"processor time of the source, {words}"
            target = PROCESSOR_TARGET if (name, work.piece) == ("shm", 2048) else None
            mine, other = ours.source_processor, theirs.source_processor
            figures.append(at_most(at, mine, "s", peer, other, target))
    return figures
