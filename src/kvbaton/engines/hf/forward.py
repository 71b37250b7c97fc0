"""The forwards that every engine and the single-process reference share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvbaton.engines.base import Finish, Sampling
from kvbaton.engines.hf.sampling import choose, draw_seed, stop_tokens
from kvbaton.errors import ConfigurationError


class Runner:
    """Runs a causal language model over caches."""

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        if "cache" not in parameters:
            raise ConfigurationError(f"{type(model).__name__}.forward takes no cache; use transformers 5.24 or later")
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @torch.no_grad()
    def extend(self, cache: Any, ids: Sequence[int]) -> torch.Tensor:
        """Append ``ids`` to ``cache``; the logits [vocabulary] after the last of them."""
        batch = torch.tensor([list(ids)], dtype=torch.long, device=self.model.device)
        output = self.model(input_ids=batch, cache=cache, use_cache=True, **self._last_only)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    @torch.no_grad()
    def step(self, cache: Any, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append one token to each request of a stacked ``cache``; the logits [requests, vocabulary].

        ``lengths`` are those before the step. Where they differ, the shorter requests are padded on the left.
        """
        batch = torch.tensor([[token] for token in tokens], dtype=torch.long, device=self.model.device)
        options: dict[str, Any] = {}
        if len(set(lengths)) > 1:
            longest = max(lengths)
            held = torch.tensor(list(lengths), device=self.model.device)
            positions = torch.arange(longest + 1, device=self.model.device)
            options["attention_mask"] = (positions[None, :] >= (longest - held)[:, None]).long()
            options["position_ids"] = held[:, None]
        output = self.model(input_ids=batch, cache=cache, use_cache=True, **options)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def chunks(tokens: int, size: int | None) -> Iterator[tuple[int, int]]:
    """Cut ``tokens`` tokens into (first, last) of at most ``size``; None is one chunk."""
    step = size or tokens
    for first in range(0, tokens, step):
        yield first, min(first + step, tokens)


class Generated(NamedTuple):
    """An answer: its tokens, why it ended, and the token that ended it, which is not among them."""

    token_ids: tuple[int, ...]
    finish: Finish
    matched: int | None = None


def generate_single(
    model: Any, ids: Sequence[int], sampling: Sampling | None = None, split: int | None = None
) -> Generated:
    """Generate in this process alone: the reference that prefill and decode engines are compared with.

    ``split`` is the ``chunk_tokens`` of the prefill engine: the prompt is run in pieces of so many tokens, or at once.
    """
    sampling = sampling or Sampling()
    runner, seed, stops = Runner(model), draw_seed(sampling), stop_tokens(model, sampling)
    cache = DynamicCache(config=model.config)
    logits = torch.empty(0)
    for first, last in chunks(len(ids), split):
        logits = runner.extend(cache, ids[first:last])
    tokens: list[int] = []
    while len(tokens) < sampling.max_new_tokens:
        token = choose(logits, sampling, seed, len(tokens))
        if token in stops:
            return Generated(tuple(tokens), "stop", token)
        tokens.append(token)
        if len(tokens) < sampling.max_new_tokens:
            logits = runner.step(cache, [token], [len(ids) + len(tokens) - 1])[0]
    return Generated(tuple(tokens), "length")
