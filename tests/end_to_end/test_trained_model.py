"""The trained model: accuracy through two prefill and two decode servers is exactly that of a single process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

pytest.importorskip("sglang_router", reason="sglang-router is not installed: make setup")

from kvbaton.demo.ask import Answer, ask_all
from kvbaton.demo.cases import TRAINED_MODEL, Question, trained_questions
from kvbaton.demo.compare import THREADS, SingleProcess, is_right
from kvbaton.serve.processes import PDCluster

pytestmark = pytest.mark.end_to_end

HELD_OUT = 200
CORRUPTED = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PDCluster]:
    options = {"threads": THREADS}
    with PDCluster(str(TRAINED_MODEL), 2, 2, logs=tmp_path_factory.mktemp("logs"), options=options) as running:
        yield running


@pytest.fixture(scope="module")
def single() -> SingleProcess:
    return SingleProcess(TRAINED_MODEL)


def _client() -> httpx.Client:
    return httpx.Client(timeout=120, trust_env=False)


def _accuracy(questions: Sequence[Question], answers: Sequence[Answer]) -> float:
    return sum(is_right(*pair) for pair in zip(questions, answers, strict=True)) / len(questions)


@pytest.mark.timeout(900)
def test_accuracy_equals_the_single_process(cluster: PDCluster, single: SingleProcess) -> None:
    questions = trained_questions(HELD_OUT, first_seed=10_000)
    answers = ask_all(cluster.url, questions, at_once=8)
    alone = [single.answer(question) for question in questions]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert _accuracy(questions, answers) == _accuracy(questions, alone) >= 0.98


def test_every_server_took_part(cluster: PDCluster) -> None:
    for log in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert (cluster.logs / f"{log}.log").exists()
    before = _served(cluster)
    ask_all(cluster.url, trained_questions(8), at_once=4)
    after = _served(cluster)
    assert all(late > early for early, late in zip(before, after, strict=True)), (before, after)


def _served(cluster: PDCluster) -> list[int]:
    with _client() as client:
        return [
            client.get(f"{url}/server_info").json()["requests_served"]
            for url in [*cluster.prefill_urls, *cluster.decode_urls]
        ]


@pytest.mark.parametrize("corrupt", ["state", "page"])
def test_corruption_is_seen(corrupt: str, single: SingleProcess, tmp_path: Path) -> None:
    questions = trained_questions(CORRUPTED, first_seed=20_000)
    alone = _accuracy(questions, [single.answer(question) for question in questions])
    options = {"threads": THREADS}
    with PDCluster(
        str(TRAINED_MODEL), logs=tmp_path, options=options, decode_options={"corrupt": corrupt}
    ) as corrupted:
        answers = ask_all(corrupted.url, questions, at_once=4)
    assert _accuracy(questions, answers) <= alone - 0.2


def test_streamed_answers_are_the_whole_ones(cluster: PDCluster, single: SingleProcess) -> None:
    question = trained_questions(1)[0]
    expected = single.answer(question)
    body = {
        "text": question.text,
        "sampling_params": {"temperature": 0, "max_new_tokens": question.max_new_tokens},
        "stream": True,
    }
    with _client() as client, client.stream("POST", f"{cluster.url}/generate", json=body) as reply:
        assert reply.status_code == 200
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert len(parts) > 3
    assert parts[-1]["text"] == expected.text
    assert parts[-1]["meta_info"]["finish_reason"]["type"] in ("stop", "length")


def test_openai_apis_answer_through_the_router(cluster: PDCluster, single: SingleProcess) -> None:
    question = trained_questions(1)[0]
    expected = single.answer(question).text
    body = {"model": "recall", "prompt": question.text, "max_tokens": question.max_new_tokens, "temperature": 0}
    with _client() as client:
        whole = client.post(f"{cluster.url}/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        assert whole.json()["choices"][0]["text"] == expected
        with client.stream("POST", f"{cluster.url}/v1/completions", json={**body, "stream": True}) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
        text = "".join(
            choice["text"] for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]
        )
        assert text == expected
        chat = client.post(
            f"{cluster.url}/v1/chat/completions",
            json={
                "model": "recall",
                "messages": [{"role": "user", "content": question.text}],
                "max_tokens": 16,
                "temperature": 0,
            },
        )
        assert chat.status_code == 200, chat.text
        assert chat.json()["choices"][0]["message"]["role"] == "assistant"
        models = client.get(f"{cluster.url}/v1/models")
        assert models.status_code == 200, models.text


def test_sampled_answers_follow_their_seed(cluster: PDCluster) -> None:
    question = trained_questions(1)[0]
    # The trained model is so sure that only a high temperature moves it.
    params = {"temperature": 20.0, "max_new_tokens": 16, "ignore_eos": True}
    with _client() as client:

        def sample(seed: int) -> list[int]:
            body = {"text": question.text, "sampling_params": {**params, "sampling_seed": seed}}
            return client.post(f"{cluster.url}/generate", json=body).json()["output_ids"]

        first, again, other = sample(1), sample(1), sample(2)
    assert first == again
    assert first != other
