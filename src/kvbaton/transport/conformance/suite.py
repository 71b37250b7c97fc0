"""What all checks stand on: how to make transports, memory, and connected pairs of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from kvbaton.transport.base import Transport
from kvbaton.transport.conformance.case import Memory, Pair, require_equal

SETTLE = 0.05
"""Seconds after which a late write would have been seen."""


def host_memory(nbytes: int, shared: bool) -> Memory:
    """Make host memory, `SharedMemory` if ``shared``."""
    return Memory(nbytes, shared=shared)


class Suite:
    """The settings of a run, and fresh transports for each check."""

    def __init__(
        self,
        make: Callable[[str], Transport],
        memory: Callable[[int, bool], Memory] = host_memory,
        replace: Callable[[Transport, str], Transport] | None = None,
        timeout: float = 20.0,
    ) -> None:
        self.make = make
        self.memory = memory
        self.replace = replace or self._replace
        self.timeout = timeout
        self._made = 0

    def pair(self, source_bytes: Sequence[int], destination_bytes: Sequence[int]) -> Pair:
        """A connected pair of fresh transports."""
        names = (self.fresh("writer"), self.fresh("destination"))
        return Pair(self.make, self.memory, names, source_bytes, destination_bytes, self.timeout)

    def fresh(self, role: str) -> str:
        """An instance id that was not used before."""
        self._made += 1
        return f"{role}-{os.getpid()}-{id(self):x}-{self._made}"

    def require_quiet(self, pair: Pair, when: str) -> None:
        """Require that the destination's memory does not change any more."""
        before = [target.read() for target in pair.targets]
        time.sleep(SETTLE)
        for target, seen in zip(pair.targets, before, strict=True):
            require_equal(target.read(), seen, f"{when}, memory still changed")

    def _replace(self, old: Transport, instance: str) -> Transport:
        old.close()
        return self.make(instance)
