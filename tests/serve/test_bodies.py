from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import CharTokenizer
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engines.base import EngineInfo, Sampling
from kvbaton.serve.bodies import BadRequest, Parser

ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def parser(role: str = "decode", *, tokenizer: bool = True) -> Parser:
    info = EngineInfo(role, "some/model", "fake", context_length=64, vocab_size=1000)  # type: ignore[arg-type]
    return Parser(info, CharTokenizer() if tokenizer else None)


def raw(**fields: Any) -> bytes:
    return json.dumps({**ROOM, **fields}).encode()


def test_a_prompt_of_text_or_ids() -> None:
    (request,) = parser().generate(raw(text="ab"), "r").requests
    assert request.input_ids == (107, 108)
    assert (request.request_id, request.room, request.source) == ("r", 7, "http://10.0.0.1:8998")
    (request,) = parser().generate(raw(input_ids=[5, 6]), "r").requests
    assert request.input_ids == (5, 6)


def test_sglang_s_sampling_fields() -> None:
    params = {
        "max_new_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "stop": ["x", ""],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "sampling_seed": 11,
        "n": 1,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    job = parser().generate(raw(text="a", sampling_params=params, stream=True), "r")
    assert job.requests[0].sampling == Sampling(3, 0.0, 0.5, 4, (9,), True, 11)
    assert job.stops == ("x",)
    assert job.stream


def test_what_the_router_adds_is_taken_as_it_is() -> None:
    body = (
        b'{"text":"hi","model":null,"sampling_params":{"temperature":0.5},"return_text_in_logprobs":false,"stream":false,'
        b'"log_metrics":true,"return_hidden_states":false,"background":false,"no_logs":false,"return_bytes":false,'
        b'"return_entropy":false,"rid":"abc","bootstrap_host":"127.0.0.1","bootstrap_port":42002,'
        b'"bootstrap_room":8509556732199856325}'
    )
    (request,) = parser().generate(body, "r").requests
    assert (request.request_id, request.room) == ("abc", 8509556732199856325)


def test_openai_fields() -> None:
    job = parser().completion(
        raw(prompt="a", max_tokens=2, temperature=0, seed=3, stop="z", stream_options={"include_usage": True}), "r"
    )
    assert job.requests[0].sampling == Sampling(2, 0.0, 1.0, 0, (), False, 3)
    assert (job.stops, job.include_usage) == (("z",), True)
    job = parser().chat(raw(**CHAT, max_tokens=2, max_completion_tokens=4), "r")
    assert job.requests[0].sampling.max_new_tokens == 4
    assert job.requests[0].input_ids == tuple(CharTokenizer().encode("<user>hi<assistant>"))


def test_parts_of_text_make_one_content() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    first = parser().chat(raw(messages=[{"role": "user", "content": parts}]), "r")
    assert first.requests[0].input_ids == parser().chat(raw(**CHAT), "r").requests[0].input_ids


@pytest.mark.parametrize(("kind", "default"), [("generate", 63), ("completion", 16), ("chat", 45)])
def test_default_lengths_end_with_the_context(kind: str, default: int) -> None:
    fields: dict[str, Any] = {"generate": {"text": "a"}, "completion": {"prompt": "a"}, "chat": CHAT}[kind]
    job = getattr(parser(), kind)(raw(**fields), "r")
    assert job.requests[0].sampling.max_new_tokens == default


def test_rooms_of_a_batch() -> None:
    lists = {"bootstrap_host": ["a", "::1"], "bootstrap_port": [1, 2], "bootstrap_room": [9, 4]}
    job = parser().generate(raw(**{**lists, "input_ids": [[5], [6]]}), "r")
    assert [(r.room, r.source, r.input_ids) for r in job.requests] == [
        (9, "http://a:1", (5,)),
        (4, "http://[::1]:2", (6,)),
    ]
    assert job.batch
    job = parser().generate(raw(input_ids=[[5], [6]]), "r")
    assert [r.room for r in job.requests] == [7, 8]
    assert [r.request_id for r in job.requests] == ["r-0", "r-1"]
    one = parser().generate(raw(input_ids=[[5]], bootstrap_room=[3], bootstrap_host=["h"], bootstrap_port=[4]), "r")
    assert one.batch
    assert one.requests[0].source == "http://h:4"


def test_copies_of_a_prompt_have_rooms_and_seeds_of_their_own() -> None:
    job = parser().completion(raw(prompt="a", n=3, seed=5, bootstrap_room=[1, 2, 3]), "r")
    assert [(r.room, r.sampling.seed) for r in job.requests] == [(1, 5), (2, 6), (3, 7)]


def test_prefill_needs_no_source() -> None:
    body = json.dumps({"text": "a", "bootstrap_room": 1}).encode()
    assert parser("prefill").generate(body, "r").requests[0].source == ""


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {}, "either text or input_ids"),
    ("generate", {"text": "a", "input_ids": [1]}, "either text or input_ids"),
    ("generate", {"text": ""}, "no tokens"),
    ("generate", {"input_ids": []}, "no tokens"),
    ("generate", {"input_ids": [1.5]}, "neither text nor"),
    ("generate", {"input_ids": [True]}, "neither text nor"),
    ("generate", {"input_ids": [[1], ["a"]]}, "neither text nor"),
    ("generate", {"input_ids": [-1]}, "token id -1"),
    ("generate", {"input_ids": [1000]}, "token id 1000 is not from 0 to 999"),
    ("generate", {"input_ids": [1 << 70]}, "token id"),
    ("generate", {"input_ids": [5] * 64}, "has 64 tokens, and the model takes 64"),
    ("generate", {"input_ids": [5] * 60, "sampling_params": {"max_new_tokens": 5}}, "not from 1 to 4"),
    ("generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens is 0"),
    ("generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature is -1"),
    ("generate", {"text": "a", "sampling_params": {"top_p": 0}}, "top_p is 0"),
    ("generate", {"text": "a", "sampling_params": {"top_k": -2}}, "top_k is -2"),
    ("generate", {"text": "a", "sampling_params": {"seed": -2}}, "seed is -2"),
    ("generate", {"text": "a", "sampling_params": {"stop_token_ids": [5000]}}, "stop_token_ids"),
    ("generate", {"text": "a", "sampling_params": {"stop": ["x"] * 100}}, "at most 64"),
    ("generate", {"text": "a", "sampling_params": {"n": 0}}, "n is 0"),
    ("generate", {"text": "a", "sampling_params": {"n": 10**9}}, "n is"),
    ("generate", {"text": "a", "sampling_params": {"min_p": 0.1}}, "min_p is not supported"),
    ("generate", {"text": "a", "sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ("generate", {"text": "a", "sampling_params": {"regex": "a+"}}, "regex is not supported"),
    ("generate", {"text": "a", "sampling_params": [1]}, "cannot be understood"),
    ("generate", {"text": "a", "return_logprob": True}, "return_logprob is not supported"),
    ("generate", {"text": "a", "return_logprob": [False, True]}, "return_logprob is not supported"),
    ("generate", {"text": "a", "image_data": "x"}, "image_data"),
    ("generate", {"text": ["a"] * 300}, "300 prompts"),
    ("generate", {"text": "a", "rid": ["x", "y"]}, "rid has 2 entries"),
    ("generate", {"text": "a", "bootstrap_room": None}, "ask its router"),
    ("generate", {"text": "a", "bootstrap_room": -1}, "bootstrap_room -1"),
    ("generate", {"text": "a", "bootstrap_room": 1 << 63}, "bootstrap_room 9223372036854775808"),
    ("generate", {"text": "a", "bootstrap_room": [1, 2]}, "2 entries for 1 requests"),
    ("generate", {"text": ["a", "b"], "bootstrap_room": [1, 1]}, "same room twice"),
    ("generate", {"text": ["a", "b"], "bootstrap_room": [1, 2], "bootstrap_host": ["a"]}, "bootstrap_host has 1"),
    ("generate", {"text": "a", "bootstrap_host": None}, "BOOTSTRAP_PORT"),
    ("generate", {"text": "a", "bootstrap_port": None}, "BOOTSTRAP_PORT"),
    ("generate", {"text": "a", "bootstrap_port": 70000}, "no address"),
    ("generate", {"text": "a", "bootstrap_host": "a/b?c"}, "no address"),
    ("completion", {"prompt": ""}, "no tokens"),
    ("completion", {"prompt": "a", "echo": True}, "echo"),
    ("completion", {"prompt": "a", "logprobs": 1}, "logprobs"),
    ("completion", {"prompt": "a", "best_of": 2}, "best_of is 2"),
    ("completion", {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty"),
    ("completion", {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
    ("completion", {"prompt": {"a": 1}}, "cannot be understood"),
    ("chat", {"messages": []}, "messages is empty"),
    ("chat", {"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
    ("chat", {"messages": [{"content": "a"}]}, "cannot be understood"),
    ("chat", {**CHAT, "tools": [{"type": "function"}]}, "tools is not supported"),
    ("chat", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {**CHAT, "chat_template_kwargs": {"broken": True}}, "the template broke"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        getattr(parser(), kind)(raw(**fields), "r")


@pytest.mark.parametrize("fields", [{"text": "a"}, {"text": ["a"]}])
def test_text_without_a_tokenizer_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="input_ids"):
        parser(tokenizer=False).generate(raw(**fields), "r")
    with pytest.raises(BadRequest, match="input_ids"):
        parser(tokenizer=False).chat(raw(**CHAT), "r")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["text", "input_ids", "prompt", "messages", "sampling_params", "stream", "rid", "n", "stop", "seed", "tools"]
FIELDS += [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "max_tokens",
    "response_format",
    "chat_template_kwargs",
]
FIELDS += ["stream_options", "return_logprob", "logit_bias", "stop_token_ids", "temperature"]


@given(
    st.sampled_from(["generate", "completion", "chat"]), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
)
def test_any_body_is_a_job_or_a_bad_request(kind: str, fields: dict[str, Any]) -> None:
    start: dict[str, Any] = {"generate": {"text": "a"}, "completion": {"prompt": "a"}, "chat": CHAT}[kind]
    try:
        job = getattr(parser(), kind)(raw(**{**start, **fields}), "r")
    except BadRequest:
        return
    for request in job.requests:
        assert request.input_ids
        assert 0 <= request.room < 1 << 63
        assert 1 <= request.sampling.max_new_tokens <= 64 - len(request.input_ids)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_bad_request(body: bytes) -> None:
    for kind in ("generate", "completion", "chat"):
        with pytest.raises(BadRequest):
            getattr(parser(), kind)(body, "r")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"text":' * 50_000, b'{"text":"\xff"}', b'{"text":"\\ud800"}'])
def test_bodies_made_to_hurt(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parser().generate(body, "r")
