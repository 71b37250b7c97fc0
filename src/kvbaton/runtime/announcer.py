"""Tells the registry which rooms this replica has opened and closed: in batches, on a thread of its own.

`Announcer` decides what is said; `AnnouncerThread` calls it when it is time.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Literal

from kvbaton.errors import KVBatonError
from kvbaton.registry import RegistryClient, UnknownInstance
from kvbaton.runtime.settings import Settings

logger = logging.getLogger(__name__)

News = Literal["opened", "closed", "ended"]
MAX_ROOMS_PER_REQUEST = 8192
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds until a request is tried again that failed; doubled each time."""


class Announcer:
    """`opened`, `closed` and `start_over` may be called from any thread; they never block. One thread calls `tell`.

    ``refused(room, dp_rank)`` is called, by `tell`, for a room that another replica holds and does not close within
    ``Settings.room_conflict_seconds``. ``unknown()`` is called when the registry does not know this rank. ``clock``
    tells the time in seconds.
    """

    def __init__(
        self,
        registry: RegistryClient,
        instance: str,
        settings: Settings,
        *,
        refused: Callable[[int, int], None],
        unknown: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._instance = instance
        self._settings = settings
        self._refused = refused
        self._unknown = unknown
        self._clock = clock
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._news: dict[int, News] = {}
        """Rooms to tell of, oldest first, and what."""
        self._conflicts: dict[int, float] = {}
        """When rooms were found to be held by another replica."""
        self._pause = 0.0

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Call ``wake()`` whenever there is something to tell. Set it before the first room."""
        self._wake = wake

    def __len__(self) -> int:
        """How many rooms are announced, or will be."""
        return len(self._open)

    def opened(self, room: int) -> None:
        """The engine opened a room."""
        with self._lock:
            self._open.add(room)
            self._say(room, "opened")
        self._wake()

    def closed(self, room: int, *, early: bool = False) -> None:
        """The engine closed a room; ``early``: before it had ended well, so that who looks for it shall hear of it."""
        with self._lock:
            self._open.discard(room)
            self._conflicts.pop(room, None)
            self._say(room, "ended" if early else "closed")
        self._wake()

    def start_over(self) -> None:
        """Announce every open room again: the registry has forgotten them."""
        with self._lock:
            for room in self._open:
                self._say(room, "opened")
        self._wake()

    def tell(self) -> float | None:
        """Tell the registry what is new; blocks as long as the registry's client does.

        Returns the seconds until it must be called again, or None if it need not before the next wake.
        """
        news = self._take()
        if news:
            wait = self._tell(news, self._pause)
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE) if wait else 0.0
        return max(self._pause, self._settings.announce_seconds) if self._news else None

    # Below: called by `tell`, but for `_say`.

    def _say(self, room: int, news: News) -> None:
        # Behind what was to be said before, which it replaces. Under the lock.
        self._news.pop(room, None)
        self._news[room] = news

    def _take(self) -> dict[int, News]:
        with self._lock:
            news = dict(itertools.islice(self._news.items(), MAX_ROOMS_PER_REQUEST))
            for room in news:
                del self._news[room]
        return news

    def _tell(self, news: dict[int, News], pause: float) -> bool:
        """Tell the registry; returns whether something must be tried again after a pause."""
        opened, closed, ended = (
            [room for room, what in news.items() if what == wanted] for wanted in ("opened", "closed", "ended")
        )
        try:
            held = self._registry.announce_rooms(self._instance, opened, closed, ended)
        except Exception as error:
            self._failed(news, error, logging.DEBUG if pause else logging.WARNING)
            return True
        return self._resolve(opened, held)

    def _failed(self, news: dict[int, News], error: Exception, level: int) -> None:
        known = isinstance(error, KVBatonError)
        logger.log(level, "prefill: rooms could not be announced: %s", error, exc_info=None if known else error)
        with self._lock:
            # Where it is newer, what was said meanwhile stands.
            self._news = {**news, **self._news}
        if isinstance(error, UnknownInstance):
            self._unknown()

    def _resolve(self, opened: list[int], held: dict[int, int]) -> bool:
        """Look at the rooms that another replica holds: it may be about to close them."""
        now = self._clock()
        lasting: dict[int, int] = {}
        with self._lock:
            for room in opened:
                if room not in held:
                    self._conflicts.pop(room, None)
                elif room in self._open:
                    since = self._conflicts.setdefault(room, now)
                    if now - since < self._settings.room_conflict_seconds:
                        self._news.setdefault(room, "opened")
                    else:
                        lasting[room] = held[room]
                        self._open.discard(room)
                        del self._conflicts[room]
            again = bool(self._conflicts)
        for room, dp_rank in lasting.items():
            self._refused(room, dp_rank)
        return again


class AnnouncerThread:
    """Lets an `Announcer` tell ``announce_seconds`` after it has something: so rooms travel together."""

    def __init__(self, announcer: Announcer, announce_seconds: float) -> None:
        self._announcer = announcer
        self._announce_seconds = announce_seconds
        self._something = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-registry-rooms", daemon=True)
        announcer.set_waker(self._something.set)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; nothing more is said."""
        self._stopped.set()
        self._something.set()
        self._thread.join()

    def _run(self) -> None:
        pause = self._announce_seconds
        while True:
            self._something.wait()
            if self._stopped.wait(pause):
                return
            self._something.clear()
            again = self._announcer.tell()
            pause = self._announce_seconds if again is None else again
            if again is not None or self._stopped.is_set():
                self._something.set()
