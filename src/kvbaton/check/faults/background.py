"""The simulated threads of a process: a pool for what may block, and long requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from random import Random
from typing import Any, Protocol

from kvbaton.check.faults.timeline import Timeline
from kvbaton.runtime.destinations import AT_ONCE

WORKERS = AT_ONCE + 4
"""Threads of the pool of a real manager."""


class Running(Protocol):
    """The process that the threads belong to."""

    alive: bool

    def when_running(self, event: Callable[[], None]) -> None:
        """Run an event now, or when the process goes on; never if it is gone."""


class WouldWait(BaseException):
    """Raised inside a long request that has no answer yet. Whoever raises it runs `LongCall.run` again later."""


class Background(Executor):
    """A pool of a few threads: each piece of work runs at once, after a while, and its result comes after another."""

    def __init__(self, timeline: Timeline, process: Running, chance: Random) -> None:
        self._timeline = timeline
        self._process = process
        self._chance = chance
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = 0
        self.extra = 0.0
        """Seconds that every piece of work takes longer."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`."""
        future: Future[Any] = Future()
        self._waiting.append((lambda: fn(*args, **kwargs), future))
        self._start()
        return future

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._waiting and not self._running

    def _start(self) -> None:
        while self._waiting and self._running < WORKERS:
            work, future = self._waiting.popleft()
            self._running += 1
            seconds = self._chance.uniform(0.0, 0.03) + self.extra
            self._timeline.after(seconds, partial(self._process.when_running, partial(self._run, work, future)))

    def _run(self, work: Callable[[], Any], future: Future[Any]) -> None:
        error: BaseException | None = None
        result = None
        try:
            result = work()
        except Exception as raised:
            error = raised

        def end() -> None:
            self._running -= 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            self._start()

        self._timeline.after(self._chance.uniform(0.0, 0.03), lambda: self._process.when_running(end))


class LongCall:
    """One long request: `run` runs its work again from the beginning, until it has an answer."""

    def __init__(self, process: Running, work: Callable[[], None], calls: LongCalls) -> None:
        self._process = process
        self._work = work
        self._calls = calls
        self.patience: float | None = None
        """When it ends whatever there is; set by who raised `WouldWait`."""
        self.over = False
        """Whether it shall end now."""

    def run(self) -> None:
        """Try again."""
        self._process.when_running(self._try)

    def _try(self) -> None:
        if self not in self._calls.running:
            return
        self._calls.current = self
        try:
            self._work()
        except WouldWait:
            return
        finally:
            self._calls.current = None
        self._calls.running.pop(self, None)


class LongCalls:
    """As `Threads`: one simulated thread for each request."""

    def __init__(self, timeline: Timeline, process: Running, chance: Random) -> None:
        self._timeline = timeline
        self._process = process
        self._chance = chance
        self.running: dict[LongCall, None] = {}
        self.current: LongCall | None = None
        """The one whose work runs now."""

    def start(self, work: Callable[[], None], name: str) -> None:
        """As `Threads.start`."""
        call = LongCall(self._process, work, self)
        self.running[call] = None
        self._timeline.after(self._chance.uniform(0.001, 0.03), call.run)
