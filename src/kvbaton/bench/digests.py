"""What digests cost: the kernel alone beside memcpy, and whole hand-overs with and without them, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvbaton.bench.contenders.work import TENSORS, Work
from kvbaton.bench.kernel import MOST_PIECES, Bench, in_turn
from kvbaton.bench.pairs import Contender
from kvbaton.bench.report import Figure, absent, at_least, at_most
from kvbaton.bench.transfer import SLOW_SECONDS, size_words
from kvbaton.bench.turns import Outcome, take_turns

KERNEL_TARGET_GIB = 5.0
"""Of one core, pieces of 2 KiB."""
SMALL_PIECE = 256
"""64 tensors with one such piece each: a hand-over of 16 KiB."""


def run(transports: Sequence[str], pieces: Sequence[int], megabytes: int, runs: int) -> list[Figure]:
    """All figures: GiB/s of the kernel and of hand-overs, and microseconds of a small one."""
    works = [Work.of(piece, min(megabytes << 20, MOST_PIECES * piece)) for piece in pieces]
    figures = [figure for work in works for figure in _kernel(work, runs)]
    figures += [_hand_over(name, work, runs) for name in transports for work in works]
    return [*figures, *(_small(name, runs) for name in transports)]


def _kernel(work: Work, runs: int) -> list[Figure]:
    bench = Bench(work)
    threads = (1, 2)
    contenders = {("digest", count): partial(bench.digest, count) for count in threads}
    contenders |= {("memcpy", count): partial(bench.memcpy, count) for count in threads}
    seconds = in_turn(contenders, runs)
    bench.check()
    rates = {name: work.nbytes / 2**30 / taken for name, taken in seconds.items()}
    figures = []
    for count in threads:
        words = f"{count} thread{'s' if count > 1 else ''}"
        name = f"digest, {size_words(work.piece)} pieces, {words}"
        figures.append(
            at_least(name, rates["digest", count], "GiB/s", f"memcpy, {words}", rates["memcpy", count], None)
        )
    if work.piece == 2048:
        rate = rates["digest", 1]
        name = "digest of 2 KiB pieces by one core"
        figures.append(
            Figure(name, rate, "GiB/s", target=KERNEL_TARGET_GIB, met=rate >= KERNEL_TARGET_GIB, target_unit="GiB/s")
        )
    return figures


def _hand_over(transport: str, work: Work, runs: int) -> Figure:
    name = f"{transport} with digests, {size_words(work.piece)} pieces"
    plain, checked = _both(transport, work, runs)
    if not plain.timings or not checked.timings:
        return absent(name, "GiB/s", "without", plain.missing or checked.missing)
    rates = [work.nbytes / 2**30 / outcome.seconds for outcome in (checked, plain)]
    return at_least(name, rates[0], "GiB/s", "without", rates[1], None)


def _small(transport: str, runs: int) -> Figure:
    work = Work(SMALL_PIECE, 1)
    name = f"{transport} with digests, a hand-over of {size_words(SMALL_PIECE * TENSORS)}"
    plain, checked = _both(transport, work, 20 * runs)
    if not plain.timings or not checked.timings:
        return absent(name, "us", "without", plain.missing or checked.missing)
    return at_most(name, checked.seconds * 1e6, "us", "without", plain.seconds * 1e6, None)


def _both(transport: str, work: Work, runs: int) -> tuple[Outcome, Outcome]:
    pair = [Contender(name, "baton", (transport, name)) for name in ("plain", "digest")]
    outcomes = take_turns(pair, work._asdict(), runs, SLOW_SECONDS)
    return outcomes["plain"], outcomes["digest"]
