from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import ConfigurationError
from kvbaton.layout.nouns import Coords, RankLayout
from kvbaton.registry import HttpRegistry, Registration, RegistryTable
from kvbaton.registry.server import BackgroundServer, RegistryServer, make_app
from kvbaton.registry.waiting import Waiting

GOOD = msgspec.json.encode(Registration("i0", "tcp://127.0.0.1:7000", RankLayout(()), "m"))


def ask(
    app: object,
    method: str,
    path: str,
    content: bytes | AsyncIterator[bytes] | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(call())


@pytest.fixture
def table() -> RegistryTable:
    return RegistryTable()


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


BAD_BODIES = {
    "empty": b"",
    "not json": b"hello",
    "not an object": b"[1, 2]",
    "cut": GOOD[:-3],
    "twice": GOOD + GOOD,
    "not utf-8": b'{"instance": "\xff\xfe"}',
    "null": b"null",
    "wrong type": GOOD.replace(b'"i0"', b"17"),
    "missing field": b'{"instance": "a"}',
    "deep": b"[" * 100_000,
    "deep in an unknown field": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge number": GOOD.replace(b"[0,1]", b"[0," + b"9" * 5000 + b"]", 1),
    "float size": GOOD.replace(b"[0,1]", b"[0,1.5]", 1),
    "a negative rank": GOOD.replace(b"[0,1]", b"[-1,1]", 1),
    "a negative size": GOOD.replace(b"[0,1]", b"[0,-4]", 1),
    "a huge size": GOOD.replace(b"[0,1]", b"[0,9223372036854775808]", 1),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_registration_is_a_400(table: RegistryTable, name: str) -> None:
    answer = ask(make_app(table), "PUT", "/v1/ranks", BAD_BODIES[name])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is not a registration: ")
    assert len(table) == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GOOD.replace(b"[0,1]", b"[1,1]", 1), "coords tp: rank is 1"),
        (GOOD.replace(b"[0,1]", b"[0,0]", 1), "coords tp: size is 0"),
        (GOOD.replace(b"i0", b"a/../b"), "instance"),
        (GOOD.replace(b"i0", "\N{SNOWMAN}".encode()), "instance"),
    ],
)
def test_a_registration_that_makes_no_sense_is_a_409(table: RegistryTable, body: bytes, message: str) -> None:
    answer = ask(make_app(table), "PUT", "/v1/ranks", body)
    assert answer.status_code == 409
    assert message in answer.json()["error"]["message"]
    assert len(table) == 0


def test_a_body_over_the_limit_is_a_413(table: RegistryTable) -> None:
    answer = ask(make_app(table, max_body=1000), "PUT", "/v1/ranks", GOOD + b" " * 1000)
    assert answer.status_code == 413
    assert "1000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_says_that_it_is_too_long_is_not_read(table: RegistryTable) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    answer = ask(make_app(table, max_body=1000), "PUT", "/v1/ranks", chunks(), {"Content-Length": "1001"})
    assert answer.status_code == 413


def test_who_connects_and_asks_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who begins to ask, and who asked once: but not while a request is under way."""
    monkeypatch.setattr("kvbaton.registry.impatient.REQUEST_SECONDS", 0.2)
    with RegistryServer() as server:
        for said in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
                sock.sendall(said)
                while sock.recv(4096):
                    pass
        HttpRegistry(server.url).register(msgspec.json.decode(GOOD_DP, type=Registration))
        found = HttpRegistry(server.url).find_rooms("default", [1], wait_seconds=1.0)
        assert (found.replicas, found.rooms) == (2, {})


def test_the_life_of_a_rank(table: RegistryTable) -> None:
    now = [0.0]
    app = make_app(table, clock=lambda: now[0])
    assert ask(app, "GET", "/v1/topology").status_code == 404
    assert ask(app, "PUT", "/v1/ranks", GOOD).status_code == 200
    now[0] = 8.0
    assert ask(app, "POST", "/v1/ranks/i0/heartbeat").json() == {"ttl": 10.0}
    now[0] = 16.0
    topology = ask(app, "GET", "/v1/topology?deployment=default").json()
    assert [each["instance"] for each in topology["ranks"]] == ["i0"]
    assert ask(app, "GET", "/health").json() == {"status": "ok", "ranks": 1, "deployments": 1}
    now[0] = 19.0
    assert ask(app, "POST", "/v1/ranks/i0/heartbeat").status_code == 404
    assert ask(app, "DELETE", "/v1/ranks/i0").status_code == 404
    assert ask(app, "PUT", "/v1/ranks", GOOD).status_code == 200
    assert ask(app, "DELETE", "/v1/ranks/i0").status_code == 200
    assert len(table) == 0


def test_incomplete_is_told_from_unknown(table: RegistryTable) -> None:
    half = msgspec.json.encode(Registration("i0", "tcp://a:1", RankLayout((), Coords(tp=(0, 2))), "m"))
    app = make_app(table)
    ask(app, "PUT", "/v1/ranks", half)
    answer = ask(app, "GET", "/v1/topology")
    assert answer.status_code == 409
    assert "missing: tp1/2" in answer.json()["error"]["message"]
    assert ask(app, "GET", "/v1/topology?deployment=green").status_code == 404


GOOD_DP = msgspec.json.encode(Registration("i0", "tcp://a:1", RankLayout((), Coords(dp=(1, 2))), "m"))


def test_rooms_over_http_are_plain_json(table: RegistryTable) -> None:
    app = make_app(table)
    ask(app, "PUT", "/v1/ranks", GOOD_DP)
    assert ask(app, "POST", "/v1/ranks/i0/rooms", b'{"opened": [7, 9]}').json() == {"held": {}}
    answer = ask(app, "POST", "/v1/rooms/find", b'{"rooms": [7, 8]}')
    assert answer.json() == {"replicas": 2, "rooms": {"7": 1}}
    ask(app, "POST", "/v1/ranks/i0/rooms", b'{"closed": [7]}')
    assert ask(app, "POST", "/v1/rooms/find", b'{"rooms": [7]}').json()["rooms"] == {}
    assert ask(app, "POST", "/v1/ranks/i1/rooms", b"{}").status_code == 404
    assert ask(app, "POST", "/v1/rooms/find", b'{"rooms": [7], "deployment": "green"}').status_code == 404
    assert ask(app, "GET", "/v1/topology?dp_rank=5").status_code == 409
    assert ask(app, "GET", "/v1/topology?dp_rank=x").status_code == 422


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/ranks/i0/rooms", b"[]", 400),
        ("/v1/ranks/i0/rooms", b'{"opened": 7}', 400),
        ("/v1/ranks/i0/rooms", b'{"opened": ["7"]}', 400),
        ("/v1/ranks/i0/rooms", b'{"opened": [1.5]}', 400),
        ("/v1/ranks/i0/rooms", b'{"opened": [-1]}', 409),
        ("/v1/ranks/i0/rooms", b'{"closed": [9223372036854775808]}', 409),
        ("/v1/ranks/i0/rooms", b'{"opened": [' + b"9" * 5000 + b"]}", 400),
        ("/v1/ranks/i0/rooms", b'{"opened": [' + b"1," * 20_000 + b"1]}", 400),
        ("/v1/rooms/find", b"{}", 400),
        ("/v1/rooms/find", b'{"rooms": [1], "wait_seconds": -1}', 400),
        ("/v1/rooms/find", b'{"rooms": [1], "wait_seconds": 31}', 400),
        ("/v1/rooms/find", b'{"rooms": [1], "wait_seconds": NaN}', 400),
        ("/v1/rooms/find", b'{"rooms": [1], "asker": "' + b"x" * 200 + b'"}', 400),
        ("/v1/rooms/find", b'{"rooms": [' + b"1," * 20_000 + b"1]}", 400),
        ("/v1/rooms/find", b"[" * 100_000, 400),
        ("/v1/rooms/find", b'{"rooms": [' + b"1," * 600 + b"1]}", 413),
    ],
)
def test_what_is_no_news_and_no_question_is_refused(table: RegistryTable, path: str, body: bytes, status: int) -> None:
    app = make_app(table, max_body=1000 if status == 413 else 1 << 20)
    ask(app, "PUT", "/v1/ranks", GOOD_DP)
    answer = ask(app, "POST", path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert table.rooms == 0


def test_one_that_waits_is_answered_at_once_where_too_many_wait() -> None:
    async def calls() -> None:
        waiting = Waiting(limit=1)
        first = asyncio.ensure_future(waiting.wait("default", [1], "", 20.0))
        await asyncio.sleep(0)
        await asyncio.wait_for(waiting.wait("default", [1], "", 20.0), 5.0)
        assert len(waiting) == 1
        waiting.announced("else", [1])
        waiting.announced("default", [2])
        await asyncio.sleep(0)
        assert not first.done()
        waiting.announced("default", [1])
        await asyncio.wait_for(first, 5.0)
        assert len(waiting) == 0

    asyncio.run(calls())


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=8).map(lambda noise: GOOD[:40] + noise + GOOD[40:])))
def test_any_bytes_get_a_clear_answer(body: bytes) -> None:
    answer = ask(make_app(RegistryTable()), "PUT", "/v1/ranks", body)
    assert answer.status_code in (200, 400, 409)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["instance", "endpoint", "layout", "model", "deployment"]), JSON)
def test_any_value_in_any_field_gets_a_clear_answer(field: str, value: object) -> None:
    body = json.dumps({**json.loads(GOOD), field: value}).encode()
    answer = ask(make_app(RegistryTable()), "PUT", "/v1/ranks", body)
    assert answer.status_code in (200, 400, 409)


@settings(max_examples=60, deadline=None)
@given(NAMES)
def test_any_name_in_a_path_gets_a_clear_answer(name: str) -> None:
    app = make_app(RegistryTable())
    path = httpx.URL("http://registry/v1/topology", params={"deployment": name})
    assert ask(app, "GET", str(path)).status_code == 404
    quoted = str(httpx.QueryParams({"n": name}))[2:]
    for method, tail in (("POST", "/heartbeat"), ("DELETE", "")):
        assert ask(app, method, f"/v1/ranks/{quoted}{tail}").status_code in (404, 405, 307)


def test_raw_nonsense_on_the_socket_does_not_stop_the_server(server: RegistryServer) -> None:
    import socket

    for nonsense in (
        b"\x00\x01\x02\r\n\r\n",
        b"PUT /v1/ranks HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
    ):
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(nonsense)
            connection.recv(4096)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    connection.close()


def test_an_address_in_use_is_refused_by_name(server: RegistryServer) -> None:
    with pytest.raises(ConfigurationError, match=f"127.0.0.1 port {server.port}"):
        RegistryServer(port=server.port)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")],
)
def test_url_can_be_asked(host: str, url: str) -> None:
    server = BackgroundServer(make_app(RegistryTable()), host)
    try:
        assert server.url == f"{url}{server.port}"
    finally:
        server.stop()


def test_stop_twice_and_before_start() -> None:
    never_started = RegistryServer()
    never_started.stop()
    server = RegistryServer()
    server.start()
    server.stop()
    server.stop()


def test_a_client_that_hangs_up_is_no_error_of_the_server(
    server: RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    head = b"PUT /v1/ranks HTTP/1.1\r\nHost: registry\r\nContent-Length: 100\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + b"{")
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    time.sleep(0.2)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
