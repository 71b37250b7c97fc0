"""How the next token is chosen, the same way on every side.

The random number of a token depends on the request's seed and the token's position in the answer alone: no state of a
generator has to travel from prefill to decode.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch

from kvbaton.engines.base import Sampling

_MASK = (1 << 63) - 1


def draw_seed(sampling: Sampling) -> int:
    """The seed of a request: its own, or a random one where it has none."""
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


def choose(logits: torch.Tensor, sampling: Sampling, seed: int, step: int) -> int:
    """The token for ``logits`` [vocabulary]; ``step`` counts the tokens of the answer from 0."""
    if sampling.temperature <= 0.0 or sampling.top_k == 1:
        return int(logits.argmax())
    scores = logits.cpu().double() / sampling.temperature
    ordered, tokens = scores.sort(descending=True, stable=True)
    if sampling.top_k > 0:
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    cumulative = ordered.softmax(0).cumsum(0)
    if sampling.top_p < 1.0:
        # The first token that reaches top_p is kept.
        kept = int((cumulative < sampling.top_p).sum()) + 1
        cumulative = cumulative[:kept]
    generator = torch.Generator().manual_seed((seed * 0x5851F42D4C957F2D + step * 0x14057B7EF767814F) & _MASK)
    threshold = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
    return int(tokens[min(int(torch.searchsorted(cumulative, threshold, right=True)), len(cumulative) - 1)])


def stop_tokens(model: Any, sampling: Sampling) -> frozenset[int]:
    """The tokens that end an answer."""
    if sampling.ignore_eos:
        return frozenset(sampling.stop_token_ids)
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return frozenset([*listed, *sampling.stop_token_ids])
