from __future__ import annotations

from collections import Counter

import pytest
import torch
from hf_pair import GREEDY, cached_model, prompt

from kvbaton.engines.base import Sampling
from kvbaton.engines.hf import generate_single
from kvbaton.engines.hf.forward import chunks
from kvbaton.engines.hf.sampling import choose, draw_seed, stop_tokens

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = PROBABILITIES.log()


def drawn(sampling: Sampling, count: int = 4000) -> dict[int, float]:
    tokens = Counter(choose(LOGITS, sampling, seed=11, step=step) for step in range(count))
    return {token: number / count for token, number in tokens.items()}


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=1)])
def test_greedy_takes_the_largest(sampling):
    assert drawn(sampling, 5) == {1: 1.0}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}),
        (Sampling(top_k=2), {1: 0.4 / 0.65, 3: 0.25 / 0.65}),
        # 0.4 + 0.25 does not reach 0.7, so the third is kept as well.
        (Sampling(top_p=0.7), {1: 0.4 / 0.85, 3: 0.25 / 0.85, 4: 0.2 / 0.85}),
        (Sampling(top_p=0.3), {1: 1.0}),
        # 0.4 / 0.65 exceeds 0.6 alone.
        (Sampling(top_k=2, top_p=0.6), {1: 1.0}),
        (Sampling(temperature=0.5), {0: 0.01, 1: 0.16, 2: 0.0025, 3: 0.0625, 4: 0.04}),
    ],
)
def test_tokens_come_as_often_as_their_probability(sampling, expected):
    total = sum(expected.values())
    found = drawn(sampling)
    assert found.keys() <= expected.keys()
    for token, probability in expected.items():
        assert found.get(token, 0.0) == pytest.approx(probability / total, abs=0.03)


def test_a_token_depends_on_seed_and_position_alone():
    sampling = Sampling(seed=3)
    assert [choose(LOGITS, sampling, 3, step) for step in range(50)] == [
        choose(LOGITS, sampling, 3, step) for step in range(50)
    ]
    assert [choose(LOGITS, sampling, 3, step) for step in range(50)] != [
        choose(LOGITS, sampling, 4, step) for step in range(50)
    ]


def test_seeds_are_taken_or_drawn():
    assert draw_seed(Sampling(seed=0)) == 0
    assert draw_seed(Sampling()) != draw_seed(Sampling())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {2}),
        (Sampling(stop_token_ids=(9, 10)), {2, 9, 10}),
        (Sampling(ignore_eos=True), set()),
        (Sampling(ignore_eos=True, stop_token_ids=(9,)), {9}),
    ],
)
def test_stop_tokens(sampling, expected):
    assert stop_tokens(cached_model("qwen3"), sampling) == expected


@pytest.mark.parametrize(
    ("tokens", "size", "expected"), [(5, None, [(0, 5)]), (5, 2, [(0, 2), (2, 4), (4, 5)]), (4, 4, [(0, 4)])]
)
def test_chunks(tokens, size, expected):
    assert list(chunks(tokens, size)) == expected


def test_the_reference_agrees_with_transformers_own_generation():
    model, ids = cached_model("qwen3"), prompt(30)
    own = model.generate(torch.tensor([ids]), max_new_tokens=GREEDY.max_new_tokens, do_sample=False, eos_token_id=None)
    assert tuple(own[0, 30:].tolist()) == generate_single(model, ids, GREEDY).token_ids
