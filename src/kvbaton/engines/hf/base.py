"""What the prefill and the decode engine share: one thread, a queue in front of the pools, rows that come back late."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch

from kvbaton.engines.base import EngineInfo, GenerateRequest, Role
from kvbaton.engines.hf.forward import Runner
from kvbaton.engines.hf.pools import Pools
from kvbaton.engines.hf.requests import Job, Manager, RequestHandle
from kvbaton.engines.hf.sampling import draw_seed, stop_tokens
from kvbaton.errors import ConfigurationError, KVBatonError, RowsError
from kvbaton.protocol import Status

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
"""How often rooms are asked while nothing else is to be done."""
CLOSE_SECONDS = 10.0
"""How long `close` waits for rows that a peer may still write."""


class Engine(ABC):
    """An engine of one role over ``pools``; ``manager`` has a manager for each of their ranks (see `open_ranks`).

    All methods may be called from any thread. One thread of the engine's own runs the model. `close` closes the
    managers and the pools too.
    """

    role: Role

    def __init__(
        self, model: Any, pools: Pools, manager: Manager, *, model_path: str = "", served_model_name: str = ""
    ) -> None:
        self.model = model
        self.pools = pools
        self.manager = manager
        self.runner = Runner(model)
        config = model.config.get_text_config()
        self._info = EngineInfo(
            role=self.role,
            model_path=model_path or type(model).__name__,
            served_model_name=served_model_name or model_path or type(model).__name__,
            context_length=int(getattr(config, "max_position_embeddings", None) or pools.pool_tokens),
            vocab_size=int(config.vocab_size),
            max_running_requests=pools.slots,
            pool_tokens=pools.pool_tokens,
            page_size=pools.page_size,
        )
        self._condition = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._woken = False
        self._closing = False
        self._broken = ""
        self._waiting: list[Job] = []
        """Jobs without rows, in the order in which they came."""
        self._leaving: list[Job] = []
        """Jobs that are over, but whose rows the transfer may still touch."""
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{self.role}-engine", daemon=True)
        self._thread.start()

    # Any thread.

    def submit(self, request: GenerateRequest) -> RequestHandle:
        """Queue a request.

        Raises `RoomError` if its room is in use, and `RowsError` or `ConfigurationError` if it can never be served.
        """
        self._check(request)
        handle = RequestHandle(request, self._wake)
        sampling = request.sampling
        job = Job(handle, self._open_room(request), draw_seed(sampling), stop_tokens(self.model, sampling))
        with self._condition:
            if not self._closing and not self._broken:
                self._inbox.append(job)
                self._notify()
                return handle
        job.room.abort(f"the {self.role} engine is closed")
        job.room.close()
        raise KVBatonError(f"the {self.role} engine does not run: {self._broken or 'it was closed'}")

    def info(self) -> EngineInfo:
        """What it serves."""
        return self._info

    def healthy(self) -> str:
        """Return an empty text, or the reason why it cannot serve."""
        return self._broken or ("closed" if self._closing else "")

    def close(self) -> None:
        """End what runs, wait for rows in transfer (at most `CLOSE_SECONDS`), close managers and pools."""
        with self._condition:
            again = self._closing
            self._closing = True
            self._notify()
        self._thread.join()
        if not again:
            self.manager.close()
            self.pools.close()

    def _check(self, request: GenerateRequest) -> None:
        count, ids = len(request.input_ids), request.input_ids
        if not ids:
            raise ConfigurationError("the prompt is empty; send at least one token")
        if min(ids) < 0 or max(ids) >= self._info.vocab_size:
            wrong = max(ids) if max(ids) >= self._info.vocab_size else min(ids)
            raise ConfigurationError(f"token {wrong} is not in the vocabulary of {self._info.vocab_size} tokens")
        if count >= self._info.context_length:
            raise RowsError(
                f"the prompt has {count} tokens, but the model's context is {self._info.context_length}: "
                "shorten the prompt"
            )
        self.pools.check_fits(count)

    def _wake(self) -> None:
        with self._condition:
            self._notify()

    def _notify(self) -> None:
        self._woken = True
        self._condition.notify()

    # The engine's thread.

    @abstractmethod
    def _open_room(self, request: GenerateRequest) -> Any:
        """The sender or receiver of a request (called by `submit`)."""

    @abstractmethod
    def _advance(self) -> bool:
        """Do one piece of work: whether anything was done."""

    @abstractmethod
    def _jobs(self) -> list[Job]:
        """The jobs that hold rows and have not ended."""

    @abstractmethod
    def _drop(self, job: Job) -> None:
        """Take a job out of the lists of `_jobs`."""

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._take_in():
                self._cancel()
                progress = self._reap()
                if not self._advance() and not progress:
                    self._sleep()
        except Exception as error:
            logger.exception("%s: the engine's thread failed", self.role)
            with self._condition:
                self._broken = f"{type(error).__name__}: {error}"
        self._shut_down()

    def _take_in(self) -> bool:
        with self._condition:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            return not self._closing

    def _sleep(self) -> None:
        busy = bool(self._waiting or self._leaving or self._jobs())
        with self._condition:
            if not self._woken:
                self._condition.wait(POLL_SECONDS if busy else None)
            self._woken = False

    def _cancel(self) -> None:
        for job in [job for job in [*self._waiting, *self._jobs()] if job.handle.cancelled]:
            self._leave(job, "cancelled by the client")
            job.end("abort")

    def _fail(self, job: Job, error: str, *, retry: bool = False) -> None:
        """End a job with an error, and its room too. ``retry`` as in `EndEvent`."""
        self._leave(job, error)
        job.end("error", error=error, retry=retry)

    def _leave(self, job: Job, reason: str = "") -> None:
        """A job is over: its rows come back when the transfer is. With a ``reason`` the transfer is aborted."""
        if reason:
            job.room.abort(reason)
        job.note_transfer()
        if job in self._waiting:
            self._waiting.remove(job)
        self._drop(job)
        job.cache = None
        self._leaving.append(job)
        self._reap()

    def _reap(self) -> bool:
        """Take rows back."""
        released = [job for job in self._leaving if job.rows is None or job.room.rows_released]
        for job in released:
            self._leaving.remove(job)
            if job.rows is not None:
                self.pools.free(job.rows)
                job.rows = None
            job.room.close()
        return bool(released)

    def _admit(self, ready: Job | None) -> Job | None:
        """Give ``ready`` its rows and take it out of the queue; None if it must wait."""
        if ready is None:
            return None
        rows = self.pools.allocate(ready.prompt_tokens)
        if rows is None:
            return None
        ready.rows = rows
        self._waiting.remove(ready)
        return ready

    def _fail_waiting(self) -> None:
        """End the queued jobs whose room has failed already."""
        for job in [job for job in self._waiting if job.room.poll() is Status.FAILED]:
            self._fail(job, job.room.reason, retry=True)

    def _shut_down(self) -> None:
        self._take_in()
        reason = self._broken or f"the {self.role} engine closes"
        for job in [*self._waiting, *self._jobs()]:
            self._leave(job, reason)
            job.end("error" if self._broken else "abort", error=self._broken)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._leaving and time.monotonic() < deadline:
            if not self._reap():
                time.sleep(POLL_SECONDS)
        if self._leaving:
            logger.warning("%s: %d requests still held rows when the engine closed", self.role, len(self._leaving))
