"""What both sides of a manager share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from kvbaton.copy.movers import Movers
from kvbaton.errors import RoomError
from kvbaton.layout import RankLayout
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s
from kvbaton.protocol import Message
from kvbaton.runtime.interfaces import Control, LongWork
from kvbaton.runtime.observation import Observation
from kvbaton.runtime.outbox import Outbox
from kvbaton.runtime.settings import Settings
from kvbaton.transport.base import Transport

Result = TypeVar("Result")


@dataclass(frozen=True)
class Context:
    """One rank: its memory, its transports, its control plane, its clock, and threads for what may block."""

    instance: str
    model: str
    layout: RankLayout
    regions: tuple[Region, ...]
    transports: Mapping[str, Transport]
    """In order of preference."""
    left_out: Mapping[str, str]
    """Why other transports are not used here, by name."""
    control: Control
    outbox: Outbox
    settings: Settings
    executor: Executor
    """For `in_background`."""
    threads: LongWork
    clock: Callable[[], float]
    """The time in seconds, from any start; it never runs backwards."""
    observation: Observation = field(default_factory=Observation.of_nobody)

    @cached_property
    def movers(self) -> Movers:
        """What packs and unpacks rows of the regions, whatever memory they are."""
        return Movers(self.regions)

    def bases(self) -> Int64s:
        """The address of each region."""
        return np.array([region.address for region in self.regions], np.int64)

    def region_bytes(self) -> Int64s:
        """The length of each region."""
        return np.array([region.nbytes for region in self.regions], np.int64)

    def send(self, peer: str, message: Message) -> None:
        """Send a message to a peer, at the end of this turn. Called on the control thread."""
        self.outbox.add(peer, message)

    def hang_up(self, peer: str, linger_milliseconds: int = 0) -> None:
        """Close the connection of a peer that we dialled, after what was sent to it. Called on the control thread."""
        self.outbox.flush()
        self.control.hang_up(peer, linger_milliseconds)

    def in_background(
        self, work: Callable[[], Result], then: Callable[[Result], None], failed: Callable[[Exception], None]
    ) -> None:
        """Run ``work`` off the control thread; ``then(result)`` or ``failed(error)`` runs on it.

        ``failed`` is also told an error of ``then``, and that the manager is closing. Called on the control thread.
        """

        def take(result: Result) -> None:
            try:
                then(result)
            except Exception as error:
                failed(error)

        def finish(future: Future[Result]) -> None:
            if future.cancelled():
                self.control.post(lambda: failed(RoomError("the manager is closing")))
                return
            error = future.exception()
            if isinstance(error, Exception):
                self.control.post(lambda: failed(error))
            elif error is None:
                result = future.result()
                self.control.post(lambda: take(result))

        try:
            future = self.executor.submit(work)
        except RuntimeError:
            # The executor takes no more work: the manager is closing.
            failed(RoomError("the manager is closing"))
            return
        future.add_done_callback(finish)

    def now(self) -> float:
        """The time of every deadline, in seconds."""
        return self.clock()
