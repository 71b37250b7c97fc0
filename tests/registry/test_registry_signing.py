"""Requests to a registry that shares a secret, and every way of not sharing it."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import AuthenticationError, RegistryError
from kvbaton.layout.nouns import Coords, RankLayout
from kvbaton.registry import HttpRegistry, Registration, RegistryRefused, RegistryUnauthorized
from kvbaton.registry.server import RegistryServer
from kvbaton.registry.signing import ANSWER_HEADER, CLOCK_SECONDS, Refusal, Signer, Verifier
from kvbaton.secret import Secret

ONE, TWO = "the-secret-of-one-deployment", "the-secret-of-another-deployment"
SECRET = Secret.of(ONE)
assert SECRET is not None
RANK = Registration("a", "tcp://127.0.0.1:7000", RankLayout(()), "m")
REPLICA = Registration("a", "tcp://127.0.0.1:7000", RankLayout((), Coords(dp=(0, 2))), "m")
START = 1_000_000.0


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer(secret=ONE) as running:
        yield running


def test_every_call_works_with_the_secret(server: RegistryServer) -> None:
    client = HttpRegistry(server.url, secret=ONE)
    client.register(REPLICA)
    assert client.heartbeat("a")
    assert not client.heartbeat("b")
    assert client.announce_rooms("a", [7], []) == {}
    assert client.find_rooms("default", [7, 8]).rooms == {7: 0}
    with pytest.raises(RegistryRefused, match="missing: tp0/1") as refused:
        client.topology()
    assert not isinstance(refused.value, AuthenticationError)
    with pytest.raises(RegistryRefused, match="no rank of deployment 'blue green'"):
        client.topology("blue green")
    assert client.topology("default", 0).ranks == (REPLICA,)
    client.remove("a")
    client.remove("a")
    assert len(server.table) == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        (ONE, TWO, "another secret"),
        (ONE, None, "wants a secret, and the request has none"),
        (None, ONE, "not signed with our secret"),
    ],
)
def test_a_client_that_does_not_share_it_is_told_by_name(
    theirs: str | None, ours: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RegistryServer(secret=theirs) as running:
        client = HttpRegistry(running.url, secret=ours)
        calls: list[Callable[[], object]] = [
            lambda: client.register(RANK),
            lambda: client.heartbeat("a"),
            lambda: client.remove("a"),
            lambda: client.topology(),
            lambda: client.announce_rooms("a", [1], []),
            lambda: client.find_rooms("default", [1]),
        ]
        for call in calls:
            with pytest.raises(RegistryUnauthorized, match=why) as caught:
                call()
            assert "KVBATON_SECRET" in str(caught.value)
            assert isinstance(caught.value, (AuthenticationError, RegistryError))
            assert ONE not in str(caught.value) + caplog.text
            assert TWO not in str(caught.value) + caplog.text
        if theirs is not None:
            assert len(running.table) == 0
            refused = [record for record in caplog.records if "was refused" in record.message]
            assert len([record for record in refused if record.levelno == logging.WARNING]) == 1


def test_both_secrets_count_while_one_is_replaced() -> None:
    with RegistryServer(secret=[ONE, TWO]) as running:
        HttpRegistry(running.url, secret=[ONE, TWO]).register(RANK)
        assert HttpRegistry(running.url, secret=TWO).heartbeat("a")
        assert HttpRegistry(running.url, secret=[TWO, ONE]).topology().ranks == (RANK,)
        with pytest.raises(RegistryUnauthorized):
            HttpRegistry(running.url, secret="a-secret-that-nobody-has").topology()


def test_health_is_open_and_gives_nothing_away(server: RegistryServer) -> None:
    HttpRegistry(server.url, secret=ONE).register(RANK)
    answer = httpx.get(f"{server.url}/health", trust_env=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    for path in ("/", "/v1/topology", "/v1/ranks", "/health/x", "/docs", "/openapi.json", "//health"):
        assert httpx.get(server.url + path, trust_env=False).status_code == 401
    assert httpx.get(f"{server.url}/health", params={"x": "1"}, trust_env=False).json() == {"status": "ok"}


def signed(method: str, target: str, body: bytes = b"", clock: float | None = None) -> dict[str, str]:
    signer = Signer(SECRET) if clock is None else Signer(SECRET, lambda: clock)
    return {"Authorization": signer.sign(method, target, body).header}


def ask(server: RegistryServer, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> httpx.Response:
    return httpx.request(method, server.url + target, headers=headers, content=body, trust_env=False)


def test_a_write_is_taken_once(server: RegistryServer) -> None:
    HttpRegistry(server.url, secret=ONE).register(RANK)
    headers = signed("DELETE", "/v1/ranks/a")
    assert ask(server, "DELETE", "/v1/ranks/a", headers).status_code == 200
    HttpRegistry(server.url, secret=ONE).register(RANK)
    again = ask(server, "DELETE", "/v1/ranks/a", headers)
    assert again.status_code == 401
    assert again.json()["error"]["type"] == "Replayed"
    assert len(server.table) == 1


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("DELETE", "/v1/ranks/b", b""),
        ("POST", "/v1/ranks/a", b""),
        ("DELETE", "/v1/ranks/a?x=1", b""),
        ("DELETE", "/v1/ranks/%61", b""),
    ],
)
def test_a_signature_is_for_one_request_only(server: RegistryServer, method: str, target: str, body: bytes) -> None:
    HttpRegistry(server.url, secret=ONE).register(RANK)
    answer = ask(server, method, target, signed("DELETE", "/v1/ranks/a"), body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "SecretDiffers")
    assert len(server.table) == 1


def test_a_body_that_was_changed_is_not_taken(server: RegistryServer) -> None:
    body = msgspec.json.encode(RANK)
    headers = signed("PUT", "/v1/ranks", body)
    answer = ask(server, "PUT", "/v1/ranks", headers, body.replace(b"7000", b"6666"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "BodyDiffers")
    for cut in (body[:-1], body + b" ", b""):
        headers = signed("PUT", "/v1/ranks", body)
        assert ask(server, "PUT", "/v1/ranks", headers, cut).status_code == 401
    assert len(server.table) == 0
    assert ask(server, "PUT", "/v1/ranks", signed("PUT", "/v1/ranks", body), body).status_code == 200


def test_a_stranger_s_body_is_not_even_read(server: RegistryServer) -> None:
    """The answer comes while the body has not."""
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.sendall(b"PUT /v1/ranks HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("seconds", [-CLOCK_SECONDS - 60, CLOCK_SECONDS + 60])
def test_a_clock_that_is_wrong_is_told_with_both_times(server: RegistryServer, seconds: float) -> None:
    client = HttpRegistry(server.url, secret=ONE)
    client._signer = Signer(SECRET, lambda: time.time() + seconds)
    with pytest.raises(RegistryUnauthorized, match=r"clock said 20.*registry's says 20.*\d+\.\d s apart.*300 s"):
        client.topology()


def test_what_is_as_old_as_what_was_forgotten_is_not_believed() -> None:
    now = [START]
    verifier = Verifier(SECRET, lambda: now[0], max_nonces=3)
    headers = []
    for number in range(5):
        headers.append(Signer(SECRET, lambda at=START + number: at).sign("PUT", "/x", b"").header)
        verifier.check("PUT", "/x", headers[-1])
    assert len(verifier) == 3
    for header, kind in zip(headers, ["ClockDiffers"] * 2 + ["Replayed"] * 3, strict=True):
        with pytest.raises(Refusal) as refused:
            verifier.check("PUT", "/x", header)
        assert refused.value.kind == kind
    # Nor when the clock is set back, after they were forgotten for their age.
    now[0] = START + 3 * CLOCK_SECONDS
    verifier.check("PUT", "/x", Signer(SECRET, lambda: now[0]).sign("PUT", "/x", b"").header)
    assert len(verifier) == 1
    now[0] = START
    for header in headers:
        with pytest.raises(Refusal):
            verifier.check("PUT", "/x", header)


def test_a_registry_that_begins_believes_no_writes_of_before() -> None:
    before = Signer(SECRET, lambda: START - 60).sign("DELETE", "/x", b"").header
    verifier = Verifier(SECRET, lambda: START)
    with pytest.raises(Refusal, match="apart"):
        verifier.check("DELETE", "/x", before)
    assert verifier.check("GET", "/x", Signer(SECRET, lambda: START - 60).sign("GET", "/x", b"").header)
    assert verifier.check("DELETE", "/x", Signer(SECRET, lambda: START - 5).sign("DELETE", "/x", b"").header)


def test_reads_are_not_remembered() -> None:
    verifier = Verifier(SECRET, lambda: START)
    for _ in range(10):
        verifier.check("GET", "/x", Signer(SECRET, lambda: START).sign("GET", "/x", b"").header)
    assert len(verifier) == 0


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=300), st.binary(max_size=40).map(lambda noise: "KVBaton 1:" + noise.hex())))
def test_any_header_is_refused_by_name(header: str) -> None:
    verifier = Verifier(SECRET, lambda: START)
    with pytest.raises(Refusal) as refused:
        verifier.check("PUT", "/x", header)
    assert refused.value.signed is None
    assert ONE not in str(refused.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_a_header_is_refused(data: st.DataObject) -> None:
    header = Signer(SECRET, lambda: START).sign("PUT", "/x", b"body").header
    at = data.draw(st.integers(0, len(header) - 1))
    character = data.draw(st.sampled_from("0123456789abcdef:K "))
    changed = header[:at] + character + header[at + 1 :]
    if changed == header:
        return
    with pytest.raises(Refusal) as refused:
        Verifier(SECRET, lambda: START).check("PUT", "/x", changed)
    assert refused.value.kind in ("SecretMissing", "SecretDiffers")


def test_keys_are_not_in_a_repr() -> None:
    request = Signer(SECRET).sign("PUT", "/x", b"")
    assert request.key.hex() not in repr(request)
    assert str(request.key) not in repr(request)


Change = Callable[[int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]]


class Stranger:
    """Stands between a client and its registry, and lets ``change(status, headers, body)`` forge what it answers."""

    def __init__(
        self, server: RegistryServer, change: Callable[[int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]]
    ):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server, self._change = server, change
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(1 << 20)
                head, _, body = request.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                method, target, _ = lines[0].split(" ")
                headers = dict(line.split(": ", 1) for line in lines[1:])
                while len(body) < int(headers.get("Content-Length", "0")):
                    body += connection.recv(1 << 20)
                there = http.client.HTTPConnection(self._server.host, self._server.port, timeout=10)
                kept = {name: value for name, value in headers.items() if name in ("Authorization", "Content-Type")}
                there.request(method, target, body or None, kept)
                answer = there.getresponse()
                status, given, content = self._change(answer.status, dict(answer.headers), answer.read())
                there.close()
                given |= {"Content-Length": str(len(content)), "Connection": "close"}
                text = "".join(f"{name}: {value}\r\n" for name, value in given.items())
                connection.sendall(f"HTTP/1.1 {status} Because\r\n{text}\r\n".encode() + content)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def _other_header(value: str | None) -> Change:
    name = ANSWER_HEADER.lower()

    def change(status: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        kept = {key: text for key, text in headers.items() if key.lower() != name}
        return status, kept if value is None else {**kept, name: value}, body

    return change


FORGERIES: dict[str, Change] = {
    "another body": lambda status, headers, body: (status, headers, body[:-1] + b" " + body[-1:]),
    "another status": lambda status, headers, body: (201, headers, body),
    "an error": lambda status, headers, body: (404, headers, json.dumps({"error": {"message": "unknown"}}).encode()),
    "no signature": _other_header(None),
    "a wrong signature": _other_header("0" * 64),
    "nonsense": _other_header("\xff\xfe"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_an_answer_that_was_forged_is_not_believed(server: RegistryServer, name: str) -> None:
    HttpRegistry(server.url, secret=ONE).register(RANK)
    stranger = Stranger(server, FORGERIES[name])
    try:
        with pytest.raises(RegistryUnauthorized, match="not signed with our secret"):
            HttpRegistry(stranger.url, secret=ONE).topology()
        with pytest.raises(RegistryUnauthorized, match="not signed with our secret"):
            HttpRegistry(stranger.url, secret=ONE).heartbeat("a")
    finally:
        stranger.close()


def test_an_answer_to_another_request_is_not_believed(server: RegistryServer) -> None:
    """What a registry answered before is no answer now."""
    HttpRegistry(server.url, secret=ONE).register(RANK)
    kept: list[tuple[int, dict[str, str], bytes]] = []

    def first_again(status: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        kept.append((status, headers, body))
        return kept[0]

    stranger = Stranger(server, first_again)
    try:
        client = HttpRegistry(stranger.url, secret=ONE)
        assert client.topology().ranks == (RANK,)
        with pytest.raises(RegistryUnauthorized, match="not signed"):
            client.topology()
    finally:
        stranger.close()


def test_an_unsigned_5xx_is_an_outage_and_no_refusal(server: RegistryServer) -> None:
    stranger = Stranger(server, lambda status, headers, body: (503, {}, b"busy"))
    try:
        with pytest.raises(RegistryError, match="503") as caught:
            HttpRegistry(stranger.url, secret=ONE).topology()
        assert not isinstance(caught.value, RegistryRefused)
    finally:
        stranger.close()
