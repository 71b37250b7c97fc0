"""Rooms that one side of a pair will not serve, so that the other side need not wait for it.

sglang-router asks both sides at once and waits for both. A side that refuses a request (it is full, or shuts down)
would leave the other one waiting for a hand-over that never comes, until a deadline of minutes. The prefill server
keeps a list of such rooms beside its registry: the decode server adds to it what it refuses, and asks it when a
hand-over is slow. That it goes on asking is how the prefill server knows that somebody waits for the room: a decode
server that is gone, or was never reached, does not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvbaton.errors import KVBatonError
from kvbaton.registry import HttpRegistry, RegistryUnreachable
from kvbaton.registry.server import BodyTooLarge, read_body

_MAX_BODY = 16384
_TIMEOUT = 2.0


class Refusal(NamedTuple):
    """Why a side will not serve a room, and the HTTP status that it answered with."""

    status: int
    reason: str


class SourceGone(KVBatonError):
    """The server that held a room does not run any more."""


UNASKED_SECONDS = 10.0
"""How long a prefill server works for what no decode server asks for, by default. One that lives asks each second, but
on a busy machine it may be starved."""


class Refusals:
    """The list itself: bounded in number and time; may be used from any thread.

    What no decode server asks for in ``unasked_seconds`` is not wanted any more; with 0 everything always is.
    """

    def __init__(
        self,
        limit: int = 4096,
        seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        unasked_seconds: float = UNASKED_SECONDS,
    ) -> None:
        self.unasked_seconds = unasked_seconds
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: OrderedDict[int, tuple[float, Refusal]] = OrderedDict()
        self._watchers: dict[int, Callable[[Refusal], None]] = {}
        self._asked: OrderedDict[int, float] = OrderedDict()
        """When a room was last asked for; the latest ``limit`` of them."""

    def __len__(self) -> int:
        return len(self._refused)

    def add(self, room: int, refusal: Refusal) -> None:
        """Add a room, and tell who watches it."""
        with self._lock:
            self._forget_old()
            self._refused[room] = (self._clock() + self._seconds, refusal)
            self._refused.move_to_end(room)
            while len(self._refused) > self._limit:
                self._refused.popitem(last=False)
            watcher = self._watchers.get(room)
        if watcher is not None:
            watcher(refusal)

    def find(self, room: int) -> Refusal | None:
        """Return the refusal of a room, if there is one."""
        with self._lock:
            self._forget_old()
            found = self._refused.get(room)
        return found[1] if found else None

    def ask(self, room: int) -> Refusal | None:
        """As `find`, for a decode server that waits for the room."""
        with self._lock:
            self._asked[room] = self._clock()
            self._asked.move_to_end(room)
            while len(self._asked) > self._limit:
                self._asked.popitem(last=False)
        return self.find(room)

    def is_wanted(self, room: int) -> bool:
        """Whether a decode server asked for a room in the last ``unasked_seconds``."""
        with self._lock:
            asked = self._asked.get(room)
        return not self.unasked_seconds or (asked is not None and self._clock() - asked <= self.unasked_seconds)

    def watch(self, room: int, tell: Callable[[Refusal], None]) -> None:
        """Call ``tell`` when the room is added, from the thread that adds it; at once if it is there already."""
        with self._lock:
            self._watchers[room] = tell
        found = self.find(room)
        if found is not None:
            tell(found)

    def unwatch(self, room: int) -> None:
        """Watch a room no longer."""
        with self._lock:
            self._watchers.pop(room, None)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._refused and next(iter(self._refused.values()))[0] <= now:
            self._refused.popitem(last=False)


def add_routes(app: FastAPI, refusals: Refusals) -> None:
    """Serve the list at ``/v1/rooms/{room}/refusal``."""

    @app.post("/v1/rooms/{room}/refusal")
    async def refuse(room: int, request: Request) -> Response:
        try:
            refusal = _decode(await read_body(request, _MAX_BODY))
        except BodyTooLarge as error:
            return Response(str(error), 413)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TimeoutError) as error:
            return Response(f"the body is not a refusal: {error}", 400)
        refusals.add(room, refusal)
        return Response(status_code=200)

    @app.get("/v1/rooms/{room}/refusal")
    async def refusal_of(room: int) -> Response:
        found = refusals.ask(room)
        return Response(msgspec.json.encode(found), 200 if found else 404, media_type="application/json")


def report(source: str, room: int, refusal: Refusal) -> None:
    """Tell the prefill side at ``source`` that this side refused a room. Blocks; a failure is nobody's concern."""
    with contextlib.suppress(KVBatonError):
        _ask(source, "POST", room, msgspec.json.encode(refusal))


def look_up(source: str, room: int) -> Refusal | None:
    """Ask the prefill side at ``source`` whether it refused a room. Blocks; None also if it does not answer.

    Raises `SourceGone` where nothing listens any more.
    """
    try:
        body = _ask(source, "GET", room)
    except RegistryUnreachable:
        raise SourceGone(f"the prefill side is gone: nothing listens at {source}") from None
    except KVBatonError:
        return None
    try:
        return _decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decode(body: bytes) -> Refusal:
    refusal = msgspec.json.decode(body, type=Refusal)
    # It becomes the status of an answer: whatever was sent, it must be an error.
    return refusal if 400 <= refusal.status <= 599 else refusal._replace(status=503)


def _ask(source: str, method: str, room: int, body: bytes | None = None) -> bytes | None:
    return HttpRegistry(source, _TIMEOUT).ask(method, f"/v1/rooms/{room}/refusal", body)
