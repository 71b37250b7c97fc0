"""Where the shared secret comes from, what is refused, and that it is never shown."""

import copy
import logging
import pickle
import traceback

import pytest
from rank_world import Model, Rank

import kvbaton as kb
from kvbaton import secret as secrets_module
from kvbaton.errors import AddressError, ConfigurationError
from kvbaton.registry.server import RegistryServer
from kvbaton.secret import Secret, check_exposure, insecure_allowed

LONG = "correct-horse-battery-staple"
OTHER = "another-secret-of-many-bytes"
SMALL = Model(("kv",))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("KVBATON_SECRET", "KVBATON_SECRET_FILE", "KVBATON_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    secrets_module._warn_once.cache_clear()


def same(first, second):
    return first.keys("test") == second.keys("test")


def test_every_form_of_one_secret_is_the_same(tmp_path):
    file = tmp_path / "secret"
    expected = Secret([LONG.encode()])
    for content in (LONG, LONG + "\n", LONG + "\r\n", f"\n  {LONG}  \n\n"):
        file.write_bytes(content.encode())
        assert same(Secret.of(None, {"KVBATON_SECRET_FILE": str(file)}), expected)
        assert same(Secret.of(None, {"KVBATON_SECRET": content}), expected)
        assert same(Secret.of(content), expected)
    assert same(Secret.of(LONG.encode()), expected)
    assert same(Secret.of([LONG]), expected)
    assert Secret.of(expected) is expected
    assert Secret.of(None, {}) is None


def test_bytes_are_taken_as_they_are():
    binary = bytes(range(32))
    assert b"\n" in binary
    assert len(Secret.of(binary)) == 1


def test_a_given_secret_counts_more_than_the_environment():
    assert same(Secret.of(LONG, {"KVBATON_SECRET": OTHER}), Secret([LONG.encode()]))


def test_several_secrets_one_a_line_the_first_first():
    both = Secret.of(f"{LONG}\n{OTHER}\n")
    assert len(both) == 2
    assert both.keys("test") == (*Secret.of(LONG).keys("test"), *Secret.of(OTHER).keys("test"))
    assert same(both, Secret.of([LONG, OTHER.encode()]))


def test_keys_differ_by_purpose_and_by_secret():
    keys = {key for text in (LONG, OTHER) for purpose in ("a", "b") for key in Secret.of(text).keys(purpose)}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("short", "secret 1 of 1 has 5 bytes"),
        (b"x" * 15, "has 15 bytes"),
        ("", "is empty"),
        (" \n ", "is empty"),
        (b"", "has 0 bytes"),
        ([], "0 secrets"),
        ([LONG, "short"], "secret 2 of 2 has 5 bytes"),
        ([LONG] * 5, "5 secrets"),
        (b"x" * 5000, "has 5000 bytes"),
        (17, "not int"),
        ({LONG: 1}, "not dict"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_without_showing_it(given, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        Secret.of(given)
    assert LONG not in "".join(traceback.format_exception(caught.value))
    assert "short" not in str(caught.value).replace("has 5 bytes", "")


def test_what_cannot_be_a_secret_in_the_environment(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" + LONG.encode())
    cases = [
        ({"KVBATON_SECRET": ""}, "KVBATON_SECRET is empty"),
        ({"KVBATON_SECRET": LONG, "KVBATON_SECRET_FILE": "x"}, "both"),
        ({"KVBATON_SECRET_FILE": str(tmp_path / "none")}, "No such file"),
        ({"KVBATON_SECRET_FILE": str(tmp_path)}, "Is a directory"),
        ({"KVBATON_SECRET_FILE": "\0"}, "cannot be read"),
        ({"KVBATON_SECRET_FILE": str(binary)}, "not text"),
    ]
    for environment, why in cases:
        with pytest.raises(ConfigurationError, match=why) as caught:
            Secret.of(None, environment)
        assert LONG not in "".join(traceback.format_exception(caught.value))
    lone = Secret.of("\ud800" * 16)
    assert len(lone) == 1


def test_it_is_never_shown():
    secret = Secret.of([LONG, OTHER])
    assert LONG not in repr(secret) + str(secret) + f"{secret!r}"
    assert not hasattr(secret, "__dict__")
    for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            serialise(secret)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-3", "2001:db8::1", "*", "::ffff:10.0.0.1"])
def test_an_address_beyond_loopback_needs_a_secret(host, caplog, monkeypatch):
    with pytest.raises(ConfigurationError, match="KVBATON_SECRET") as caught:
        check_exposure("registry", ("127.0.0.1", host), None, insecure=False)
    assert repr(host) in str(caught.value)
    check_exposure("registry", (host,), Secret.of(LONG), insecure=False)
    assert not caplog.records
    for _ in range(3):
        check_exposure("registry", (host,), None, insecure=True)
    monkeypatch.setenv("KVBATON_INSECURE", "1")
    check_exposure("registry", (host,), None, insecure=False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "without a secret" in caplog.text


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"]
)
def test_loopback_needs_none(host, caplog):
    check_exposure("registry", (host,), None, insecure=False)
    assert not caplog.records


@pytest.mark.parametrize(("text", "allowed"), [("1", True), ("0", False), ("", False)])
def test_the_environment_may_allow_it(text, allowed):
    assert insecure_allowed(False, {"KVBATON_INSECURE": text}) is allowed
    assert insecure_allowed(True, {"KVBATON_INSECURE": text})
    with pytest.raises(ConfigurationError, match="'yes'"):
        insecure_allowed(False, {"KVBATON_INSECURE": "yes"})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_manager_beyond_loopback_needs_a_secret(role, monkeypatch):
    rank, options = Rank(SMALL.layout()), {"transports": ["tcp"]}
    try:
        for where in ({"bind": "0.0.0.0", "advertise": "127.0.0.1"}, {"advertise": "10.0.0.1"}):
            with pytest.raises(ConfigurationError, match=rf"^{role}: .*KVBATON_SECRET"):
                rank.start(role, kb.MemoryRegistry(), **where, **options)
        # A wildcard that nobody can dial is that, whatever else is missing.
        with pytest.raises(AddressError, match="advertise="):
            rank.start(role, kb.MemoryRegistry(), bind="0.0.0.0", secret=LONG, **options)
        for allowed in ({"secret": LONG}, {"settings": kb.Settings(insecure=True)}):
            rank.start(role, kb.MemoryRegistry(), bind="0.0.0.0", advertise="127.0.0.1", **allowed, **options)
            assert LONG not in repr(vars(rank.manager)) + repr(rank.manager._context)
            rank.manager.close()
        monkeypatch.setenv("KVBATON_SECRET", LONG)
        rank.start(role, kb.MemoryRegistry(), bind="0.0.0.0", advertise="127.0.0.1", **options)
    finally:
        rank.close()


def test_a_registry_beyond_loopback_needs_a_secret():
    for host in ("0.0.0.0", "::", "[::]"):
        with pytest.raises(ConfigurationError, match=r"^registry: .*KVBATON_SECRET"):
            RegistryServer(host)
    for allowed in ({"secret": LONG}, {"insecure": True}):
        RegistryServer("0.0.0.0", **allowed).stop()
