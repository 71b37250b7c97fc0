"""One request on its way through the engine: events in, text out, and an end in every case."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.engines.base import EndEvent, Engine, Event, GenerateRequest, Handle, Tokenizer
from kvbaton.errors import KVBatonError, RoomError
from kvbaton.serve.bodies import Job
from kvbaton.serve.refusals import Refusal, Refusals, SourceGone, look_up, report
from kvbaton.serve.text import Detokenizer, StopStrings

FIRST_LOOK_SECONDS = 0.5
"""How long a decode server waits for a hand-over before it asks whether the prefill side refused, or is gone."""
REFUSAL_SECONDS = 1.0
"""How often it asks again, for as long as it waits."""


class RequestFailed(KVBatonError):
    """A request ended without its answer; ``status`` is the HTTP status that says so best.

    ``room_in_use`` is the room that belongs to another request, if that is why: that one must not suffer.
    """

    def __init__(self, message: str, status: int = 500, room_in_use: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.room_in_use = room_in_use


@dataclass
class Progress:
    """How far a request is. ``finish`` is None until its last state; ``new_text`` is what this step added."""

    request: GenerateRequest
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    new_text: str = ""
    finish: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


class Service:
    """Runs requests on an engine: bounds how many, knows which run, and ends them all when it must.

    ``request_seconds`` is the longest that a request may take: the engine's own deadlines end a hand-over long before.
    ``refusals`` is the list of a prefill server; a decode server finds it at the source of each request.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        max_requests: int = 1024,
        request_seconds: float = 1800.0,
        refusals: Refusals | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.draining = False
        self.served = 0
        """Requests that were taken since the start."""
        self._max_requests = max_requests
        self._request_seconds = request_seconds
        self._refusals = refusals
        self._running: dict[int, _Pump] = {}

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    def not_ready(self) -> str:
        """Return why no request can be taken now, or an empty text."""
        return "the server is shutting down" if self.draining else self.engine.healthy()

    def fail_all(self, reason: str) -> None:
        """End every request that runs with `RequestFailed` (status 503) and cancel it in the engine."""
        for pump in list(self._running.values()):
            pump.fail(RequestFailed(reason, 503))

    async def run(self, job: Job) -> AsyncGenerator[Progress, None]:
        """Run a job's requests side by side and give each step of each as it comes.

        Each request's steps are one `Progress`, changed in place, the last with ``finish``. Raises `RequestFailed` at
        the first failure. Leaving early, by an error or by closing the iterator, cancels what still runs.
        """
        events: asyncio.Queue[tuple[int, Event | RequestFailed]] = asyncio.Queue()
        pumps: list[_Pump] = []
        try:
            try:
                self._admit(job)
                for index, request in enumerate(job.requests):
                    self._begin(request, index, events, pumps)
            except RequestFailed as error:
                await self._tell_refusal(job, error)
                raise
            writers = [_Writer(request, index, job, self.tokenizer) for index, request in enumerate(job.requests)]
            open_count = len(writers)
            silent = set(range(len(writers)))
            began = time.monotonic()
            deadline, look_at = began + self._request_seconds, began + FIRST_LOOK_SECONDS
            while open_count:
                step = await self._next(events, deadline, look_at if silent else deadline)
                if step is None:
                    waiting = [job.requests[index] for index in silent]
                    self._check_wanted(waiting, time.monotonic() - began)
                    await self._look_for_refusals(waiting)
                    look_at = time.monotonic() + REFUSAL_SECONDS
                    continue
                index, event = step
                silent.discard(index)
                writer = writers[index]
                if writer.ended:
                    continue
                if writer.take(event):
                    open_count -= 1
                    pumps[index].cancel()
                yield writer.progress
        finally:
            for pump in pumps:
                pump.cancel()
                del self._running[id(pump)]
            if self._refusals is not None:
                for request in job.requests[: len(pumps)]:
                    self._refusals.unwatch(request.room)

    def _admit(self, job: Job) -> None:
        if len(self._running) + len(job.requests) > self._max_requests:
            raise RequestFailed(f"{len(self._running)} requests run already: at most {self._max_requests} may", 503)
        if self.draining:
            raise RequestFailed("the server is shutting down", 503)

    def _begin(
        self,
        request: GenerateRequest,
        index: int,
        events: asyncio.Queue[tuple[int, Event | RequestFailed]],
        pumps: list[_Pump],
    ) -> None:
        try:
            handle = self.engine.submit(request)
        except KVBatonError as error:
            # Also for a room in use: sglang-router passes 400 on as it is, and turns 409 into 500.
            room_in_use = request.room if isinstance(error, RoomError) else None
            raise RequestFailed(str(error), 400, room_in_use) from error
        pump = _Pump(handle, index, events)
        self._running[id(pump)] = pump
        self.served += 1
        pumps.append(pump)
        if self._refusals is not None:
            self._refusals.watch(request.room, pump.refused)

    async def _tell_refusal(self, job: Job, error: RequestFailed) -> None:
        """Let the other side know that these rooms will not be served."""
        refusal = Refusal(error.status, str(error))
        for request in job.requests:
            if request.room == error.room_in_use:
                continue
            if self._refusals is not None:
                self._refusals.add(request.room, refusal)
            elif request.source:
                await asyncio.to_thread(report, request.source, request.room, refusal)

    def _check_wanted(self, waiting: Sequence[GenerateRequest], seconds: float) -> None:
        """Give up, at prefill, what nobody waits for: its decode server was never reached, or is gone."""
        refusals = self._refusals
        if refusals is None or seconds < refusals.unasked_seconds:
            return
        for request in waiting:
            if not refusals.is_wanted(request.room):
                raise RequestFailed(
                    f"no decode server has asked for room {request.room} in {refusals.unasked_seconds:g} s: the one "
                    "that got the request is gone, stands still, or was never reached",
                    503,
                )

    async def _look_for_refusals(self, waiting: Sequence[GenerateRequest]) -> None:
        async def look(source: str, room: int) -> None:
            try:
                found = await asyncio.to_thread(look_up, source, room)
            except SourceGone as error:
                raise RequestFailed(str(error), 503) from error
            if found is not None:
                raise RequestFailed(f"the prefill side refused: {found.reason}", found.status)

        # All at a time: a prefill server gives up what nobody asks for, and one late answer must not cost the others.
        await asyncio.gather(*(look(request.source, request.room) for request in waiting if request.source))

    async def _next(
        self, events: asyncio.Queue[tuple[int, Event | RequestFailed]], deadline: float, look_at: float
    ) -> tuple[int, Event] | None:
        """Return the next event, or None when it is time to look at those that are silent."""
        left = min(deadline, look_at) - time.monotonic()
        if left > 0:
            # asyncio's is another class than TimeoutError before Python 3.11.
            with contextlib.suppress(asyncio.TimeoutError):
                index, event = await asyncio.wait_for(events.get(), left)
                if isinstance(event, RequestFailed):
                    raise event
                return index, event
        if time.monotonic() >= deadline:
            raise RequestFailed(f"the request took more than {self._request_seconds:g} s", 504)
        return None


class _Pump:
    """Carries the events of one handle from the engine's thread into an event loop."""

    def __init__(self, handle: Handle, index: int, events: asyncio.Queue[tuple[int, Event | RequestFailed]]) -> None:
        self._handle = handle
        self._index = index
        self._events = events
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name=f"events-{index}", daemon=True).start()

    def cancel(self) -> None:
        self._handle.cancel()

    def fail(self, error: RequestFailed) -> None:
        """Put a failure in front of what may still come. Called on the event loop."""
        self._events.put_nowait((self._index, error))
        self._handle.cancel()

    def refused(self, refusal: Refusal) -> None:
        """Fail because the other side will not serve the room. Called from any thread."""
        error = RequestFailed(f"the decode side refused: {refusal.reason}", refusal.status)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.fail, error)

    def _run(self) -> None:
        while True:
            event = self._handle.events.get()
            # The loop may be gone when a server was stopped hard: nobody waits for the event then.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._events.put_nowait, (self._index, event))
            if isinstance(event, EndEvent):
                return


class _Writer:
    """Makes the text of one request out of its events."""

    def __init__(self, request: GenerateRequest, index: int, job: Job, tokenizer: Tokenizer | None) -> None:
        self.progress = Progress(request, index)
        self._keep_stop = job.keep_stop
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(self._decode)
        self._stops = StopStrings(job.stops)
        self._ends = {*request.sampling.stop_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
        self._held: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether the text is complete: later events say nothing more."""
        return self.progress.finish is not None

    def take(self, event: Event) -> bool:
        """Take an event in; whether it ended the text. Raises `RequestFailed` for an end without an answer."""
        progress = self.progress
        progress.new_text = ""
        if isinstance(event, EndEvent):
            self._end(event)
            return True
        progress.token_ids += event.token_ids
        tokens = [*self._held, *event.token_ids]
        # A token that may be the end of the text is not part of it: whether it is, the next event tells.
        self._held = [tokens.pop()] if tokens and tokens[-1] in self._ends else []
        self._write(self._detokenizer.add(tokens))
        return self.ended

    def _end(self, event: EndEvent) -> None:
        progress = self.progress
        progress.metrics = dict(event.metrics)
        if event.finish == "error":
            raise RequestFailed(event.error or "the engine gave no reason", 503 if event.retry else 500)
        if event.finish == "abort":
            raise RequestFailed(event.error or "the request was aborted", 503)
        stopped = event.finish == "stop"
        rest = [] if stopped and not self._keep_stop else self._held
        self._write(self._detokenizer.add(rest) + self._detokenizer.finish())
        if progress.finish is not None:
            return
        self._append(self._stops.finish())
        length = {"type": "length", "length": len(progress.token_ids)}
        progress.finish = {"type": "stop", "matched": event.matched} if stopped else length

    def _write(self, text: str) -> None:
        free, stop = self._stops.add(text)
        self._append(free + stop if stop and self._keep_stop else free)
        if stop is not None:
            self.progress.finish = {"type": "stop", "matched": stop}

    def _append(self, text: str) -> None:
        self.progress.new_text += text
        self.progress.text += text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids) if self._tokenizer else ""
