"""How long things take on a GPU: by events on a stream, in turn, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

REPEATS = 10
"""Calls that follow each other in one run: the CPU prepares one while the GPU works on the one before it."""
SLOW_SECONDS = 0.02
HEAD_START = 1_000_000
"""Cycles that the GPU waits before the first call of a run, half a millisecond."""


def seconds_each(contenders: Mapping[str, Callable[[], None]], runs: int) -> dict[str, float]:
    """The median seconds of one call of each, on the current stream; the first call of each is not counted."""
    repeats = {}
    for name, move in contenders.items():
        move()
        torch.cuda.synchronize()
        repeats[name] = 1 if once(move) > SLOW_SECONDS else REPEATS
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, move in contenders.items():
            begin, end = event(), event()
            # The first call shall not find the GPU idle either.
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(repeats[name]):
                move()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end) / 1e3 / repeats[name])
    return {name: statistics.median(each) for name, each in taken.items()}


def once(move: Callable[[], None]) -> float:
    """Seconds from the call until its work is done, as the calling thread sees it."""
    started = time.perf_counter()
    move()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - started


def latency(move: Callable[[], None], runs: int) -> float:
    """The median of `once`."""
    return statistics.median(once(move) for _ in range(runs))


def event() -> Any:
    """An event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def slow_down(stream: Any, copy: Callable[[], None] | None, nbytes: int, products: int = 12) -> tuple[float, float]:
    """Seconds of an 8192 x 8192 x 8192 bfloat16 product while ``copy`` runs on ``stream``, and what it copies a second.

    Both streams begin together; copies go on until the products have ended.
    """
    size = 8192
    one, other = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(one)
    for _ in range(3):
        torch.mm(one, other, out=out)
    torch.cuda.synchronize()
    gate = event()
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    gate.record()
    ends: list[Any] = []
    first, last = event(), event()
    first.record()
    for _ in range(products):
        torch.mm(one, other, out=out)
    last.record()
    with torch.cuda.stream(stream):
        stream.wait_event(gate)
        while copy is not None and not last.query():
            # A few ahead, so that the copies never wait for this thread, and end soon after the products.
            if len(ends) > 4:
                ends[-4].synchronize()
            copy()
            ends.append(event())
            ends[-1].record()
    last.synchronize()
    taken = first.elapsed_time(last) / 1e3
    torch.cuda.synchronize()
    done = sum(1 for end in ends if gate.elapsed_time(end) / 1e3 <= taken)
    return taken / products, done * nbytes / taken
