"""Batches of checks, run here or shared out to processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_batches(work: Callable[..., Result], batches: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Result]:
    """``work(*batch)`` for each batch, as they end; ``work`` is a function of a module, for other processes to find.

    Those that have not begun when the caller stops asking are cancelled.
    """
    if processes <= 1:
        for batch in batches:
            yield work(*batch)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting = list(batches[::-1])
        running: set[Future[Result]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < 2 * processes:
                    running.add(pool.submit(work, *waiting.pop()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in running:
                future.cancel()
