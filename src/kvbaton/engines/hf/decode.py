"""The decode engine: receives caches into its pages and slots, and generates from them, several requests at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvbaton.engines.base import GenerateRequest, Role
from kvbaton.engines.hf.base import Engine
from kvbaton.engines.hf.batching import stack, unstack
from kvbaton.engines.hf.exchange import Exchange
from kvbaton.engines.hf.pools import Pools
from kvbaton.engines.hf.requests import Job, Manager
from kvbaton.engines.hf.rows import Allocation
from kvbaton.engines.hf.sampling import choose
from kvbaton.errors import ConfigurationError, KVBatonError
from kvbaton.protocol import Status

Corrupt = Literal["none", "page", "state"]
"""What to overwrite after the transfer: nothing, one page, or the state slot; in every layer."""
EXCHANGE_SECONDS = 30.0
"""How long a request waits, after its own transfer, for what other processes of the engine received."""


@dataclass(eq=False)
class _Group:
    """Requests that step together."""

    jobs: list[Job]
    cache: Any


class DecodeEngine(Engine):
    """Decodes concurrent requests, each of them in turn or up to ``max_batch`` in one step.

    With ``max_batch`` 1 an answer is bit for bit that of `generate_single`. Above that, requests whose caches can be
    stacked step together: those of models with full attention and fixed-size states only are padded to one length, of
    any other model requests of equal length are stacked. Sums are then taken in another order, so that logits differ in
    their last digits, and a token where the two best are as good as equal.

    The pages of a request are held until it ends. They hold its prompt; what is generated lives in the cache object.

    ``corrupt`` deliberately overwrites page ``corrupt_page`` of each request (modulo their number: -1 is the last), or
    its state slot, with random values after the transfer: whoever compares answers must see it.

    ``exchange`` is needed where other processes hold ranks of this engine: each of them gets the same requests.
    """

    role: Role = "decode"

    def __init__(
        self,
        model: Any,
        pools: Pools,
        manager: Manager,
        *,
        max_batch: int = 8,
        corrupt: Corrupt = "none",
        corrupt_page: int = 0,
        exchange: Exchange | None = None,
        model_path: str = "",
        served_model_name: str = "",
    ) -> None:
        if max_batch < 1:
            raise ConfigurationError(f"max_batch is {max_batch}; it must be at least 1")
        has_tokens = {place.kind.has_tokens and not place.kind.tail for place in pools.description.places}
        if corrupt not in get_args(Corrupt):
            raise ConfigurationError(f"corrupt is {corrupt!r}; choose one of {', '.join(get_args(Corrupt))}")
        if (corrupt == "state" and False not in has_tokens) or (corrupt == "page" and True not in has_tokens):
            what = "pages" if corrupt == "state" else "states"
            raise ConfigurationError(f"corrupt={corrupt!r}: the cache of {type(model).__name__} has {what} only")
        if exchange is None and not pools.complete:
            raise ConfigurationError(
                f"this process holds {len(pools.ranks)} of {pools.grid.size} decode ranks; pass exchange=, which "
                "brings what the others receive"
            )
        self.exchange = None if pools.complete else exchange
        self.max_batch = max_batch
        self.corrupt = corrupt
        self.corrupt_page = corrupt_page
        self._receiving: list[Job] = []
        self._groups: list[_Group] = []
        super().__init__(model, pools, manager, model_path=model_path, served_model_name=served_model_name)

    def _open_room(self, request: GenerateRequest) -> Any:
        return self.manager.receiver(request.room, request.source or None)

    def _jobs(self) -> list[Job]:
        return [*self._receiving, *(job for group in self._groups for job in group.jobs)]

    def _drop(self, job: Job) -> None:
        if job in self._receiving:
            self._receiving.remove(job)
        for group in self._groups:
            if job in group.jobs:
                self._split(group)
                group.jobs.remove(job)
        self._groups = [group for group in self._groups if group.jobs]

    def _advance(self) -> bool:
        self._fail_waiting()
        progress = False
        while (job := self._admit(self._waiting[0] if self._waiting else None)) is not None:
            progress = True
            self._offer(job)
        for job in [job for job in self._receiving if job.room.poll().terminal]:
            if job.room.poll() is Status.FAILED:
                self._fail(job, job.room.reason, retry=True)
            elif self._arrived(job):
                self._begin(job)
            else:
                continue
            progress = True
        if self._groups:
            self._regroup()
            for group in list(self._groups):
                self._step_or_fail(group)
            progress = True
        return progress

    # Receiving.

    def _offer(self, job: Job) -> None:
        rows = job.rows
        assert rows is not None
        self._receiving.append(job)
        job.opened_at = time.time()
        try:
            job.room.offer(self.pools.all_rows(rows), rows.tokens, self.pools.aux_slots(rows))
        except KVBatonError as error:
            self._fail(job, str(error))

    def _arrived(self, job: Job) -> bool:
        """The transfer to the ranks of this process is over: whether the others' part of the cache is here too."""
        if self.exchange is None:
            return True
        if not job.shared_at:
            assert job.rows is not None
            self._corrupt(job.rows)
            job.shared_at = time.monotonic()
            self.exchange.put(job.request.room, self.pools.pack(job.rows))
        job.others = self.exchange.take(job.request.room)
        if job.others is None and time.monotonic() - job.shared_at > EXCHANGE_SECONDS:
            self._fail(job, f"what other processes of this engine received did not come within {EXCHANGE_SECONDS:g} s")
        return job.others is not None

    def _begin(self, job: Job) -> None:
        """The transfer is over: take the first token and build the cache."""
        rows = job.rows
        assert rows is not None
        if not job.shared_at:
            self._corrupt(rows)
        aux = self.pools.read_aux(rows, job.others)
        job.finished_at = aux.finished_at
        job.note_transfer()
        if aux.prompt_tokens != job.prompt_tokens:
            self._fail(
                job,
                f"the prefill side sent the cache of {aux.prompt_tokens} tokens, the prompt here has "
                f"{job.prompt_tokens}: both sides must get the same request",
            )
            return
        if job.request.sampling.max_new_tokens < 1:
            self._end(job, "length")
        elif self._accept(job, aux.first_token):
            self._receiving.remove(job)
            job.cache = self.pools.read(rows, job.others)
            job.others = None
            self._groups.append(_Group([job], None))

    def _corrupt(self, rows: Allocation) -> None:
        if self.corrupt == "page":
            self.pools.scramble_page(rows, self.corrupt_page)
        elif self.corrupt == "state":
            self.pools.scramble_state(rows)

    # Decoding.

    def _ending(self, job: Job, token: int) -> Literal["stop", "length"] | None:
        """How the answer ends with ``token``; None if it goes on."""
        if token in job.stops:
            return "stop"
        count = len(job.tokens) + 1
        full = job.prompt_tokens + count >= self._info.context_length
        return "length" if full or count >= job.request.sampling.max_new_tokens else None

    def _accept(self, job: Job, token: int) -> bool:
        """Pass a token on, and the end if it is one; whether the answer goes on."""
        ending = self._ending(job, token)
        if ending == "stop":
            self._end(job, "stop", token)
            return False
        job.tokens.append(token)
        job.emit(token)
        if ending:
            self._end(job, ending)
        return ending is None

    def _end(self, job: Job, finish: Literal["stop", "length"], matched: int | None = None) -> None:
        self._leave(job)
        job.end(finish, matched)

    def _regroup(self) -> None:
        """Put requests that can step together into one group; groups that stay as they are keep their cache."""
        wanted = list(self._partition([job for group in self._groups for job in group.jobs]))
        kept = [group for group in self._groups if group.jobs in wanted]
        for group in self._groups:
            if group not in kept:
                self._split(group)
        made = [_Group(jobs, None) for jobs in wanted if all(jobs != group.jobs for group in kept)]
        self._groups = kept + made

    def _partition(self, jobs: Iterable[Job]) -> Iterable[list[Job]]:
        by_key: dict[int, list[Job]] = {}
        for job in jobs:
            by_key.setdefault(0 if self.pools.description.can_pad else job.cached, []).append(job)
        for together in by_key.values():
            for start in range(0, len(together), self.max_batch):
                yield together[start : start + self.max_batch]

    def _step_or_fail(self, group: _Group) -> None:
        try:
            self._step(group)
        except (KVBatonError, RuntimeError) as error:
            group.cache = None
            for job in list(group.jobs):
                self._fail(job, f"decoding failed: {error}")

    def _step(self, group: _Group) -> None:
        lengths = [job.cached for job in group.jobs]
        if group.cache is None:
            caches = [job.cache for job in group.jobs]
            group.cache = caches[0] if len(caches) == 1 else stack(self.pools.description, caches, lengths)
            for job in group.jobs:
                job.cache = None
        logits = self.runner.step(group.cache, [job.tokens[-1] for job in group.jobs], lengths)
        chosen = [
            choose(row, job.request.sampling, job.seed, len(job.tokens))
            for job, row in zip(group.jobs, logits, strict=True)
        ]
        if any(self._ending(job, token) for job, token in zip(group.jobs, chosen, strict=True)):
            # The cache is one token ahead of the jobs until they accept theirs.
            self._split(group, ahead=1)
        for job, token in zip(list(group.jobs), chosen, strict=True):
            self._accept(job, token)

    def _split(self, group: _Group, ahead: int = 0) -> None:
        """Give each request its own cache back. The cache is ``ahead`` tokens ahead of what the jobs count."""
        if group.cache is None:
            return
        lengths = [job.cached + ahead for job in group.jobs]
        caches = [group.cache] if len(lengths) == 1 else unstack(self.pools.description, group.cache, lengths)
        for job, cache in zip(group.jobs, caches, strict=True):
            job.cache = cache
        group.cache = None
