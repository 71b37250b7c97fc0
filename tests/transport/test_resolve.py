"""Names of hosts are looked up within a time, and by a few threads, however long the resolver takes."""

import socket
import threading

import pytest

from kvbaton.errors import AddressError
from kvbaton.transport import resolve as module
from kvbaton.transport.resolve import AT_ONCE, MOST_ADDRESSES, resolve


@pytest.fixture
def stuck(monkeypatch):
    """A resolver that answers nothing until the test is over."""
    free, asked, real = threading.Event(), [], socket.getaddrinfo

    def getaddrinfo(host, *others, **options):
        if module.is_address(host):
            # Threads of this process that outlive their tests make connections too.
            return real(host, *others, **options)
        asked.append(host)
        free.wait()
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    # The look-ups of this test alone.
    monkeypatch.setattr(module, "_free", threading.BoundedSemaphore(AT_ONCE))
    before = threading.enumerate()
    yield asked
    free.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join()


def answering(monkeypatch, *addresses):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: found)


@pytest.mark.parametrize("host", ["10.0.0.7", "::1", "fe80::1%lo"])
def test_an_address_is_not_looked_up(host, stuck):
    assert resolve(host, 0.0) == (host,)
    assert not stuck


def test_a_name_is():
    assert set(resolve("localhost", 10.0)) & {"127.0.0.1", "::1"}


def test_each_address_of_a_name_once_and_not_too_many(monkeypatch):
    answering(monkeypatch, "10.0.0.1", "10.0.0.1", *(f"10.0.1.{number}" for number in range(20)))
    found = resolve("many", 10.0)
    assert found[:2] == ("10.0.0.1", "10.0.1.0")
    assert len(found) == MOST_ADDRESSES


@pytest.mark.parametrize("host", ["a\0b", "x" * 300])
def test_a_name_that_is_none(host):
    with pytest.raises(AddressError, match="was not found"):
        resolve(host, 10.0)


def test_a_name_that_is_not_known(monkeypatch):
    def getaddrinfo(*given, **options):
        raise socket.gaierror("nobody knows it")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(AddressError, match="'nowhere' was not found: nobody knows it"):
        resolve("nowhere", 10.0)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_name_of_every_address(wildcard, monkeypatch):
    answering(monkeypatch, "10.0.0.1", wildcard)
    with pytest.raises(AddressError, match="every address"):
        resolve("0x0", 10.0)


def test_a_resolver_that_does_not_answer_is_left_alone(stuck):
    for _ in range(AT_ONCE):
        with pytest.raises(AddressError, match=r"within 0\.01 s: advertise an IP address"):
            resolve("slow", 0.01)
    with pytest.raises(AddressError, match="'one more'"):
        resolve("one more", 0.01)
    assert stuck == ["slow"] * AT_ONCE
