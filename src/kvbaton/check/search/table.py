"""The states of one process, each with a number, and what each event makes of each of them.

A real core works out every pair of state and event once; from then on the answer is looked up. That is sound because a
core does nothing but what its state and the event say, and because two states count as one only if no field of them
differs (`fingerprint`). It makes a step of the whole world a few look-ups.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbaton.check.search.fingerprint import fingerprint
from kvbaton.check.search.process import Event, LinkKey, Outcome, Process

AnyProcess = TypeVar("AnyProcess", bound=Process)


@dataclass(frozen=True)
class Seen:
    """What the world must know of a state of a process."""

    events: tuple[Event, ...]
    begun: frozenset[int]
    over: frozenset[int]
    held: frozenset[int]
    writes: tuple[tuple[LinkKey, int, str], ...]
    left_over: str


class Table(Generic[AnyProcess]):
    """All states of one process that were reached."""

    def __init__(self, process: AnyProcess) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._stored: list[bytes] = []
        self._outcomes: dict[tuple[int, Event], Outcome] = {}
        self.seen: list[Seen] = []
        self.first = self._number(process)

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def steps(self) -> int:
        """How often a real core was asked."""
        return len(self._outcomes)

    def load(self, state: int) -> AnyProcess:
        """A copy of the process in that state."""
        process: AnyProcess = pickle.loads(self._stored[state])
        return process

    def perform(self, state: int, event: Event) -> Outcome:
        """What ``event`` does in that state."""
        outcome = self._outcomes.get((state, event))
        if outcome is None:
            process = self.load(state)
            outcome = process.perform(event)
            if not outcome.problem:
                outcome.state = self._number(process)
            self._outcomes[state, event] = outcome
        return outcome

    def _number(self, process: AnyProcess) -> int:
        key = fingerprint(process)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._stored)
            self._stored.append(pickle.dumps(process))
            self.seen.append(
                Seen(
                    tuple(process.events()),
                    frozenset(process.begun),
                    frozenset(process.over),
                    process.held(),
                    process.under_way(),
                    process.left_over(),
                )
            )
        return number
