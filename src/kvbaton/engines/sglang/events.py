"""Hands chunks over once the GPU has written them, in order, without holding up the scheduler."""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol


class Event(Protocol):
    """What is needed of a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait until it has happened."""


Step = Callable[[], None]


class AfterEvents:
    """Runs the steps of each owner in order, each after its events.

    Where nothing is to be waited for, a step runs at once in the caller's thread. Otherwise it runs on a thread of this
    object's own, which is started when it is first needed. ``failed`` is told an error of waiting, and the step is left
    out; a step itself must not raise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: collections.Counter[Hashable] = collections.Counter()
        self._queue: queue.SimpleQueue[tuple[Hashable, Sequence[Event], Step, Callable[[str], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def run(self, owner: Hashable, events: Sequence[Event], step: Step, failed: Callable[[str], None]) -> None:
        """Run ``step`` after ``events``, and after all earlier steps of ``owner``."""
        with self._lock:
            if self._waiting[owner] or not all(event.query() for event in events):
                self._waiting[owner] += 1
                self._queue.put((owner, events, step, failed))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                return
            del self._waiting[owner]
        step()

    def close(self) -> None:
        """End the thread, after the steps that wait."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(5.0)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            owner, events, step, failed = item
            try:
                for event in events:
                    event.synchronize()
            except Exception as error:
                failed(f"an event of the GPU could not be waited for: {error}")
            else:
                step()
            with self._lock:
                self._waiting[owner] -= 1
                if not self._waiting[owner]:
                    del self._waiting[owner]
