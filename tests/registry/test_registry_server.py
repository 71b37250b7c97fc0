from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import ConfigurationError
from kvbaton.layout.nouns import Coords, RankLayout
from kvbaton.registry import Registration, RegistryTable
from kvbaton.registry.server import BackgroundServer, RegistryServer, make_app

GOOD = msgspec.json.encode(Registration("i0", "tcp://127.0.0.1:7000", RankLayout(()), "m"))


def ask(app: object, method: str, path: str, content: bytes | None = None) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
            return await client.request(method, path, content=content)

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
        (GOOD.replace(b"[0,1]", b"[-1,1]", 1), "coords tp: rank is -1"),
        (GOOD.replace(b"[0,1]", b"[0,-4]", 1), "coords tp: size is -4"),
        (GOOD.replace(b"[0,1]", b"[0,9223372036854775808]", 1), "coords tp: size is 9223372036854775808"),
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
