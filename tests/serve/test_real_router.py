"""The real sglang-router over two prefill and two decode servers with scripted engines."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FAIL_AT_ONCE, FAIL_LATER, HANG, ROOM_IN_USE, SLOW, CharTokenizer, FakeEngine

from kvbaton.registry.server import BackgroundServer, RegistryServer
from kvbaton.serve.app import make_app
from kvbaton.serve.processes import ManagedProcess, free_ports, http_get, wait_until
from kvbaton.serve.router import router_command, router_environment

pytest.importorskip("sglang_router", reason="needs sglang-router (extra: serve)")


class Deployment:
    """Two prefill and two decode servers in this process, and the router as another."""

    def __init__(self, logs: Path) -> None:
        self.registries = [RegistryServer(), RegistryServer()]
        for registry in self.registries:
            registry.start()
        self.prefills = [FakeEngine("prefill", registry=registry.url) for registry in self.registries]
        self.decodes = [FakeEngine("decode"), FakeEngine("decode")]
        self.apps = [make_app(engine, CharTokenizer()) for engine in (*self.prefills, *self.decodes)]
        self.servers = [BackgroundServer(app) for app in self.apps]
        for server in self.servers:
            server.start()
        port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        command = router_command(
            [(server.url, registry.port) for server, registry in zip(self.servers[:2], self.registries, strict=True)],
            [server.url for server in self.servers[2:]],
            port=port,
            metrics_port=metrics_port,
        )
        self.router = ManagedProcess("router", command, logs / "router.log", router_environment())
        wait_until(self.ready, [self.router], "router", 60)
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=30)

    def ready(self) -> bool:
        return json.loads(http_get(f"{self.url}/readiness") or b"{}").get("healthy_workers") == 4

    @property
    def engines(self) -> list[FakeEngine]:
        return [*self.prefills, *self.decodes]

    def forget(self) -> None:
        for engine in self.engines:
            engine.log.clear()
            engine.cancelled.clear()

    def post(self, path: str = "/generate", **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def close(self) -> None:
        self.client.close()
        code = self.router.stop()
        for engine in self.engines:
            engine.close()
        for server in (*self.servers, *self.registries):
            server.stop()
        assert code == 0, self.router.tail()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(tmp_path_factory.mktemp("logs"))
    yield running
    running.close()


@pytest.fixture
def deployment(shared: Deployment) -> Deployment:
    shared.forget()
    return shared


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_whole(deployment: Deployment) -> None:
    assert deployment.post(text="hello").json()["text"] == "olleh"
    answer = deployment.post("/v1/completions", model="fake", prompt="hello").json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("olleh", 6)
    messages = [{"role": "user", "content": "hi"}]
    answer = deployment.post("/v1/chat/completions", model="fake", messages=messages).json()
    assert answer["choices"][0]["message"]["content"] == "<user>hi<assistant>"[::-1]


def test_both_sides_get_the_same_request_and_the_room_of_the_chosen_prefill(deployment: Deployment) -> None:
    for number in range(8):
        assert deployment.post(text=f"number {number}", sampling_params={"sampling_seed": number}).status_code == 200
    prefilled = {r.room: (r, deployment.registries[at].url) for at in (0, 1) for r in deployment.prefills[at].log}
    decoded = {r.room: r for engine in deployment.decodes for r in engine.log}
    assert len(prefilled) == 8
    assert prefilled.keys() == decoded.keys()
    for room, (request, registry_url) in prefilled.items():
        assert decoded[room].input_ids == request.input_ids
        assert decoded[room].sampling == request.sampling
        assert decoded[room].source == registry_url
    # Round robin: each of the four took its part.
    assert [len(engine.log) for engine in deployment.engines] == [4, 4, 4, 4]


def test_streamed(deployment: Deployment) -> None:
    texts = []
    last = ""
    with deployment.client.stream("POST", "/generate", json={"text": "hello", "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["text"])
            last = line or last
    assert texts[-1] == "olleh"
    assert last == "data: [DONE]"
    body = {"model": "fake", "prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in deployment.client.post("/v1/completions", json=body).text.split("\n\n") if line]
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "olleh"
    assert chunks[-1]["usage"]["total_tokens"] == 11


def test_chunks_come_as_they_are_made(deployment: Deployment) -> None:
    body = {"input_ids": [SLOW, *[20] * 100], "stream": True}
    with deployment.client.stream("POST", "/generate", json=body) as answer:
        first = next(line for line in answer.iter_lines() if line)
        assert len(json.loads(first[6:])["output_ids"]) < 50
        assert any(engine.pages for engine in deployment.decodes)
    wait_for(lambda: not any(engine.pages for engine in deployment.engines))


def test_batches(deployment: Deployment) -> None:
    encode = CharTokenizer().encode
    answers = deployment.post(input_ids=[encode("abc"), encode("de")]).json()
    assert [each["text"] for each in answers] == ["cba", "ed"]
    answer = deployment.post("/v1/completions", model="fake", prompt=["abc", "de"]).json()
    assert [choice["text"] for choice in answer["choices"]] == ["cba", "ed"]
    answer = deployment.post("/v1/completions", model="fake", prompt="abc", n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["cba", "cba"]


def test_concurrent(deployment: Deployment) -> None:
    texts = [f"the prompt with number {index}" for index in range(40)]

    def ask(text: str) -> str:
        return str(deployment.post(text=text, stream=False).json()["text"])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, texts)) == [text[::-1] for text in texts]
    rooms = list(itertools.chain.from_iterable([r.room for r in engine.log] for engine in deployment.decodes))
    assert len(set(rooms)) == 40


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("special", "status", "reason"),
    [(FAIL_AT_ONCE, 503, "part 0 of rank tp0/1 was lost"), (ROOM_IN_USE, 400, "is in use")],
)
def test_failures_pass_with_status_and_reason(
    deployment: Deployment, stream: bool, special: int, status: int, reason: str
) -> None:
    answer = deployment.post(input_ids=[special, 20], stream=stream)
    assert answer.status_code == status
    assert reason in answer.text


def test_a_failed_transfer_was_tried_again_with_another_room(deployment: Deployment) -> None:
    assert deployment.post(input_ids=[FAIL_AT_ONCE, 20]).status_code == 503
    rooms = [request.room for engine in deployment.prefills for request in engine.log]
    assert len(rooms) == len(set(rooms)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_the_middle(deployment: Deployment, stream: bool) -> None:
    answer = deployment.post(input_ids=[FAIL_LATER, 20, 21, 22, 23], stream=stream)
    assert answer.status_code == (200 if stream else 500)
    assert "the pool is gone" in answer.text


def test_many_failures_do_not_close_the_way(deployment: Deployment) -> None:
    for _ in range(15):
        assert deployment.post(input_ids=[FAIL_AT_ONCE, 20]).status_code == 503
    assert deployment.post(text="hello").json()["text"] == "olleh"


def test_refusals_pass(deployment: Deployment) -> None:
    answer = deployment.post(text="a", sampling_params={"max_new_tokens": 10_000})
    assert answer.status_code == 400
    assert "max_new_tokens is 10000" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_both_sides(deployment: Deployment, stream: bool) -> None:
    with pytest.raises(httpx.TimeoutException):
        deployment.client.post("/generate", json={"input_ids": [HANG, 20], "stream": stream}, timeout=0.5)
    wait_for(lambda: not any(engine.pages for engine in deployment.engines))
    assert sorted(len(engine.cancelled) for engine in deployment.engines) == [0, 0, 1, 1]
    wait_for(lambda: all(app.state.service.running == 0 for app in deployment.apps))


def test_a_client_that_leaves_a_stream_cancels_decode(deployment: Deployment) -> None:
    body = {"input_ids": [SLOW, *[20] * 300], "stream": True}
    with deployment.client.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: not any(engine.pages for engine in deployment.engines))
    assert sum(len(engine.cancelled) for engine in deployment.decodes) == 1


@pytest.mark.parametrize("policy", ["random", "cache_aware", "power_of_two"])
def test_other_policies(deployment: Deployment, tmp_path: Path, policy: str) -> None:
    port, metrics_port = free_ports(2)
    command = router_command(
        [
            (server.url, registry.port)
            for server, registry in zip(deployment.servers, deployment.registries, strict=False)
        ],
        [server.url for server in deployment.servers[2:]],
        port=port,
        metrics_port=metrics_port,
        policy=policy,
    )
    router = ManagedProcess("router", command, tmp_path / "router.log", router_environment())
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: b'"healthy_workers":4' in (http_get(f"{url}/readiness") or b""), [router], "router", 60)
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            for number in range(4):
                answer = client.post("/generate", json={"text": f"number {number}"})
                assert answer.json()["text"] == f"number {number}"[::-1]
    finally:
        router.stop()


def test_the_router_goes_round_a_prefill_server_that_is_gone(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    try:
        deployment.servers[0].stop()
        deployment.registries[0].stop()
        for number in range(6):
            assert deployment.post(text=f"number {number}").json()["text"] == f"number {number}"[::-1]
        assert deployment.prefills[0].log == []
    finally:
        deployment.close()


def test_the_router_asked_no_model_hub(deployment: Deployment) -> None:
    assert "huggingface" not in deployment.router.log.read_text()
    models = deployment.client.get("/v1/models").json()
    assert [each["id"] for each in models["data"]] == ["fake"]


def test_the_router_leaves_the_environment_s_proxies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    left = router_environment()
    assert "HTTP_PROXY" not in left
    assert "all_proxy" not in left
    assert left["PATH"] == os.environ["PATH"]
