"""Threads for requests that may last long: more of them at a time than a pool has threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Threads:
    """Starts a thread for each piece of work; `join` waits for all of them. Thread-safe."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._running)

    def start(self, work: Callable[[], None], name: str) -> None:
        """Run ``work`` on a thread of this name."""

        def run() -> None:
            try:
                work()
            finally:
                self._running.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._running.discard(thread)
            raise

    def join(self, seconds: float) -> None:
        """Wait until all have ended, so long at most."""
        end = time.monotonic() + seconds
        for thread in list(self._running):
            thread.join(max(0.0, end - time.monotonic()))
