"""Options of fabric transports: what is known, what is refused, and where they come from."""

import numpy as np
import pytest

from kvbaton.errors import ConfigurationError, TransportUnavailable
from kvbaton.transport import create
from kvbaton.transport.base import Costs
from kvbaton.transport.fabric.base import FabricLimits
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.options import FabricOptions
from kvbaton.transport.fabric.transport import FabricTransport


def test_generic_options_are_taken_and_the_others_left():
    taken, rest = FabricOptions.take({"executor": "packed", "slab_bytes": "1MiB", "slabs": "7", "devices": "mlx5_0"})
    assert (taken.executor, taken.slab_bytes, taken.slabs) == ("packed", 1 << 20, 7)
    assert taken._replace(executor="auto", slab_bytes=2 << 20, slabs=64) == FabricOptions()
    assert rest == {"devices": "mlx5_0"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("executor", "mapped"),
        ("slabs", "0"),
        ("slabs", "-1"),
        ("slabs", "4097"),
        ("slabs_per_peer", "many"),
        ("staging_slabs", ""),
        ("slab_bytes", "0"),
        ("slab_bytes", "1000"),
        ("slab_bytes", "2TiB"),
        ("slab_bytes", "2GiB"),
        ("quarantine_seconds", "-1"),
        ("quarantine_seconds", "nan"),
        ("quarantine_seconds", "soon"),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=name):
        FabricOptions.take({name: value})


def test_create_gives_a_transport_the_options_and_refuses_unknown_ones():
    transport = create("memory", instance="optioned", options={"executor": "packed", "slabs": "3"})
    assert transport.options == FabricOptions(executor="packed", slabs=3)
    assert not transport.capabilities.one_sided
    transport.close()
    with pytest.raises(ConfigurationError, match="memory has no option speed"):
        create("memory", instance="optioned", options={"speed": "high"})
    with pytest.raises(ConfigurationError, match="tcp has no option streams"):
        create("tcp", instance="optioned", options={"streams": "2"})


def test_a_transport_that_cannot_be_made_leaves_no_fabric_behind():
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="an instance id has 1 to 255 bytes"):
            create("memory", instance="x" * 300)
    fabric = MemoryFabric("narrow", limits=FabricLimits(write_bytes=1 << 20))
    with pytest.raises(ConfigurationError, match="slab_bytes is 2097152, but memory writes at most 1048576"):
        FabricTransport("narrow", fabric)
    with pytest.raises(ConfigurationError, match="memory has no option speed; known here are executor, slabs"):
        FabricTransport("narrow", fabric, options={"speed": "high"})
    fabric.close()


def test_a_fabric_without_host_memory_has_no_slabs():
    fabric = MemoryFabric("device")
    fabric.memory_kinds = frozenset({"cuda"})
    with pytest.raises(TransportUnavailable, match="does not reach host memory here"):
        FabricTransport("device", fabric)
    fabric.close()


def test_slabs_are_in_memory_that_starts_on_a_page_and_is_zero():
    from kvbaton.transport.fabric.area import Area, pages

    options = FabricOptions(slabs=3, staging_slabs=2, slab_bytes=8192)
    area = Area.of(pages(options.area_bytes), options)
    view = area.whole.view
    assert area.region.address % 4096 == 0
    assert area.region.nbytes == len(view) == 5 * 8192
    assert [area.landing(2), area.staging(0), area.staging(1)] == [16384, 24576, 32768]
    assert not np.frombuffer(view, dtype=np.uint8).any()


@pytest.mark.parametrize("name", ["nixl", "mooncake", "mori", "memory", "tcp"])
@pytest.mark.parametrize("options", [{"slabs": 5}, {"slab_bytes": 2 << 20}, {"executor": True}, {"devices": ["eth0"]}])
def test_values_that_are_not_text_are_refused_by_name_before_a_library_is_asked(name, options):
    (option,) = options
    with pytest.raises(ConfigurationError, match=f"the option {option} of {name} is .*; values of options are text"):
        create(name, instance="no-text", options=options)


@pytest.mark.parametrize("options", ["packed", b"packed", [("executor", "packed")], 5])
def test_options_that_are_no_mapping_are_refused(options):
    with pytest.raises(ConfigurationError, match=r"the options of nixl are .*both text"):
        create("nixl", instance="no-mapping", options=options)


def test_a_transport_chooses_by_the_costs_of_its_adapter(monkeypatch):
    costs = Costs(piece_seconds=1.0)
    monkeypatch.setattr(MemoryFabric, "costs", costs, raising=False)
    transport = create("memory", instance="costly")
    assert transport.capabilities.costs == costs
    transport.close()
