"""The prefill engine: runs prompts, writes their caches into pages and slots, and sends them."""

from __future__ import annotations

import time
from typing import Any

from kvbaton.engines.base import GenerateRequest, Role
from kvbaton.engines.hf.base import Engine
from kvbaton.engines.hf.pools import Pools, merged
from kvbaton.engines.hf.requests import Job, Manager
from kvbaton.engines.hf.rows import Aux
from kvbaton.engines.hf.sampling import choose
from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.protocol import Status


class PrefillEngine(Engine):
    """Prefills one prompt after the other, in pieces of ``chunk_tokens`` (None: at once).

    Full pages are sent after every piece, the states and what is left after the last one. A prompt is not begun before
    the decode side has offered its rows, so that two engines whose pools are full can never wait for each other. A
    request ends with the first token of the answer and ``EndEvent("length")``, once its transfer is over.
    """

    role: Role = "prefill"

    def __init__(
        self,
        model: Any,
        pools: Pools,
        manager: Manager,
        *,
        chunk_tokens: int | None = None,
        model_path: str = "",
        served_model_name: str = "",
    ) -> None:
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ConfigurationError(
                f"chunk_tokens is {chunk_tokens}; it must be at least 1, or None for whole prompts"
            )
        self.chunk_tokens = chunk_tokens
        self._current: Job | None = None
        self._sending: list[Job] = []
        super().__init__(model, pools, manager, model_path=model_path, served_model_name=served_model_name)

    def _open_room(self, request: GenerateRequest) -> Any:
        return self.manager.sender(request.room)

    def _jobs(self) -> list[Job]:
        return [*self._sending, *([self._current] if self._current else [])]

    def _drop(self, job: Job) -> None:
        if job is self._current:
            self._current = None
        if job in self._sending:
            self._sending.remove(job)

    def _advance(self) -> bool:
        self._fail_waiting()
        progress = self._finish_sent()
        if self._current is None:
            offered = (job for job in self._waiting if job.room.poll() is Status.TRANSFERRING)
            self._current = self._admit(next(offered, None))
        if self._current is None:
            return progress
        job = self._current
        try:
            self._chunk(job)
        except (KVBatonError, RuntimeError) as error:
            self._fail(job, f"prefill failed: {error}")
        return True

    def _finish_sent(self) -> bool:
        over = [job for job in self._jobs() if job.room.poll().terminal]
        for job in over:
            if job.room.poll() is Status.FAILED:
                self._fail(job, job.room.reason, retry=True)
            else:
                self._leave(job)
                job.end("length")
        return bool(over)

    def _chunk(self, job: Job) -> None:
        rows, total = job.rows, job.prompt_tokens
        assert rows is not None
        if job.cache is None:
            job.cache = self.pools.description.new_cache()
        first, last = job.done, min(total, job.done + (self.chunk_tokens or total))
        logits = self.runner.extend(job.cache, job.request.input_ids[first:last])
        self.pools.write_tokens(job.cache, rows, (first, last))
        job.done = last
        if last < total:
            full = last // self.pools.granularity * self.pools.granularity
            if full > job.sent:
                job.room.send(self.pools.streamed_rows(rows, (job.sent, full)), (job.sent, full), self.pools.written())
                job.sent = full
            return
        token = choose(logits, job.request.sampling, job.seed, 0)
        self.pools.write_state(job.cache, rows)
        job.finished_at = time.time()
        self.pools.write_aux(rows, Aux(token, total, job.finished_at))
        written = self.pools.written()
        for held, latest in self.pools.latest_rows(rows).items():
            job.room.send(latest, held, written)
        rest = (job.sent, total)
        left = merged(self.pools.streamed_rows(rows, rest), self.pools.state_rows(rows))
        job.room.finish(left, rest, self.pools.aux_slots(rows), written)
        job.cache = None
        self._current = None
        self._sending.append(job)
        job.tokens.append(token)
        job.emit(token)
