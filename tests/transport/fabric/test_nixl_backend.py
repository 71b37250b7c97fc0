"""Options of NIXL and what they become, without the library."""

import pytest

from kvbaton.errors import ConfigurationError, TransportUnavailable
from kvbaton.transport.fabric.nixl import backend as nixl_backend
from kvbaton.transport.fabric.nixl.backend import OPTIONS, parameters

FOUND = {"mlx5_0:1": "rdma", "mlx5_1:1": "rdma", "mlx5_1:2": "rdma", "eth0": "tcp", "eth1": "tcp"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(nixl_backend, "devices_found", lambda: dict(FOUND))
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def settings(taken):
    return dict(setting.split("=") for setting in taken["engine_config"].split(","))


def test_ucx_is_told_how_long_to_try():
    backend, taken = parameters({})
    assert backend == "UCX"
    assert settings(taken) == {"KEEPALIVE_INTERVAL": "inf", "RC_RETRY_COUNT": "3", "UD_TIMEOUT": "30s"}
    assert taken.keys() == {"engine_config"}


def test_unknown_options_are_refused_with_those_that_are_known():
    with pytest.raises(ConfigurationError, match="no option device, size") as refused:
        parameters({"size": "1", "device": "x"})
    assert all(name in str(refused.value) for name in OPTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "MORI"},
        {"num_threads": "-1"},
        {"num_threads": "65"},
        {"num_threads": "²"},
        {"protocol": "carrier pigeon"},
        {"backend": "LIBFABRIC", "protocol": "rdma"},
        {"backend": "LIBFABRIC", "devices": "mlx5_0:1"},
    ],
)
def test_values_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigurationError):
        parameters(options)


def test_threads_are_the_librarys():
    assert parameters({"num_threads": "8"})[1]["num_threads"] == "8"
    assert "num_threads" not in parameters({"num_threads": "0"})[1]


@pytest.mark.parametrize(("protocol", "transports"), [("rdma", "^tcp"), ("tcp", "^ib")])
def test_protocol_forbids_the_other_one(protocol, transports, monkeypatch):
    assert settings(parameters({"protocol": protocol})[1])["TLS"] == transports
    monkeypatch.setenv("UCX_TLS", "rc")
    with pytest.raises(ConfigurationError, match="UCX_TLS is set too"):
        parameters({"protocol": protocol})


def test_rdma_without_a_device_is_refused_and_never_falls_back(monkeypatch):
    monkeypatch.setattr(nixl_backend, "devices_found", lambda: {"eth0": "tcp"})
    with pytest.raises(TransportUnavailable, match=r"no network device for rdma; found are eth0 \(tcp\)"):
        parameters({"protocol": "rdma"})


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        ("mlx5_0:1", "mlx5_0"),
        ("mlx5_0:1, mlx5_1:1", "mlx5_1:1,mlx5_0"),
        ("eth0,mlx5_1:1", "eth0,mlx5_1"),
        ("mlx5_0:1,mlx5_1:2,eth0", "mlx5_1:2,eth0,mlx5_0"),
    ],
)
def test_devices_are_given_so_that_the_port_which_nixl_appends_is_right(devices, given):
    assert parameters({"devices": devices})[1]["device_list"] == given
    assert sorted(f"{given}:1".split(",")) == sorted(devices.replace(" ", "").split(","))


@pytest.mark.parametrize("device", ["eth0", "mlx5_1:2"])
def test_one_device_without_port_one_is_a_setting(device, monkeypatch):
    taken = parameters({"devices": device})[1]
    assert "device_list" not in taken
    assert settings(taken)["NET_DEVICES"] == device
    monkeypatch.setenv("UCX_NET_DEVICES", "eth1")
    with pytest.raises(ConfigurationError, match="UCX_NET_DEVICES"):
        parameters({"devices": device})


def test_devices_that_nixl_has_no_way_to_take_are_refused():
    with pytest.raises(ConfigurationError, match="set UCX_NET_DEVICES to it"):
        parameters({"devices": "eth0,eth1"})


def test_devices_that_are_not_there_are_refused_with_those_that_are():
    with pytest.raises(TransportUnavailable, match=r"no network device mlx9; found are mlx5_0:1 \(rdma\)"):
        parameters({"devices": "mlx5_0:1,mlx9"})


@pytest.mark.parametrize(
    ("named", "costs"),
    [
        (None, nixl_backend.SHARED_MEMORY_COSTS),
        ("tcp", nixl_backend.TCP_COSTS),
        ("self,tcp", nixl_backend.TCP_COSTS),
        ("tcp,posix,sysv", nixl_backend.SHARED_MEMORY_COSTS),
    ],
)
def test_costs_follow_what_ucx_was_told_to_use(monkeypatch, named, costs):
    if named is not None:
        monkeypatch.setenv("UCX_TLS", named)
    assert nixl_backend.costs() == costs
