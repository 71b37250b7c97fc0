"""Hands the requests of a `Case` over between grids of kvbaton's ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import NamedTuple

from kvbaton.bench.contenders.cases import Case
from kvbaton.bench.pairs import Contender, ContenderFailed, Process

SETTLE_SECONDS = 0.02


class HandOver(NamedTuple):
    """One hand-over of all requests. Times are in seconds from the first ``send``."""

    last: float
    """Until the last request was seen to be complete at every destination rank."""
    first: float
    median: float
    """The median over requests."""
    returned: float
    """Until the calls of the slowest source rank had returned."""
    source_processor: float
    """Processor seconds of all source processes."""
    destination_processor: float


class World:
    """The processes of a case. Use it in a ``with``."""

    def __init__(self, case: Case, transport: str) -> None:
        self.case = case
        self._room = 0
        self._stack = contextlib.ExitStack()
        try:
            self.sources = [self._process(transport, "source", number) for number in range(case.prefill_tp)]
            self.destinations = [self._process(transport, "destination", number) for number in range(case.decode_tp)]
            for process in self.everyone:
                process.ask("prepare", work=case._asdict())
            cards = [process.answer() for process in self.everyone]
            # The grid is complete before anyone asks for it.
            for side in (self.sources, self.destinations):
                _all(side, "meet", card=cards[0])
        except BaseException:
            self._stack.close()
            raise

    def _process(self, transport: str, role: str, number: int) -> Process:
        process = Process(Contender(f"kvbaton over {transport}", "rank", (transport, str(number))), role)
        self._stack.callback(process.close)
        return process

    @property
    def everyone(self) -> list[Process]:
        """All processes: the sources, then the destinations."""
        return [*self.sources, *self.destinations]

    def run(self, check: bool = True) -> HandOver:
        """Hand all requests over once. Raises `ContenderFailed`, also if a byte is wrong at the destination."""
        _all(self.destinations, "open", first_room=self._room)
        _all(self.sources, "open", first_room=self._room)
        self._room += self.case.requests
        time.sleep(SETTLE_SECONDS)
        before = [process.call("processor_seconds") for process in self.everyone]
        for process in self.destinations:
            process.ask("wait")
        for process in self.sources:
            process.ask("send")
        sent = [process.answer() for process in self.sources]
        seen = [process.answer() for process in self.destinations]
        spent = [process.call("processor_seconds") - was for process, was in zip(self.everyone, before, strict=True)]
        _all(self.everyone, "close_rooms")
        if check:
            self.check()
        started = min(each["started"] for each in sent)
        ends = [max(ends) - started for ends in zip(*seen, strict=True)]
        returned = max(each["returned"] - each["started"] for each in sent)
        sources = len(self.sources)
        return HandOver(
            max(ends), min(ends), statistics.median(ends), returned, sum(spent[:sources]), sum(spent[sources:])
        )

    def check(self) -> None:
        """Compare every byte at the destinations, and empty them. Raises `ContenderFailed`."""
        wrong = [name for process in self.destinations for name in process.call("check")]
        if wrong:
            raise ContenderFailed(f"{len(wrong)} tensors differ at the destination, the first of {wrong[0]}")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _all(processes: list[Process], do: str, **arguments: object) -> None:
    for process in processes:
        process.ask(do, **arguments)
    for process in processes:
        process.answer()
