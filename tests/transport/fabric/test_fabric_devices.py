"""Adapters are told which network devices are near, where they can be told and nobody named others."""

from types import ModuleType

import pytest

from kvbaton.devices import Choice
from kvbaton.errors import ConfigurationError
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport import fabric
from kvbaton.transport.fabric import base, open_transport
from kvbaton.transport.fabric.memory import MemoryFabric

NEAR = Choice(("mlx5_0", "mlx5_1"), "on the same PCI switch", ("mlx5_0:1", "mlx5_1:2"))


@pytest.fixture
def opened(monkeypatch):
    """An adapter of a made-up library; gives what it was made with."""
    made = []

    class Adapter(MemoryFabric):
        def __init__(self, instance, *, options, bind, advertise):
            super().__init__(instance, options={}, bind=bind, advertise=advertise)
            made.append(dict(options))

    def open_it(form, options, near):
        module = ModuleType("kvbaton.transport.fabric.made_up")
        module.OPTIONS = {"devices": "which", "protocol": "how"}
        module.Adapter = Adapter
        if form is not None:
            module.device_names = lambda own: None if own.get("protocol") == "tcp" else form
        monkeypatch.setitem(fabric.FABRICS, "made_up", "Adapter")
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
        open_transport("made_up", "here", options=options, near=near).close()
        return made[-1]

    return open_it


@pytest.mark.parametrize(
    ("form", "options", "near", "told"),
    [
        ("device", {}, NEAR, {"devices": "mlx5_0,mlx5_1"}),
        ("port", {"slabs": "8"}, NEAR, {"devices": "mlx5_0:1,mlx5_1:2"}),
        ("device", {"devices": "mlx5_9"}, NEAR, {"devices": "mlx5_9"}),
        ("device", {"protocol": "tcp"}, NEAR, {"protocol": "tcp"}),
        ("device", {}, Choice((), "none here"), {}),
        (None, {}, NEAR, {}),
    ],
)
def test_devices_that_are_near(opened, form, options, near, told):
    assert opened(form, options, lambda: near) == told


def test_nothing_is_looked_for_where_nobody_would_use_it(opened):
    def look():
        raise ConfigurationError("nobody asked")

    assert opened("device", {"devices": "mlx5_9"}, look) == {"devices": "mlx5_9"}
    assert opened(None, {}, look) == {}
    with pytest.raises(ConfigurationError, match="nobody asked"):
        opened("device", {}, look)
    assert opened("device", {}, None) == {}


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
