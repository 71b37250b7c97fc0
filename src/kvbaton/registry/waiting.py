"""Requests that wait for a room to be announced. All on one event loop, but for `Waiting.end`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable

Waiter = asyncio.Future[None]


class Waiting:
    """At most ``limit`` requests wait; any more are answered at once."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._waiters: set[Waiter] = set()
        self._by_room: dict[tuple[str, int], set[Waiter]] = {}
        self._by_asker: dict[str, Waiter] = {}
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, deployment: str, rooms: Collection[int], asker: str, seconds: float) -> None:
        """Return when one of the rooms is announced, when ``asker`` asks again, or after ``seconds``."""
        # Before the look at `_ended`, so that `end` sees one or the other.
        self._loop = asyncio.get_running_loop()
        if self._ended or len(self._waiters) >= self._limit:
            return
        waiter: Waiter = self._loop.create_future()
        self._waiters.add(waiter)
        for room in rooms:
            self._by_room.setdefault((deployment, room), set()).add(waiter)
        if asker:
            self._by_asker[asker] = waiter
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(waiter, seconds)
        finally:
            self._forget(waiter, deployment, rooms, asker)

    def announced(self, deployment: str, rooms: Iterable[int]) -> None:
        """End the waits for any of these rooms."""
        for room in rooms:
            for waiter in self._by_room.get((deployment, room), ()):
                _end(waiter)

    def asked_again(self, asker: str) -> None:
        """End the wait of ``asker``, if there is one."""
        waiter = self._by_asker.get(asker)
        if waiter is not None:
            _end(waiter)

    def end(self) -> None:
        """End every wait, and let none begin any more. From any thread."""
        self._ended = True
        if self._loop is not None:
            # A loop that is closed has no waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for waiter in self._waiters:
            _end(waiter)

    def _forget(self, waiter: Waiter, deployment: str, rooms: Iterable[int], asker: str) -> None:
        self._waiters.discard(waiter)
        for room in rooms:
            others = self._by_room.get((deployment, room))
            if others is not None:
                others.discard(waiter)
                if not others:
                    del self._by_room[deployment, room]
        if self._by_asker.get(asker) is waiter:
            del self._by_asker[asker]


def _end(waiter: Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)
