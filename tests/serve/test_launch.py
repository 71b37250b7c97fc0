from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.errors import ConfigurationError
from kvbaton.serve import launch
from kvbaton.serve.processes import PDCluster
from kvbaton.serve.router import router_command


def test_router_command() -> None:
    command = router_command(
        [("http://a:1", 11), ("http://b:2", 22)],
        ["http://c:3", "http://d:4"],
        port=8000,
        metrics_port=9000,
        extra=["--x"],
    )
    text = " ".join(command)
    assert "--pd-disaggregation --prefill http://a:1 11 --prefill http://b:2 22 --decode http://c:3" in text
    assert "--port 8000" in text
    assert "--prometheus-port 9000" in text
    assert command[-1] == "--x"


@pytest.mark.parametrize(("prefills", "decodes"), [([], ["http://c:3"]), ([("http://a:1", 1)], [])])
def test_a_router_needs_both_sides(prefills: list[tuple[str, int]], decodes: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="prefill and"):
        router_command(prefills, decodes, port=1, metrics_port=2)


def test_the_command_line_of_each_server_has_the_options_of_its_role() -> None:
    cluster = PDCluster("m", options={"a": 1}, prefill_options={"b": 2}, decode_options={"a": 3}, served_model_name="n")
    prefill = list(cluster._command("prefill", 5, 6))
    decode = list(cluster._command("decode", 7, 0))
    assert prefill[-1] == '{"a":1,"b":2}'
    assert "--bootstrap-port 6" in " ".join(prefill)
    assert decode[-1] == '{"a":3}'
    assert "--bootstrap-port" not in decode


def test_a_model_that_is_not_there_is_a_configuration_error(tmp_path: object) -> None:
    def build(*args: object, **options: object) -> object:
        raise AssertionError("the tokenizer is looked at first")

    with pytest.raises(ConfigurationError, match="no/such/model"):
        launch.run_decode("/no/such/model", port=0, build=build)  # type: ignore[arg-type]


def test_an_address_in_use_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    def build(*args: object, **options: object) -> object:
        raise AssertionError("the address is looked at first")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1 port {port}"):
            launch.run_decode(str(tmp_path), port=port, build=build)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1 port {port}"):
            launch.run_prefill(str(tmp_path), port=0, bootstrap_port=port, build=build)  # type: ignore[arg-type]


def test_the_engine_s_interface_needs_no_http_framework() -> None:
    code = "import sys, kvbaton.serve; print(sorted({'fastapi', 'uvicorn', 'torch', 'httpx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
