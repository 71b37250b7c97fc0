from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import HANG, NEVER_FITS, ROOM_IN_USE, SLOW, CharTokenizer, FakeEngine

from kvbaton.engines.base import GenerateRequest
from kvbaton.registry.server import BackgroundServer, RegistryServer
from kvbaton.serve import generation
from kvbaton.serve.app import make_app
from kvbaton.serve.refusals import Refusal, Refusals, SourceGone, add_routes, look_up, report

NO = Refusal(400, "the pool is too small")


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_list_forgets_after_a_while() -> None:
    now = [0.0]
    refusals = Refusals(seconds=10.0, clock=lambda: now[0])
    refusals.add(1, NO)
    now[0] = 5.0
    refusals.add(2, NO)
    assert refusals.find(1) == NO
    now[0] = 12.0
    assert refusals.find(1) is None
    assert refusals.find(2) == NO
    assert len(refusals) == 1


def test_the_list_is_bounded() -> None:
    refusals = Refusals(limit=3)
    for room in range(10):
        refusals.add(room, NO)
    assert [room for room in range(10) if refusals.find(room)] == [7, 8, 9]


def test_who_watches_is_told_before_and_after() -> None:
    refusals = Refusals()
    told: list[tuple[int, Refusal]] = []
    refusals.watch(1, lambda refusal: told.append((1, refusal)))
    refusals.add(2, NO)
    assert told == []
    refusals.add(1, NO)
    refusals.watch(2, lambda refusal: told.append((2, refusal)))
    assert told == [(1, NO), (2, NO)]
    refusals.unwatch(1)
    refusals.add(1, NO)
    assert len(told) == 2


def test_a_room_is_wanted_while_it_is_asked_for() -> None:
    now = [0.0]
    refusals = Refusals(limit=3, clock=lambda: now[0], unasked_seconds=4.0)
    assert not refusals.is_wanted(1)
    assert refusals.ask(1) is None
    now[0] = 4.0
    assert refusals.is_wanted(1)
    now[0] = 4.1
    assert not refusals.is_wanted(1)
    refusals.add(1, NO)
    assert refusals.find(1) == NO
    assert not refusals.is_wanted(1)
    assert refusals.ask(1) == NO
    assert refusals.is_wanted(1)
    for room in range(10, 13):
        refusals.ask(room)
    assert not refusals.is_wanted(1)


class Pair:
    """A prefill server with its registry, and a decode server."""

    def __init__(self) -> None:
        self.refusals = Refusals()
        self.registry = RegistryServer()
        add_routes(self.registry.app, self.refusals)
        self.engines = {"prefill": FakeEngine("prefill"), "decode": FakeEngine("decode")}
        # The scripted decode engine asks the registry of its source: let somebody be there.
        self.registry.start()
        FakeEngine("prefill", registry=self.registry.url)
        self.apps = {
            "prefill": make_app(self.engines["prefill"], CharTokenizer(), refusals=self.refusals),
            "decode": make_app(self.engines["decode"], CharTokenizer()),
        }
        self.servers = {role: BackgroundServer(app) for role, app in self.apps.items()}
        for server in self.servers.values():
            server.start()

    def post(
        self, role: str, input_ids: list[int], room: int, *, stream: bool = False, timeout: float = 25
    ) -> httpx.Response:
        body: dict[str, Any] = {"input_ids": input_ids, "bootstrap_room": room, "stream": stream}
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.registry.port}
        return httpx.post(f"{self.servers[role].url}/generate", json=body, trust_env=False, timeout=timeout)

    def close(self) -> None:
        for server in (*self.servers.values(), self.registry):
            server.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    running = Pair()
    yield running
    running.close()


@pytest.mark.parametrize(("refusing", "waiting"), [("decode", "prefill"), ("prefill", "decode")])
@pytest.mark.parametrize("first", ["refusing", "waiting"])
def test_a_refusal_reaches_the_other_side(pair: Pair, refusing: str, waiting: str, first: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        if first == "waiting":
            answer = pool.submit(pair.post, waiting, [HANG, 20], 7)
            deadline = time.monotonic() + 10
            while not pair.engines[waiting].pages:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        refused = pair.post(refusing, [NEVER_FITS, 20], 7)
        if first == "refusing":
            answer = pool.submit(pair.post, waiting, [HANG, 20], 7)
        other = answer.result()
    assert refused.status_code == 400
    assert other.status_code == 400
    message = other.json()["error"]["message"]
    assert message == f"the {refusing} side refused: the prompt needs 9 pages, and the pool has 4"
    # The answer may be there before the engine's thread has taken the cancel in.
    deadline = time.monotonic() + 10
    while not pair.engines[waiting].cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pair.engines[waiting].cancelled == [7]


@pytest.mark.parametrize(("refusing", "waiting"), [("decode", "prefill"), ("prefill", "decode")])
def test_a_side_that_drains_frees_the_other(pair: Pair, refusing: str, waiting: str) -> None:
    pair.apps[refusing].state.service.draining = True
    assert pair.post(refusing, [20], 7).status_code == 503
    other = pair.post(waiting, [HANG, 20], 7)
    assert other.status_code == 503
    assert "shutting down" in other.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_request_that_no_decode_server_waits_for_is_given_up(pair: Pair, stream: bool) -> None:
    pair.refusals.unasked_seconds = 0.6
    answer = pair.post("prefill", [HANG, 20], 7, stream=stream)
    assert answer.status_code == 503
    assert "no decode server has asked for room 7" in answer.json()["error"]["message"]
    wait_for(lambda: pair.engines["prefill"].cancelled == [7])


def test_one_that_a_decode_server_waits_for_goes_on() -> None:
    now = [0.0]
    refusals = Refusals(clock=lambda: now[0], unasked_seconds=4.0)
    service = generation.Service(FakeEngine("prefill"), None, refusals=refusals)
    waiting = [GenerateRequest("a", [20], 7), GenerateRequest("b", [20], 8)]
    service._check_wanted(waiting, 3.9)
    for now[0] in (100.0, 101.0, 104.0):
        refusals.ask(7)
        refusals.ask(8)
        service._check_wanted(waiting, now[0])
    now[0] = 108.0
    refusals.ask(7)
    service._check_wanted(waiting, 108.0)
    now[0] = 108.1
    with pytest.raises(generation.RequestFailed, match="asked for room 8") as caught:
        service._check_wanted(waiting, 108.1)
    assert caught.value.status == 503
    patient = generation.Service(FakeEngine("prefill"), None, refusals=Refusals(unasked_seconds=0.0))
    for service in (patient, generation.Service(FakeEngine("decode"), None)):
        service._check_wanted(waiting, 1000.0)


def test_a_batch_asks_for_those_that_are_silent_while_others_go_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that goes on has an event each 50 ms."""
    monkeypatch.setattr(generation, "REFUSAL_SECONDS", 0.2)
    body = {"input_ids": [[SLOW] + [20] * 400, [HANG, 20]], "bootstrap_room": [7, 8], "stream": True}
    body |= {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [pair.registry.port] * 2}
    url = f"{pair.servers['decode'].url}/generate"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=25) as answer:
        assert answer.status_code == 200
        wait_for(lambda: pair.refusals.is_wanted(8))
        assert not pair.refusals.is_wanted(7)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_at_prefill(pair: Pair, stream: bool) -> None:
    with pytest.raises(httpx.TimeoutException):
        pair.post("prefill", [HANG, 20], 7, stream=stream, timeout=0.5)
    wait_for(lambda: pair.engines["prefill"].cancelled == [7])
    assert pair.apps["prefill"].state.service.running == 0


@pytest.mark.parametrize(("role"), ["decode", "prefill"])
def test_a_room_in_use_harms_nobody_else(pair: Pair, role: str) -> None:
    assert pair.post(role, [ROOM_IN_USE, 20], 7).status_code == 400
    assert len(pair.refusals) == 0


@pytest.mark.parametrize("body", [b"", b"{}", b'["a", 1]', b"[" * 10_000, b"\xff"])
def test_bad_refusals(pair: Pair, body: bytes) -> None:
    url = f"{pair.registry.url}/v1/rooms/7/refusal"
    assert httpx.post(url, content=body, trust_env=False).status_code == 400
    assert httpx.post(url, content=b"x" * 20_000, trust_env=False).status_code == 413
    assert httpx.get(url, trust_env=False).status_code == 404
    assert httpx.get(f"{pair.registry.url}/v1/rooms/x/refusal", trust_env=False).status_code == 422


def test_a_source_that_is_gone_serves_no_room() -> None:
    with pytest.raises(SourceGone, match=r"nothing listens at http://127\.0\.0\.1:1"):
        look_up("http://127.0.0.1:1", 7)
    report("http://127.0.0.1:1", 7, NO)


def test_a_status_that_is_no_error_becomes_one(pair: Pair) -> None:
    report(pair.registry.url, 9, Refusal(200, "fine"))
    assert pair.refusals.find(9) == Refusal(503, "fine")


def test_reported_is_found(pair: Pair) -> None:
    report(pair.registry.url, 9, NO)
    assert look_up(pair.registry.url, 9) == NO
    assert look_up(pair.registry.url, 8) is None


def test_with_a_secret_strangers_neither_say_nor_learn_who_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = Refusals()
    with RegistryServer(secret="the-secret-of-one-deployment") as registry:
        add_routes(registry.app, refusals)
        refusals.add(1, NO)
        for secret in (None, "the-secret-of-another-deployment"):
            if secret is not None:
                monkeypatch.setenv("KVBATON_SECRET", secret)
            report(registry.url, 2, NO)
            assert look_up(registry.url, 1) is None
        assert len(refusals) == 1
        monkeypatch.setenv("KVBATON_SECRET", "the-secret-of-one-deployment")
        report(registry.url, 2, NO)
        assert look_up(registry.url, 1) == look_up(registry.url, 2) == NO
