from __future__ import annotations

import pytest
import torch
from hf_pair import cached_model, prompt, single

from kvbaton.engines.hf import ARCHITECTURES
from kvbaton.engines.hf.batching import stack, unstack
from kvbaton.engines.hf.caches import describe
from kvbaton.engines.hf.forward import Runner


def prefilled(name: str, lengths: list[int]):
    description, runner = describe(cached_model(name)), Runner(cached_model(name))
    caches = [description.new_cache() for _ in lengths]
    answers = [
        [int(runner.extend(cache, prompt(length, seed)).argmax())]
        for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True))
    ]
    return description, runner, caches, answers


def lengths_for(name: str) -> list[int]:
    return [3, 30, 17, 64] if describe(cached_model(name)).can_pad else [30, 30, 30]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_was_stacked_comes_apart_as_it_was(name):
    lengths = lengths_for(name)
    description, _, caches, _ = prefilled(name, lengths)
    apart = unstack(description, stack(description, caches, lengths), lengths)
    for cache, copied in zip(caches, apart, strict=True):
        for place in description.places:
            expected, found = place.get(cache), place.get(copied)
            assert (expected is None) == (found is None)
            assert expected is None or torch.equal(expected, found)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stacked_requests_get_the_logits_of_each_alone(name):
    lengths = lengths_for(name)
    description, runner, caches, first = prefilled(name, lengths)
    expected = [single(name, prompt(length, seed)).token_ids for seed, length in enumerate(lengths)]
    assert [answer[0] for answer in expected] == [tokens[0] for tokens in first]
    stacked = stack(description, caches, lengths)
    alone = unstack(description, stacked, lengths)
    for step in range(8):
        tokens = [answer[step] for answer in expected]
        together = runner.step(stacked, tokens, lengths)
        each = [runner.step(cache, [token], [0])[0] for cache, token in zip(alone, tokens, strict=True)]
        # Sums are taken in another order; the logits spread over several units.
        assert torch.allclose(together, torch.stack(each), rtol=0.0, atol=1e-2)
        lengths = [length + 1 for length in lengths]
        if step == 4:
            stacked = stack(description, unstack(description, stacked, lengths), lengths)
