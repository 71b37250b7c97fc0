"""Which slabs peers may write into, and when a slab may be granted again."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbaton.errors import TransportUnavailable
from kvbaton.transport.process import ProcessKey, ProcessWatch

SHARE = 8
"""A connection gets at most this part of the slabs that are left: one in eight."""
LINGER_SECONDS = 1.0
"""How long bytes of a dead process may still be on their way: a library of this process may have yet to copy them."""


class Slabs:
    """The slabs that are free. Callers hold a lock."""

    def __init__(self, count: int, per_peer: int) -> None:
        self.count = count
        self._per_peer = per_peer
        self._free = list(range(count))

    def grant(self) -> tuple[int, ...]:
        """Take slabs for one connection: fewer as they run out, none when all are taken."""
        wanted = min(len(self._free), max(1, min(self._per_peer, len(self._free) // SHARE)))
        granted, self._free = self._free[:wanted], self._free[wanted:]
        return tuple(granted)

    def give_back(self, slabs: tuple[int, ...]) -> None:
        """Take slabs back that are certainly not written to any more."""
        self._free.extend(slabs)

    @property
    def free(self) -> int:
        """How many can be granted."""
        return len(self._free)


class Death:
    """Whether a writer's process is proven dead, and all that it had sent has landed."""

    def __init__(self, process: ProcessKey | None) -> None:
        self._watch: ProcessWatch | None = None
        if process is not None:
            try:
                self._watch = ProcessWatch(process)
            except TransportUnavailable:
                # Another host, or another pid namespace: its death cannot be seen from here.
                self._watch = None

    def proven(self) -> bool:
        """Whether nothing of that process can land any more."""
        return self._watch is not None and self._watch.dead_for(LINGER_SECONDS)

    @property
    def visible(self) -> bool:
        """Whether its death could be seen from here at all."""
        return self._watch is not None

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()


class Guest:
    """A writer with a connection, or one whose connection ended without its word that its library is done."""

    def __init__(self, instance: str, connection: int, direct: bool, slabs: tuple[int, ...], death: Death) -> None:
        self.instance = instance
        self.connection = connection
        """The number that the writer gave it."""
        self.direct = direct
        """Whether it may write into regions without passing the gate."""
        self.slabs = slabs
        self.death = death
        self.left = False
        """Whether it said goodbye."""
        self.since = time.monotonic()
        """When its connection ended, for one that did not say goodbye."""


class Departed:
    """Guests that went without a goodbye. Callers hold a lock.

    Their library may still be writing, so their slabs wait until it is proven that it does not: by the writer itself
    when it comes again, by the death of its process, by the fabric. Where nothing can be seen of the process from here,
    ``quarantine_seconds`` stand in for a proof as far as slabs are concerned, never for regions.
    """

    def __init__(self, quarantine_seconds: float) -> None:
        self._quarantine_seconds = quarantine_seconds
        self._guests: list[Guest] = []

    def add(self, guest: Guest) -> None:
        """A guest went."""
        guest.since = time.monotonic()
        self._guests.append(guest)

    def settle(self) -> tuple[int, ...]:
        """Forget those whose process is dead; the slabs that may be granted again."""
        free = self._forget(lambda guest: guest.death.proven())
        for guest in self._guests:
            if not guest.death.visible and time.monotonic() - guest.since >= self._quarantine_seconds:
                free += guest.slabs
                guest.slabs = ()
        self._guests = [guest for guest in self._guests if guest.slabs or guest.direct]
        return free

    def forgive(self, instance: str, connections: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Forget guests of ``instance``, all or those of some connections: they write no more. Their slabs."""
        return self._forget(
            lambda guest: guest.instance == instance and (connections is None or guest.connection in connections)
        )

    def may_write(self, instance: str) -> bool:
        """Whether a guest of that instance may still write into regions."""
        return any(guest.direct and guest.instance == instance for guest in self._guests)

    @property
    def slabs(self) -> int:
        """How many slabs wait."""
        return sum(len(guest.slabs) for guest in self._guests)

    def close(self) -> None:
        """Stop watching."""
        self._forget(lambda guest: True)

    def _forget(self, harmless: Callable[[Guest], bool]) -> tuple[int, ...]:
        free: tuple[int, ...] = ()
        left = []
        for guest in self._guests:
            if harmless(guest):
                free += guest.slabs
                guest.death.close()
            else:
                left.append(guest)
        self._guests = left
        return free
