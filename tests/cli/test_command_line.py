from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton import __version__
from kvbaton.cli.main import main
from kvbaton.serve import launch
from kvbaton.serve.refusals import UNASKED_SECONDS


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["kvbaton", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_serve_reaches_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
    for name in ("run_prefill", "run_decode", "run_router", "run_pd"):
        monkeypatch.setattr(launch, name, lambda *a, name=name, **k: calls.append((name, a, k)) or 0)
    prefill = ["prefill", "--model", "m", "--port", "1", "--bootstrap-port", "2", "--options", '{"page_size": 4}']
    assert _run(monkeypatch, "serve", *prefill) == 0
    assert _run(monkeypatch, "serve", "decode", "--model", "m", "--port", "3", "--served-model-name", "x") == 0
    assert _run(monkeypatch, "serve", "router", "--prefill", "http://a,5", "--decode", "http://b", "--port", "4") == 0
    assert _run(monkeypatch, "serve", "pd", "--model", "m", "--prefills", "2", "--transport", "tcp") == 0
    assert [name for name, _, _ in calls] == ["run_prefill", "run_decode", "run_router", "run_pd"]
    assert calls[0][1] == ("m", "127.0.0.1", 1, 2)
    assert calls[0][2]["options"] == {"page_size": 4, "manager_options": {"transports": ["shm", "tcp"]}}
    assert calls[1][2]["served_model_name"] == "x"
    assert calls[2][1][:2] == ([("http://a", 5)], ["http://b"])
    assert calls[3][2]["prefills"] == 2
    assert calls[3][2]["options"] == {"manager_options": {"transports": ["tcp"]}}


@pytest.mark.parametrize("command", [["demo"], ["serve", "pd", "--model", "m"]])
@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ("nope", "there is no transport 'nope'; choose among loopback, shm, cuda, tcp, nixl, mooncake, mori"),
        ("shm, nope", "there is no transport 'nope'"),
        ("auto,tcp", "name transports, or write auto alone"),
        (",", "name transports, or write auto alone"),
    ],
)
def test_transports_are_checked_before_anything_large_is_loaded(
    command: list[str],
    transport: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # None there makes an import of it fail.
    monkeypatch.setitem(sys.modules, "kvbaton.demo.run", None)
    monkeypatch.setattr(launch, "run_pd", lambda *_, **__: pytest.fail("the servers were started"))
    assert _run(monkeypatch, *command, "--transport", transport) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1


def test_a_path_that_is_not_there_is_not_asked_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _run(monkeypatch, "serve", "decode", "--model", "models/recal", "--port", "0") == 2
    told = capsys.readouterr().err
    assert f"the model models/recal is not there, but the folder {tmp_path / 'models'} is" in told


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_virtual_ranks_are_options_of_the_engine(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(launch, f"run_{role}", lambda *arguments, **options: calls.append(options))
    flags = ["--tp", "2", "--cp", "4", "--cp-unit", "16", "--order", "HND", "--options", '{"tp": 8, "pp": 3}']
    assert _run(monkeypatch, "serve", role, "--model", "m", *flags) == 0
    given = {"tp": 2, "pp": 3, "cp": 4, "cp_unit": 16, "order": "HND"}
    assert calls[0]["options"] == {**given, "manager_options": {"transports": ["shm", "tcp"]}}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_addresses_go_to_the_managers_and_the_registry(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    class Registry:
        app = None

        def __init__(self, host: str, port: int) -> None:
            seen.append(("registry", host))

        def __enter__(self) -> Registry:
            return self

        def __exit__(self, *error: object) -> None:
            return None

    def serve(role: str, model: str, host: str, *arguments: object) -> None:
        seen.append((role, host, arguments[-1]))

    monkeypatch.setattr(launch, "RegistryServer", Registry)
    monkeypatch.setattr(launch, "add_routes", lambda *_: None)
    monkeypatch.setattr(launch, "_serve", serve)
    flags = ["--host", "127.0.0.2", "--bind", "127.0.0.3", "--advertise", "127.0.0.4"]
    assert _run(monkeypatch, "serve", role, "--model", "m", *flags) == 0
    addresses = {"bind": "127.0.0.3", "advertise": "127.0.0.4"}
    options = {"manager_options": {"transports": ["shm", "tcp"], **addresses}}
    assert seen == [("registry", "127.0.0.3")] * (role == "prefill") + [(role, "127.0.0.2", options)]


def test_how_long_prefill_works_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(launch, "run_prefill", lambda *_, unasked_seconds, **others: seen.append(unasked_seconds))
    assert _run(monkeypatch, "serve", "prefill", "--model", "m", "--unasked-seconds", "0") == 0
    assert _run(monkeypatch, "serve", "prefill", "--model", "m") == 0
    assert seen == [0.0, UNASKED_SECONDS]


@pytest.mark.parametrize(
    "command", [["prefill", "--model", "."], ["decode", "--model", "."], ["registry"]], ids=lambda command: command[0]
)
def test_beyond_loopback_a_secret_is_needed_or_insecure(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found before the model is looked at."""
    for name in ("KVBATON_SECRET", "KVBATON_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVBATON_INSECURE", "0")
    monkeypatch.setattr(launch, "_check_model", lambda model: pytest.fail("the model was looked at"))
    assert _run(monkeypatch, "serve", *command, "--host", "0.0.0.0") == 2
    told = capsys.readouterr().err
    assert "KVBATON_SECRET" in told
    assert "--insecure" in told
    monkeypatch.setenv("KVBATON_SECRET", "short")
    assert _run(monkeypatch, "serve", *command, "--host", "0.0.0.0") == 2
    assert "has 5 bytes" in capsys.readouterr().err
    monkeypatch.delenv("KVBATON_SECRET")
    stop = SystemExit(7)

    def stops(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(launch, "stop_with_parent", stops)
    monkeypatch.setattr(launch, "_stop_signal", stops)
    port = ["--bootstrap-port", "0"] if command[0] == "prefill" else ["--port", "0"]
    assert _run(monkeypatch, "serve", *command, "--host", "0.0.0.0", *port, "--insecure") == 7
    assert os.environ["KVBATON_INSECURE"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "decode", "--model", "m", "--options", '{"manager_options": {"secret": "x"}}'],
            "a command line can be read by others: set KVBATON_SECRET or KVBATON_SECRET_FILE",
        ),
        (["serve", "router", "--prefill", "http://a,none", "--decode", "http://b"], "URL,BOOTSTRAP_PORT"),
        (["serve", "router", "--prefill", "http://a", "--decode", "http://b"], "URL,BOOTSTRAP_PORT"),
        (["serve", "decode", "--model", "m", "--options", "{"], "--options is no JSON"),
        (["serve", "decode", "--model", "m", "--options", "[1]"], "must be a JSON object, not list"),
        (["serve", "decode", "--model", "/no/such/model"], "/no/such/model"),
        (["serve", "decode", "--model", "m", "--options", '{"manager_options": 5}'], "must be a JSON object, not int"),
        (
            ["serve", "decode", "--model", "m", "--options", '{"manager_options": {"settings": {"cast": true}}}'],
            "manager_options has settings, but only transports, transport_options, bind, advertise, deployment can be",
        ),
        (
            ["serve", "pd", "--model", "m", "--decode-options", '{"manager_options": {"port": 1}}'],
            "--decode-options: manager_options has port, but only transports,",
        ),
        (["serve", "decode", "--model", "m", "--cp-unit", "4"], "--cp-unit 4 without --cp: one rank holds all tokens"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("ConfigurationError: ")
    assert message in told
    assert "Traceback" not in told


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_registry_by_itself_ends_cleanly(ending: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvbaton", "serve", "registry", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("registry at http://127.0.0.1:")
        process.send_signal(ending)
        assert process.wait(20) == 0
