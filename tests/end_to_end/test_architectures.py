"""Every architecture through real processes, real sockets and the real router, against a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang_router", reason="sglang-router is not installed: make setup")

from kvbaton.demo.ask import ask_all
from kvbaton.demo.cases import CACHE_OF, Question, architecture_cases
from kvbaton.demo.compare import THREADS, SingleProcess
from kvbaton.engines.hf import ARCHITECTURES
from kvbaton.serve.processes import PDCluster

pytestmark = pytest.mark.end_to_end

EXPECTED_COMPONENTS = {
    "qwen3": {"kv"},
    "qwen3_next": {"kv", "conv", "recurrent"},
    "qwen3_5": {"kv", "conv", "recurrent"},
    "gemma3": {"kv", "window"},
    "gpt_oss": {"kv", "window"},
    "mamba2": {"conv", "recurrent"},
    "falcon_h1": {"kv", "conv", "recurrent"},
}


def test_every_architecture_is_a_case() -> None:
    assert set(CACHE_OF) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_answers_are_those_of_a_single_process(name: str, tmp_path: Path) -> None:
    (case,) = architecture_cases([name], tmp_path, prompts=5)
    shortest = Question("a", 8)
    questions = [*case.questions, shortest]
    # One request in a step: with random weights two tokens can be as good as equal, and a batch sums in another order.
    options = {"threads": THREADS}
    with PDCluster(
        str(case.folder), logs=tmp_path / "logs", options=options, decode_options={"max_batch": 1}
    ) as cluster:
        answers = ask_all(cluster.url, questions, at_once=3)
    single = SingleProcess(case.folder)
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == single.answer(question).token_ids
        assert len(answer.token_ids) == question.max_new_tokens
    longest = max(answers, key=lambda answer: sum(answer.bytes.values()))
    assert all(longest.bytes.values())
    assert EXPECTED_COMPONENTS.get(name, set()) <= set(longest.bytes)
    assert len({answer.token_ids for answer in answers}) == len(questions)
