"""Adapters are told which network devices are near, where they can be told and nobody named others."""

import operator
import sys
from types import ModuleType
from typing import ClassVar

import pytest

from kvbaton.devices import Choice
from kvbaton.errors import ConfigurationError
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import fabric
from kvbaton.transport.fabric import base, open_transport
from kvbaton.transport.fabric.memory import MemoryFabric

NEAR = Choice(("mlx5_0", "mlx5_1"), "on the same PCI switch", ("mlx5_0:1", "mlx5_1:2"))

DEVICES, PORTS = operator.attrgetter("devices"), operator.attrgetter("ports")


@pytest.fixture
def opened(monkeypatch):
    """An adapter of a made-up library; gives what it was made with."""
    made = []

    class Adapter(MemoryFabric):
        OPTIONS: ClassVar = {"devices": "which", "protocol": "how"}

        def __init__(self, instance, *, options, bind, advertise):
            super().__init__(instance, options={}, bind=bind, advertise=advertise)
            made.append(dict(options))

    def open_it(form, options, near):
        def tell(own, near):
            return "" if own.get("protocol") == "tcp" else ",".join(form(near()))

        monkeypatch.setattr(Adapter, "devices_option", staticmethod(tell if form else base.Fabric.devices_option))
        module = ModuleType("kvbaton.transport.fabric.made_up")
        module.Adapter = Adapter
        monkeypatch.setitem(fabric.FABRICS, "made_up", "made_up:Adapter")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        open_transport("made_up", "here", options=options, near=near).close()
        return made[-1]

    return open_it


@pytest.mark.parametrize(
    ("form", "options", "near", "told"),
    [
        (DEVICES, {}, NEAR, {"devices": "mlx5_0,mlx5_1"}),
        (PORTS, {"slabs": "8"}, NEAR, {"devices": "mlx5_0:1,mlx5_1:2"}),
        (DEVICES, {"devices": "mlx5_9"}, NEAR, {"devices": "mlx5_9"}),
        (DEVICES, {"protocol": "tcp"}, NEAR, {"protocol": "tcp"}),
        (DEVICES, {}, Choice((), "none here"), {}),
        (None, {}, NEAR, {}),
    ],
)
def test_devices_that_are_near(opened, form, options, near, told):
    assert opened(form, options, lambda: near) == told


def test_nothing_is_looked_for_where_nobody_would_use_it(opened):
    def look():
        raise ConfigurationError("nobody asked")

    assert opened(DEVICES, {"devices": "mlx5_9"}, look) == {"devices": "mlx5_9"}
    assert opened(None, {}, look) == {}
    with pytest.raises(ConfigurationError, match="nobody asked"):
        opened(DEVICES, {}, look)
    assert opened(DEVICES, {}, None) == {}


@pytest.mark.parametrize("hardware", [True, False])
def test_the_transport_says_whether_network_cards_carry_its_bytes(monkeypatch, hardware):
    monkeypatch.setattr(MemoryFabric, "hardware", hardware, raising=False)
    transport = open_transport("memory", "here")
    memory = SharedMemory(4096)
    transport.register([Region.of(memory)])
    assert transport.capabilities.hardware is hardware
    assert base.Fabric.hardware is False
    transport.close()
    memory.close()


@pytest.mark.parametrize(
    ("name", "options", "near", "told"),
    [
        ("nixl", {}, NEAR, "mlx5_0:1,mlx5_1:2"),
        ("nixl", {"protocol": "tcp"}, NEAR, ""),
        ("nixl", {"backend": "libfabric"}, NEAR, ""),
        ("nixl", {}, Choice(("a",), "", ("a:2", "a:3")), ""),
        ("nixl", {}, Choice(("a",), "", ("a:2",)), "a:2"),
        ("mooncake", {}, NEAR, "mlx5_0,mlx5_1"),
        ("mooncake", {"protocol": "tcp"}, NEAR, ""),
        ("mori", {}, NEAR, "mlx5_0,mlx5_1"),
        ("mori", {"backends": "xgmi"}, NEAR, ""),
    ],
)
def test_what_each_adapter_is_told(monkeypatch, name, options, near, told):
    for variable in ("UCX_NET_DEVICES", "MORI_RDMA_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    assert fabric.adapter_of(name).devices_option(options, lambda: near) == told


@pytest.mark.parametrize(("name", "variable"), [("nixl", "UCX_NET_DEVICES"), ("mori", "MORI_RDMA_DEVICES")])
def test_what_the_user_told_the_library_itself_counts(monkeypatch, name, variable):
    monkeypatch.setenv(variable, "mlx5_7:1")
    assert fabric.adapter_of(name).devices_option({}, lambda: NEAR) == ""
