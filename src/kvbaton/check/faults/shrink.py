"""Makes a failing scenario small: leaves requests and faults out as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvbaton.check.faults.scenario import SLIPS, Fault, Request, Scenario
from kvbaton.check.faults.simulate import simulate

Item = TypeVar("Item")

MOST_RUNS = 400


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool] | None = None, runs: int = MOST_RUNS) -> Scenario:
    """A scenario that still ``fails`` (by default: any violation) and of which little can be left out.

    First whole kinds of faults go, then requests, then single faults, then cuts, tokens and ranks become fewer. Takes
    ``runs`` runs at most. Returns ``scenario`` itself where it does not fail.
    """
    budget = _Budget(fails or _fails, runs)
    if not budget.fails(scenario):
        return scenario
    before = None
    while scenario != before:
        before = scenario
        scenario = _fewer_kinds(scenario, budget)
        scenario = _fewer_requests(scenario, budget)
        scenario = _fewer_faults(scenario, budget)
        scenario = _simpler(scenario, budget)
    return scenario


def _fails(scenario: Scenario) -> bool:
    return bool(simulate(scenario).violations)


class _Budget:
    def __init__(self, fails: Callable[[Scenario], bool], runs: int) -> None:
        self._fails = fails
        self._left = runs

    def fails(self, scenario: Scenario) -> bool:
        self._left -= 1
        return self._left >= 0 and self._fails(scenario)


def _fewer_kinds(scenario: Scenario, budget: _Budget) -> Scenario:
    for kind in sorted({fault.kind for fault in scenario.faults}):
        left = tuple(fault for fault in scenario.faults if fault.kind != kind)
        smaller = msgspec.structs.replace(scenario, faults=left)
        if budget.fails(smaller):
            scenario = smaller
    return scenario


def _fewer_faults(scenario: Scenario, budget: _Budget) -> Scenario:
    def with_faults(faults: Sequence[Fault]) -> Scenario:
        return msgspec.structs.replace(scenario, faults=tuple(faults))

    return with_faults(_smallest(scenario.faults, lambda faults: budget.fails(with_faults(faults))))


def _fewer_requests(scenario: Scenario, budget: _Budget) -> Scenario:
    def with_requests(requests: Sequence[Request]) -> Scenario:
        left = {request.index for request in requests}
        faults = tuple(fault for fault in scenario.faults if fault.kind not in SLIPS or fault.target in left)
        return msgspec.structs.replace(scenario, requests=tuple(requests), faults=faults)

    return with_requests(_smallest(scenario.requests, lambda requests: budget.fails(with_requests(requests))))


def _smallest(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """Delta debugging: items of which no run of ever smaller length can be left out."""
    length = len(items)
    while length and items:
        at = 0
        while at < len(items):
            left = (*items[:at], *items[at + length :])
            if fails(left):
                items = left
            else:
                at += length
        length //= 2
    return items


def _simpler(scenario: Scenario, budget: _Budget) -> Scenario:
    for number, request in enumerate(scenario.requests):
        for changes in ({"cuts": ()}, {"prefix": 0}, {"tokens": 3, "prefix": 0, "cuts": ()}, {"aux": False}):
            simpler = msgspec.structs.replace(request, **changes)
            requests = (*scenario.requests[:number], simpler, *scenario.requests[number + 1 :])
            smaller = msgspec.structs.replace(scenario, requests=requests)
            if simpler != request and budget.fails(smaller):
                scenario, request = smaller, simpler
    for part in scenario.shape.parts:
        parts = tuple(each for each in scenario.shape.parts if each != part)
        requests = tuple(msgspec.structs.replace(each, aux=each.aux and "aux" in parts) for each in scenario.requests)
        shape = msgspec.structs.replace(scenario.shape, parts=parts)
        smaller = msgspec.structs.replace(scenario, shape=shape, requests=requests)
        if parts and budget.fails(smaller):
            scenario = smaller
    return scenario
