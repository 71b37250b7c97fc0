"""Which protocol an engine starts with, and what is refused before it starts; no library is needed for that."""

import os
from types import SimpleNamespace

import pytest

from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.transport.fabric.mooncake import engine as mooncake_engine
from kvbaton.transport.fabric.mooncake.descriptor import MooncakeDescriptor
from kvbaton.transport.fabric.mooncake.engine import choose, lanes, library, start


class FakeModule:
    """Notes what the engine is started with, and fails over RDMA if told to."""

    def __init__(self, rdma_works=True):
        self.rdma_works = rdma_works
        self.calls = []

    def TransferEngine(self):  # noqa: N802
        return self

    def get_rpc_port(self):
        return 0

    def send_probe(self, address):
        return -1

    def initialize(self, *arguments):
        forced = {name: os.environ.get(name) for name in ("MC_FORCE_TCP", "MC_FORCE_HCA")}
        self.calls.append((arguments, forced))
        return 0 if "MC_FORCE_TCP" in os.environ or self.rdma_works else -1


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MC_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    def have(*names):
        for name in names:
            (tmp_path / name).mkdir()

    monkeypatch.setattr(mooncake_engine, "_INFINIBAND", tmp_path)
    return have


def test_protocol_follows_the_devices_of_the_machine(devices):
    assert choose({}) == (["tcp"], "")
    devices("mlx5_0", "mlx5_1")
    assert choose({}) == (["rdma"], "")
    assert choose({"devices": "mlx5_1, mlx5_0"}) == (["rdma"], "mlx5_1,mlx5_0")
    assert choose({"protocol": "tcp"}) == (["tcp"], "")


def test_rdma_without_a_device_is_refused_unless_tcp_is_allowed(devices):
    with pytest.raises(TransportUnavailable, match=r"this machine has none; .*allow_tcp=1"):
        choose({"protocol": "rdma"})
    devices("mlx5_0")
    with pytest.raises(TransportUnavailable, match="rdma with mlx5_7, but this machine has mlx5_0"):
        choose({"protocol": "rdma", "devices": "mlx5_7"})
    assert choose({"protocol": "rdma", "devices": "mlx5_7", "allow_tcp": "1"}) == (["rdma", "tcp"], "mlx5_7")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"colour": "red"}, "no option colour; it has protocol"),
        ({"protocol": "carrier pigeon"}, "'carrier pigeon'"),
        ({"allow_tcp": "maybe"}, "'maybe'"),
        ({"protocol": "tcp", "devices": "mlx5_0"}, "devices are for protocol=rdma"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        choose(options)


@pytest.mark.parametrize(
    ("variable", "value"), [("MC_TCP_PROTO", "1"), ("MC_TCP_ENABLE_CONNECTION_POOL", "False"), ("MC_USE_TENT", "1")]
)
def test_variables_that_change_the_promises_are_refused(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"{variable} is"):
        choose({"protocol": "tcp"})


def test_variables_that_do_not_are_not(monkeypatch):
    monkeypatch.setenv("MC_TCP_PROTO", "2")
    monkeypatch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    assert choose({"protocol": "tcp"}) == (["tcp"], "")


@pytest.mark.parametrize(
    ("protocol", "forced"),
    [("tcp", ("1", None)), ("rdma", (None, "1"))],
)
def test_engine_gets_no_choice_of_its_own(protocol, forced, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    module = FakeModule()
    assert start(module, "10.0.0.1", [protocol], "mlx5_0")[0] == protocol
    ((arguments, seen),) = module.calls
    assert arguments == ("10.0.0.1", "P2PHANDSHAKE", protocol, "mlx5_0" if protocol == "rdma" else "")
    assert (seen["MC_FORCE_TCP"], seen["MC_FORCE_HCA"]) == forced
    left = {name: value for name, value in os.environ.items() if name.startswith("MC_")}
    assert left == {"MC_FORCE_TCP": "0"}


def test_settings_are_there_when_the_library_is_loaded(monkeypatch):
    monkeypatch.setenv("MC_LOG_LEVEL", "TRACE")
    seen = {}

    def load(name):
        seen.update({name: value for name, value in os.environ.items() if name.startswith("MC_")})
        raise ImportError(f"no {name}")

    monkeypatch.setattr(mooncake_engine.importlib, "import_module", load)
    with pytest.raises(TransportUnavailable, match=r"no mooncake\.engine.*libibverbs1"):
        library(ipv6=True)
    assert seen == {"MC_LOG_LEVEL": "TRACE", "MC_RDMA_RAIL_PAUSE_SECONDS": "1", "MC_USE_IPV6": "1"}
    assert {name for name in os.environ if name.startswith("MC_")} == {"MC_LOG_LEVEL"}


LOADED = SimpleNamespace(TransferEngine=SimpleNamespace(send_probe=None))


@pytest.mark.parametrize("version", ["0.3.11.post1", "0.2"])
def test_old_library_is_refused(version, monkeypatch):
    monkeypatch.setattr(mooncake_engine.importlib, "import_module", lambda _: LOADED)
    monkeypatch.setattr(mooncake_engine, "_version", lambda: version)
    with pytest.raises(TransportUnavailable, match=f"Mooncake {version} is too old.*0.3.12 is needed"):
        library()


@pytest.mark.parametrize("version", ["0.3.12", "0.3.13.post1", "1.0", ""])
def test_new_library_is_taken(version, monkeypatch):
    monkeypatch.setattr(mooncake_engine.importlib, "import_module", lambda _: LOADED)
    monkeypatch.setattr(mooncake_engine, "_version", lambda: version)
    assert library() is LOADED


def test_fall_back_to_tcp_is_said(caplog):
    module = FakeModule(rdma_works=False)
    assert start(module, "10.0.0.1", ["rdma", "tcp"], "")[0] == "tcp"
    assert "cannot use RDMA" in caplog.text
    with pytest.raises(TransportUnavailable, match=r"cannot start over rdma at 10\.0\.0\.1"):
        start(module, "10.0.0.1", ["rdma"], "")


DESCRIBED = MooncakeDescriptor("10.0.0.1", 15000, "tcp", 4096, b"t" * 16, b"\0" * 16)


def test_descriptor_comes_back():
    assert MooncakeDescriptor.decode(DESCRIBED.encode(), "x") == DESCRIBED
    assert str(DESCRIBED.address) == "10.0.0.1:15000"
    assert list(DESCRIBED.bases) == [0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"host": "not a host"},
        {"host": ""},
        {"port": 70000},
        {"port": -1},
        {"token_address": -1},
        {"token_address": 1 << 63},
        {"token": b""},
        {"regions": b"\0" * 7},
        {"regions": b"\xff" * 8},
    ],
)
def test_damaged_descriptor_is_refused(change):
    fields = {name: getattr(DESCRIBED, name) for name in DESCRIBED.__struct_fields__} | change
    with pytest.raises(TransportError, match="the descriptor of peer x cannot be understood"):
        MooncakeDescriptor.decode(MooncakeDescriptor(**fields).encode(), "x")


@pytest.mark.parametrize("cut", range(0, len(DESCRIBED.encode()), 5))
def test_cut_descriptor_is_refused(cut):
    with pytest.raises(TransportError):
        MooncakeDescriptor.decode(DESCRIBED.encode()[:cut], "x")


def test_connections_to_a_peer_are_those_of_the_variable(monkeypatch):
    assert lanes() == 4
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "9")
    assert lanes() == 9
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "many")
    assert lanes() == 4
