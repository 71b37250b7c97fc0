from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from kvbaton.errors import ConfigurationError, RegistryError
from kvbaton.layout import SLOT
from kvbaton.layout.nouns import Axis, Component, Coords, RankLayout, Tensor
from kvbaton.registry import HttpRegistry, MemoryRegistry, Registration, RegistryClient, RegistryRefused
from kvbaton.registry.server import RegistryServer

TENSOR = Tensor("key", 3, 0, 1 << 40, 8, 512, "bfloat16", (Axis("head", 4, 64, ((0, 1), (2, 1))),))


def rank(instance: str, tp: int = 0, size: int = 1) -> Registration:
    layout = RankLayout((Component("state", SLOT, (TENSOR,)),), Coords(tp=(tp, size)))
    return Registration(instance, f"tcp://127.0.0.1:{7000 + tp}", layout, "m")


@pytest.fixture
def http_registry() -> Iterator[RegistryClient]:
    with RegistryServer() as server:
        yield HttpRegistry(server.url + "/")


@pytest.fixture(params=["memory", "http"])
def registry(request: pytest.FixtureRequest) -> RegistryClient:
    if request.param == "memory":
        return MemoryRegistry()
    return request.getfixturevalue("http_registry")  # type: ignore[no-any-return]


def test_what_was_registered_is_what_is_found(registry: RegistryClient) -> None:
    ranks = (rank("a", 0, 2), rank("b", 1, 2))
    registry.register(ranks[1])
    registry.register(ranks[0])
    assert registry.topology().ranks == ranks


def test_heartbeat_tells_known_from_unknown(registry: RegistryClient) -> None:
    registry.register(rank("a"))
    assert registry.heartbeat("a")
    assert not registry.heartbeat("b")
    registry.register(rank("b"))
    assert not registry.heartbeat("a")
    registry.remove("b")
    registry.remove("b")
    assert not registry.heartbeat("b")


def test_refusals_carry_the_reason(registry: RegistryClient) -> None:
    with pytest.raises(RegistryRefused, match="no rank of deployment 'green'"):
        registry.topology("green")
    registry.register(rank("a", 0, 2))
    with pytest.raises(RegistryRefused, match="missing: tp1/2"):
        registry.topology()
    with pytest.raises(RegistryRefused, match=r"tp size 3.*says 2"):
        registry.register(rank("b", 1, 3))


def test_memory_registry_forgets_by_its_clock() -> None:
    now = [0.0]
    registry = MemoryRegistry(ttl=5.0, clock=lambda: now[0])
    registry.register(rank("a"))
    now[0] = 5.5
    assert not registry.heartbeat("a")


def test_many_threads_share_one_registry(registry: RegistryClient) -> None:
    def work(tp: int) -> None:
        registry.register(rank(f"i{tp}", tp, 8))
        for _ in range(5):
            assert registry.heartbeat(f"i{tp}")

    failures: list[BaseException] = []

    def guarded(tp: int) -> None:
        try:
            work(tp)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(tp,)) for tp in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [each.instance for each in registry.topology().ranks] == [f"i{tp}" for tp in range(8)]


def test_the_environment_s_proxy_is_not_used(http_registry: RegistryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    fresh = HttpRegistry(http_registry.url)  # type: ignore[attr-defined]
    fresh.register(rank("a"))
    assert fresh.heartbeat("a")


def answering(reply: bytes) -> tuple[str, Callable[[], None]]:
    """A server of one connection, which sends ``reply`` to whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(reply)

    thread = threading.Thread(target=work)
    thread.start()

    def close() -> None:
        thread.join()
        listener.close()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", close


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "connection broke"),
        (b"garbage\r\n\r\n", "connection broke"),
        (b"HTTP/1.0 500 Oops\r\n\r\nbad day", "500.*bad day"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n<html>", "404"),
        (b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "302"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\n{}", "connection broke"),
        (b"HTTP/1.0 200 OK\r\n\r\n[]", "not a topology"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 50_000, "not a topology"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff", "not a topology"),
    ],
)
def test_answers_that_make_no_sense_are_named(reply: bytes, message: str) -> None:
    url, close = answering(reply)
    try:
        with pytest.raises(RegistryError, match=message) as caught:
            HttpRegistry(url).topology()
        assert url in str(caught.value)
        assert not isinstance(caught.value, RegistryRefused)
    finally:
        close()


def test_a_404_of_something_else_is_not_an_unknown_rank() -> None:
    url, close = answering(b"HTTP/1.0 404 Not Found\r\n\r\n<html>")
    try:
        with pytest.raises(RegistryError, match="404"):
            HttpRegistry(url).heartbeat("a")
    finally:
        close()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RegistryError, match=f"127.0.0.1:{port}.*cannot be reached"):
        HttpRegistry(f"http://127.0.0.1:{port}").topology()


def test_silence_ends_at_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RegistryError, match=r"no answer in 0\.05 s"):
            HttpRegistry(url, timeout=0.05).topology()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "ftp://a:1",
        "file:///etc/passwd",
        "http://",
        "http://a:99999",
        "http://a:1?x=1",
        "http://u@a",
    ],
)
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigurationError, match="http://host:port"):
        HttpRegistry(url)


def test_the_client_needs_no_http_framework() -> None:
    code = "import sys, kvbaton.registry; print(sorted({'fastapi', 'uvicorn', 'torch', 'httpx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_server_without_its_extra_names_it() -> None:
    code = "import sys; sys.modules['fastapi'] = None\nimport kvbaton.registry\nkvbaton.registry.serve()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ConfigurationError" in done.stderr
    assert "kvbaton[registry]" in done.stderr


def test_a_registry_that_has_just_started_says_so() -> None:
    with RegistryServer(ttl=60.0) as server:
        registry = HttpRegistry(server.url)
        for ask in (registry.topology, lambda: registry.find_rooms("default", [1])):
            with pytest.raises(RegistryRefused, match="has just started") as caught:
                ask()
            assert 0 < caught.value.returning_seconds <= 60.0
        registry.register(rank("a"))
        with pytest.raises(RegistryRefused) as other:
            registry.topology(dp_rank=7)
        assert other.value.returning_seconds == 0.0
