"""The writers that mapped this process's memory: they are shut out by nothing but the end of their process."""

from __future__ import annotations

import threading

from kvbaton.transport.process import ProcessKey, ProcessWatch


class Admitted:
    """Watches the processes of writers. ``settle_seconds`` is how long their work may go on after their end.

    Every method may be called from any thread.
    """

    def __init__(self, settle_seconds: float = 0.0) -> None:
        self._settle_seconds = settle_seconds
        self._lock = threading.Lock()
        self._watches: dict[str, ProcessWatch] = {}
        self._closed = False

    def add(self, instance: str, process: ProcessKey) -> None:
        """A writer may come. Raises `TransportUnavailable` for a process that cannot be watched from here."""
        watch = ProcessWatch(process)
        with self._lock:
            # Also of those that nobody will fence: they left in peace, and died later.
            over = [known for known, other in self._watches.items() if other.dead_for(self._settle_seconds)]
            before = [self._watches.pop(known) for known in {*over, instance} & self._watches.keys()]
            self._watches[instance] = watch
        for other in before:
            other.close()

    def fence(self, instance: str) -> bool:
        """Whether that writer's process is dead and its work has ended, or none was ever admitted.

        After `close` nothing is known any more, and nothing proven.
        """
        with self._lock:
            if self._closed:
                return False
            watch = self._watches.get(instance)
            if watch is None:
                return True
            if not watch.dead_for(self._settle_seconds):
                return False
            del self._watches[instance]
        watch.close()
        return True

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            self._closed = True
            watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            watch.close()
