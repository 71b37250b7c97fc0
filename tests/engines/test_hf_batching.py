from __future__ import annotations

import pytest
import torch
from hf_pair import GREEDY, cached_model, prompt, single

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
def test_stacked_requests_answer_as_each_alone(name):
    lengths = lengths_for(name)
    description, runner, caches, answers = prefilled(name, lengths)
    expected = [list(single(name, prompt(length, seed)).token_ids) for seed, length in enumerate(lengths)]
    stacked = stack(description, caches, lengths)
    while len(answers[0]) < GREEDY.max_new_tokens:
        logits = runner.step(stacked, [answer[-1] for answer in answers], lengths)
        lengths = [length + 1 for length in lengths]
        for answer, row in zip(answers, logits, strict=True):
            answer.append(int(row.argmax()))
        if len(answers[0]) == 8:
            stacked = stack(description, unstack(description, stacked, lengths), lengths)
    assert answers == expected
