"""The faults of a soak, and when each of them is over."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable

from kvbaton.check.soak.diary import Diary
from kvbaton.check.soak.fleet import Fleet
from kvbaton.check.soak.tally import Tally

WEIGHTS = {"kill": 6, "stop": 8, "cut": 8, "break": 4, "abort": 6, "registry": 1}


class Faults:
    """Does one thing at a time, at random; what was done is undone some time later."""

    def __init__(self, fleet: Fleet, rng: random.Random, tally: Tally, diary: Diary) -> None:
        self._fleet, self._rng, self._tally, self._diary = fleet, rng, tally, diary
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._registry_away = False

    def inject(self) -> None:
        """Do something bad."""
        kind = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        getattr(self, "_" + kind)()

    def undo_due(self) -> None:
        """Undo what has lasted long enough."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def undo_all(self) -> None:
        """Undo everything."""
        while self._later:
            heapq.heappop(self._later)[2]()

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._diary.note(f"for {seconds:g} s")
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), undo))

    def _pick(self, keys: list[str]) -> str | None:
        there = [key for key in keys if key in self._fleet.ranks and self._fleet.ranks[key].ready]
        return self._rng.choice(there) if there else None

    def _note(self, kind: str, key: str) -> None:
        self._tally.faults[f"{kind} {'prefill' if key.startswith('p') else 'decode'}"] += 1
        self._diary.note(f"fault: {kind} {key}")

    def _kill(self) -> None:
        key = self._pick([key for key in self._fleet.keys if key not in self._fleet.spared])
        if key is None:
            return
        self._note("kill", key)
        self._fleet.kill(key)
        self._after(self._rng.choice((0.0, 0.0, 1.0)), lambda: self._fleet.start_rank(key))

    def _stop(self) -> None:
        key = self._pick(self._fleet.keys)
        if key is None or self._fleet.ranks[key].stopped_at is not None:
            return
        self._note("stop", key)
        child = self._fleet.ranks[key]
        child.stop()
        self._after(self._rng.choice((0.05, 0.5, 2.0, 4.0)), child.go_on)

    def _cut(self) -> None:
        key = self._pick(self._fleet.keys)
        if key is None:
            return
        inwards, outwards = self._rng.choice(((True, True), (True, False), (False, True)))
        self._note("cut " + ("both ways" if inwards and outwards else "inwards" if inwards else "outwards"), key)
        child = self._fleet.ranks[key]
        child.tell("hold", inwards=inwards, outwards=outwards)
        self._after(self._rng.choice((0.1, 0.5, 2.0, 4.0)), lambda: child.tell("heal"))

    def _break(self) -> None:
        key = self._pick(self._fleet.keys)
        if key is not None:
            self._note("break connections of", key)
            self._fleet.ranks[key].tell("reset")

    def _abort(self) -> None:
        key = self._pick(self._fleet.keys)
        if key is not None:
            self._note("abort rooms of", key)
            self._fleet.ranks[key].tell("abort", share=self._rng.choice((0.3, 1.0)))

    def _registry(self) -> None:
        if self._registry_away:
            return
        self._tally.faults["kill registry"] += 1
        self._diary.note("fault: kill registry")
        self._registry_away = True
        self._fleet.kill_registry()

        def back() -> None:
            self._registry_away = False
            self._fleet.start_registry()

        self._after(self._rng.choice((0.0, 2.0)), back)
