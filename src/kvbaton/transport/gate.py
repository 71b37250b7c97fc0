"""The gate in front of a process's memory: who writes now, and who may write no more."""

from __future__ import annotations

import threading
from collections import OrderedDict

REMEMBERED = 4096
"""How many fenced instances are remembered. Instance ids are never used twice, so old ones matter no more."""


class Gate:
    """Counts the writes in progress by instance, and lets none start for an instance that was refused. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[str, int] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._refusals: OrderedDict[str, int] = OrderedDict()
        self._shut = False

    def enter(self, instance: str, refusals: int | None = None) -> bool:
        """Whether ``instance`` may touch the memory now; if so, `leave` must follow.

        A connection that passes the number of `refusals` at its beginning stays out after `readmit` too.
        """
        with self._changed:
            if self._shut or instance in self._refused:
                return False
            if refusals is not None and refusals != self._refusals.get(instance, 0):
                return False
            self._inside[instance] = self._inside.get(instance, 0) + 1
            return True

    def leave(self, instance: str) -> None:
        """End what `enter` allowed."""
        with self._changed:
            self._inside[instance] -= 1
            if not self._inside[instance]:
                del self._inside[instance]
                self._changed.notify_all()

    def refuse(self, instance: str) -> None:
        """Let ``instance`` in no more. Writes in progress go on: see `wait_quiet`."""
        with self._changed:
            self._refused[instance] = None
            self._refused.move_to_end(instance)
            self._refusals[instance] = self._refusals.get(instance, 0) + 1
            self._refusals.move_to_end(instance)
            while len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)
            while len(self._refusals) > REMEMBERED:
                self._refusals.popitem(last=False)

    def readmit(self, instance: str) -> None:
        """Let ``instance`` in again, but none of the connections that it had when it was refused."""
        with self._changed:
            self._refused.pop(instance, None)

    def refusals(self, instance: str) -> int:
        """How often ``instance`` was refused."""
        with self._changed:
            return self._refusals.get(instance, 0)

    def refuses(self, instance: str) -> bool:
        """Whether ``instance`` is kept out."""
        with self._changed:
            return self._shut or instance in self._refused

    def shut(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self._shut = True

    def wait_quiet(self, instance: str | None, timeout: float) -> bool:
        """Wait until ``instance`` (None: anybody) has no write in progress; False if ``timeout`` seconds did not do."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._inside if instance is None else instance in self._inside), timeout
            )
