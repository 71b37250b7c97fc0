"""A prefill and a decode engine of one tiny model in this process, joined by real managers."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import torch

from kvbaton.engines.base import EndEvent, GenerateRequest, Sampling
from kvbaton.engines.hf import (
    DecodeEngine,
    Engine,
    Generated,
    Pools,
    PrefillEngine,
    RequestHandle,
    generate_single,
    make_model,
    open_engine,
)
from kvbaton.engines.hf.caches import describe
from kvbaton.engines.hf.forward import Runner
from kvbaton.errors import RoomError
from kvbaton.registry import MemoryRegistry

WAIT_SECONDS = 60.0
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)
_rooms = itertools.count(1)

cached_model = functools.lru_cache(maxsize=None)(make_model)


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids that are not special."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return tuple(torch.randint(4, 256, (tokens,), generator=generator).tolist())


@functools.cache
def clear_prompt(name: str, tokens: int) -> tuple[int, ...]:
    """A prompt whose greedy answer is never a close call, so that rounding cannot change it."""
    runner = Runner(cached_model(name))
    for seed in itertools.count():
        ids = prompt(tokens, seed)
        answer = single(name, ids).token_ids
        cache, margins = describe(cached_model(name)).new_cache(), []
        for piece in (ids, *((token,) for token in answer[:-1])):
            best = runner.extend(cache, piece).topk(2).values
            margins.append(float(best[0] - best[1]))
        if min(margins) > 0.02:
            return ids
    raise AssertionError("unreachable")


@functools.cache
def single(name: str, ids: tuple[int, ...], sampling: Sampling = GREEDY, split: int | None = None) -> Generated:
    """What one process answers."""
    return generate_single(cached_model(name), ids, sampling, split)


class Pair:
    """Two engines of one model; each has its own pools. Use as a context manager."""

    def __init__(
        self,
        name: str,
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        chunk_tokens: int | None = None,
        **decode_options: Any,
    ) -> None:
        registry = MemoryRegistry()
        model = cached_model(name)
        common: dict[str, Any] = {
            "registry": registry,
            "pool_tokens": 1024,
            "max_running_requests": 8,
            "manager_options": {"transports": ("shm",)},
        }
        self.prefill: PrefillEngine = open_engine(
            model, role="prefill", chunk_tokens=chunk_tokens, **{**common, **(prefill or {})}
        )
        # One request in a step: the answers are then bit for bit those of a single process, whatever the model.
        decoding = {**common, "max_batch": 1, **(decode or {}), **decode_options}
        self.decode: DecodeEngine = open_engine(model, role="decode", **decoding)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.decode.close()
        self.prefill.close()

    def submit(self, ids: tuple[int, ...], sampling: Sampling = GREEDY) -> tuple[RequestHandle, RequestHandle]:
        """Send one request to both sides; the handles of prefill and decode."""
        room = next(_rooms)
        request = GenerateRequest(f"request {room}", ids, room, sampling)
        return self.prefill.submit(request), self.decode.submit(request)

    def answers(self, prompts: list[tuple[int, ...]], sampling: Sampling = GREEDY) -> list[tuple[int, ...]]:
        """Send all prompts at once; the tokens of each."""
        handles = [self.submit(ids, sampling) for ids in prompts]
        results = []
        for sent, received in handles:
            tokens, end = received.result(WAIT_SECONDS)
            assert (end.finish, end.error) == ("length", "")
            first, prefill_end = sent.result(WAIT_SECONDS)
            assert (prefill_end.finish, prefill_end.error) == ("length", "")
            assert first == tokens[:1]
            results.append(tokens)
        return results

    def settle(self) -> None:
        """Wait until every row of both pools is free again."""
        for engine in (self.prefill, self.decode):
            wait_until_free(engine.pools)


def wait_until_free(pools: Pools) -> None:
    """Wait until every row is free; fails with the counts if that does not happen."""
    deadline = time.monotonic() + WAIT_SECONDS
    while any(free < total for free, total in pools.free_rows().values()):
        assert time.monotonic() < deadline, f"rows were not given back: {pools.free_rows()}"
        time.sleep(0.002)


def end_of(handle: RequestHandle) -> EndEvent:
    """The end of a request, whatever tokens came before."""
    return handle.result(WAIT_SECONDS)[1]


def submit_when_free(engine: Engine, request: GenerateRequest) -> RequestHandle:
    """Submit a request whose room number another request has just left: managers close rooms a little later."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return engine.submit(request)
        except RoomError:
            assert time.monotonic() < deadline
            time.sleep(0.002)
