from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import (
    ABORTED,
    FAIL_AT_ONCE,
    FAIL_LATER,
    HANG,
    NEVER_FITS,
    ROOM_IN_USE,
    SLOW,
    CharTokenizer,
    FakeEngine,
)

from kvbaton.registry.server import BackgroundServer
from kvbaton.serve.app import make_app

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}


class Served:
    """An app over a fake engine, at a real socket."""

    def __init__(self, role: str, **options: Any) -> None:
        self.engine = FakeEngine(role)
        self.app = make_app(self.engine, CharTokenizer(), **options)
        self.server = BackgroundServer(self.app)
        self.client = httpx.Client(base_url=self.server.url, trust_env=False, timeout=20)

    def post(self, path: str = "/generate", **fields: Any) -> httpx.Response:
        return self.client.post(path, json={**ROOM, **fields})

    def events(self, path: str = "/generate", **fields: Any) -> list[Any]:
        answer = self.post(path, stream=True, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.text)

    def close(self) -> None:
        self.client.close()
        self.server.stop()


def parse_events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def decode() -> Iterator[Served]:
    served = Served("decode")
    with served.server:
        yield served
    served.close()


@pytest.fixture
def prefill() -> Iterator[Served]:
    served = Served("prefill")
    with served.server:
        yield served
    served.close()


def test_generate_whole(decode: Served) -> None:
    answer = decode.post(text="abc", rid="mine").json()
    assert answer["text"] == "cba"
    assert answer["output_ids"] == [109, 108, 107, 1]
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    assert meta["kvbaton"] == {"ms": 1.5}
    (request,) = decode.engine.log
    assert (request.room, request.source) == (7, "http://127.0.0.1:1")


def test_generate_streamed_holds_all_the_text_so_far(decode: Served) -> None:
    events = decode.events(text="abc")
    texts = [each["text"] for each in events]
    assert texts[-1] == "cba"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(set(texts)) == 3
    assert events[-1]["output_ids"] == [109, 108, 107, 1]
    assert [each["meta_info"]["finish_reason"] for each in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}


def test_length_and_ignored_end(decode: Served) -> None:
    answer = decode.post(text="abc", sampling_params={"max_new_tokens": 2}).json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("cb", {"type": "length", "length": 2})
    answer = decode.post(text="abc", sampling_params={"ignore_eos": True}).json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("cba", {"type": "length", "length": 4})


def test_stop_token_is_not_in_the_text(decode: Served) -> None:
    answer = decode.post(text="abc", sampling_params={"stop_token_ids": [108]}).json()
    assert answer["text"] == "c"
    assert answer["output_ids"] == [109, 108]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 108}
    answer = decode.post(text="abc", sampling_params={"stop_token_ids": [108], "no_stop_trim": True}).json()
    assert answer["text"] == "cb"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_and_the_work(decode: Served, stream: bool) -> None:
    fields = {"input_ids": [SLOW, *CharTokenizer().encode("abcdefghij")], "sampling_params": {"stop": "hg"}}
    answer = decode.events(**fields)[-1] if stream else decode.post(**fields).json()
    assert answer["text"] == "ji"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "hg"}
    wait_for(lambda: not decode.engine.pages)
    assert decode.engine.cancelled == [7]


def test_a_batch_keeps_its_order(decode: Served) -> None:
    texts = ["abc", "de", "f"]
    slow = [[SLOW, *CharTokenizer().encode(texts[0])], *map(CharTokenizer().encode, texts[1:])]
    answers = decode.post(input_ids=slow, bootstrap_room=[1, 2, 3]).json()
    assert [each["text"] for each in answers] == ["cba", "ed", "f"]
    events = decode.events(input_ids=slow, bootstrap_room=[4, 5, 6])
    last = {each["index"]: each["text"] for each in events}
    assert last == {0: "cba", 1: "ed", 2: "f"}


def test_completions(decode: Served) -> None:
    answer = decode.post("/v1/completions", prompt=["abc", "de"], bootstrap_room=[1, 2]).json()
    assert answer["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "cba", "stop"),
        (1, "ed", "stop"),
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert (answer["model"], answer["id"][:5]) == ("fake", "cmpl-")
    events = decode.events("/v1/completions", prompt="abc", stream_options={"include_usage": True})
    assert "".join(each["choices"][0]["text"] for each in events[:-1]) == "cba"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4


def test_copies_count_their_prompt_once(decode: Served) -> None:
    usage = decode.post("/v1/completions", prompt="abc", n=2, bootstrap_room=[1, 2]).json()["usage"]
    assert usage == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}


def test_chat(decode: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = "<user>hi<assistant>"
    answer = decode.post("/v1/chat/completions", messages=messages).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == prompt[::-1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = decode.events("/v1/chat/completions", messages=messages)
    assert {each["object"] for each in events} == {"chat.completion.chunk"}
    deltas = [each["choices"][0]["delta"] for each in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == prompt[::-1]
    assert [each["choices"][0]["finish_reason"] for each in events] == [None] * (len(events) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_answers_when_the_transfer_is_over(prefill: Served, stream: bool) -> None:
    body = {"text": "abc", "bootstrap_room": 5}
    answer = prefill.events(**body)[-1] if stream else prefill.post(**body).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["kvbaton"] == {"bytes": {"kv": 4096}}
    assert [request.room for request in prefill.engine.log] == [5]


FAILURES = [
    (FAIL_AT_ONCE, 503, "part 0 of rank tp0/1 was lost"),
    (ABORTED, 503, "told to stop"),
    (ROOM_IN_USE, 400, "room 7 is in use"),
    (NEVER_FITS, 400, "needs 9 pages, and the pool has 4"),
]


@pytest.mark.parametrize(("special", "status", "message"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_failure_has_its_status_and_its_reason(
    request: pytest.FixtureRequest, role: str, stream: bool, special: int, status: int, message: str
) -> None:
    served: Served = request.getfixturevalue(role)
    answer = served.post(input_ids=[special, 20], stream=stream)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status
    # The router wraps what a stream's error says, and would cut it at the length that we announced.
    assert ("content-length" in answer.headers) is not stream
    assert not served.engine.pages


def test_a_failure_after_the_first_token(decode: Served) -> None:
    answer = decode.post(input_ids=[FAIL_LATER, 20, 21, 22, 23])
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the pool is gone"
    events = decode.events(input_ids=[FAIL_LATER, 20, 21, 22, 23])
    assert "text" in events[0]
    assert events[-1]["error"]["message"] == "the pool is gone"


def test_one_failure_fails_the_batch_and_cancels_the_rest(decode: Served) -> None:
    answer = decode.post(input_ids=[[HANG, 20], [FAIL_AT_ONCE, 20]], bootstrap_room=[1, 2])
    assert answer.status_code == 503
    wait_for(lambda: not decode.engine.pages)
    assert 1 in decode.engine.cancelled


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"text": 1}', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_none(decode: Served, path: str, body: bytes) -> None:
    answer = decode.client.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_a_body_over_the_limit() -> None:
    served = Served("decode", max_body=500)
    with served.server:
        assert served.post(text="a" * 600).status_code == 413
        assert served.post(text="a").status_code == 200
    served.close()


def test_too_many_requests_at_once() -> None:
    served = Served("decode", max_requests=2)
    with served.server:
        answer = served.post(text=["a", "b", "c"])
        assert answer.status_code == 503
        assert "at most 2" in answer.json()["error"]["message"]
        assert served.post(text=["a", "b"]).status_code == 200
        assert served.post(text=["a", "b"]).status_code == 200
    served.close()


def test_a_request_that_hangs_ends_at_its_limit() -> None:
    served = Served("decode", request_seconds=0.2)
    with served.server:
        answer = served.post(input_ids=[HANG, 20])
        assert answer.status_code == 504
        assert "0.2 s" in answer.json()["error"]["message"]
        wait_for(lambda: not served.engine.pages)
    served.close()


def test_a_prefill_server_that_is_gone_is_not_waited_for(decode: Served) -> None:
    """The room's source is a port at which nothing listens: the router shall try another one."""
    answer = decode.post(input_ids=[HANG, 20])
    assert answer.status_code == 503
    assert "the prefill side is gone: nothing listens at http://127.0.0.1:1" in answer.json()["error"]["message"]
    wait_for(lambda: not decode.engine.pages)


def raw_post(served: Served, **fields: Any) -> socket.socket:
    body = json.dumps({**ROOM, **fields}).encode()
    connection = socket.create_connection((served.server.host, served.server.port), timeout=10)
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("special", [HANG, SLOW])
def test_a_client_that_leaves_cancels_its_request(decode: Served, stream: bool, special: int) -> None:
    with raw_post(decode, input_ids=[special] + [20] * 400, stream=stream) as connection:
        wait_for(lambda: decode.engine.pages)
        if stream and special == SLOW:
            assert connection.recv(10)
    wait_for(lambda: not decode.engine.pages)
    assert decode.engine.cancelled == [7]
    wait_for(lambda: decode.app.state.service.running == 0)
    assert decode.post(text="abc").json()["text"] == "cba"


def test_many_at_once(decode: Served) -> None:
    texts = [f"prompt {index}" for index in range(24)]
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        answers[index] = decode.post(text=texts[index], bootstrap_room=index).json()["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: text[::-1] for index, text in enumerate(texts)}
    assert decode.app.state.service.running == 0


def test_what_the_router_and_people_ask(decode: Served) -> None:
    ask = decode.client.get
    assert ask("/v1/models").json()["data"][0]["id"] == "fake"
    for path in ("/server_info", "/get_server_info"):
        told = ask(path).json()
        assert (told["disaggregation_mode"], told["served_model_name"]) == ("decode", "fake")
        # The router would ask a model hub for a path that is no folder.
        assert "model_path" not in told
    for path in ("/model_info", "/get_model_info"):
        assert ask(path).json()["model_path"] == "some/model"
    assert ask("/nothing").status_code == 404
    assert "error" in ask("/nothing").json()


def test_health_follows_the_engine(decode: Served) -> None:
    for path in ("/health", "/health_generate"):
        decode.engine.sick = ""
        assert decode.client.get(path).status_code == 200
        decode.engine.sick = "the scheduler died"
        answer = decode.client.get(path)
        assert answer.status_code == 503
        assert "the scheduler died" in answer.json()["error"]["message"]


def test_a_draining_server_takes_nothing_new(decode: Served) -> None:
    decode.app.state.service.draining = True
    assert decode.client.get("/health").status_code == 503
    assert decode.post(text="a").status_code == 503
    assert decode.engine.log == []


def test_a_model_without_a_tokenizer_speaks_ids() -> None:
    server = BackgroundServer(make_app(FakeEngine("decode"), None))
    with server, httpx.Client(base_url=server.url, trust_env=False) as client:
        answer = client.post("/generate", json={**ROOM, "input_ids": [20, 21]}).json()
        assert (answer["text"], answer["output_ids"]) == ("", [21, 20, 1])
        assert client.post("/generate", json={**ROOM, "text": "a"}).status_code == 400
