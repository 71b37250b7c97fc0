"""Chunks whose rows the engine's device has yet to write: they are sent when it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from kvbaton.runtime.interfaces import LongWork

POLL_SECONDS = 50e-6
"""How often events are asked while some are awaited."""


class Event(Protocol):
    """Something that a device will have done, as a ``torch.cuda.Event`` that was recorded after it."""

    def query(self) -> bool:
        """Whether it is done. Must not block."""


class _Waiting(NamedTuple):
    owner: Hashable
    after: Event | None
    step: Callable[[Exception | None], None]


class Later:
    """Runs steps when their events are done, those of one owner in their order. Thread-safe.

    A thread asks the events as long as there are any.
    """

    def __init__(self, threads: LongWork) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._stopped = False

    def __len__(self) -> int:
        return len(self._waiting)

    def run(self, owner: Hashable, after: Event | None, step: Callable[[Exception | None], None]) -> None:
        """Call ``step``: at once if nothing is to be waited for, else on a thread of this object's.

        It is given the error if the event cannot be asked.
        """
        with self._lock:
            waiting = _Waiting(owner, after, step)
            behind = any(each.owner is owner for each in self._waiting)
            if not behind and _settled(waiting):
                return
            if not self._waiting:
                # Before it is kept: where no thread can be started, the next one that comes tries again.
                self._threads.start(self._run, "kvbaton-later")
            self._waiting.append(waiting)

    def stop(self) -> None:
        """Forget what waits."""
        with self._lock:
            self._stopped = True

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped:
                    self._waiting.clear()
                held: set[Hashable] = set()
                left = []
                for each in self._waiting:
                    if each.owner in held or not _settled(each):
                        held.add(each.owner)
                        left.append(each)
                self._waiting = left
                if not left:
                    return
            time.sleep(POLL_SECONDS)


def _settled(waiting: _Waiting) -> bool:
    """Take the step if its event is done, or cannot be asked."""
    try:
        done = waiting.after is None or waiting.after.query()
    except Exception as error:
        waiting.step(error)
        return True
    if done:
        waiting.step(None)
    return done
