"""Options of transports that a manager makes by name."""

import threading

import pytest
from rank_world import Model

from kvbaton.errors import ConfigurationError
from kvbaton.transport.loopback import LoopbackTransport

KV = Model(("kv",))


def test_options_reach_the_transport_of_that_name(world):
    options = {"memory": {"executor": "packed", "slabs": "3"}}
    (rank,) = world.prefill(KV.layout(), transports=["loopback", "memory"], transport_options=options)
    made = rank.manager._transports["memory"].options
    assert (made.executor, made.slabs) == ("packed", 3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nixl": {"executor": "packed"}}, "given for nixl, which are not in transports"),
        ({"loopback": {"executor": "packed"}}, "loopback has no option executor"),
        ({"memory": {"speed": "high"}}, "memory has no option speed"),
        ({"memory": {"slabs": 5}}, "the option slabs of memory is 5; values of options are text, in quotes"),
        ({"memory": {"slabs": None}}, "the option slabs of memory is None; values of options are text"),
        ({"memory": {5: "slabs"}}, "memory has no option 5; names of options are text"),
        ({"memory": "packed"}, "the options of memory are 'packed'; they must be names with their values, both text"),
        ({"loopback": ["packed"]}, r"the options of loopback are \['packed'\]; they must be names"),
        ("packed", "transport_options are 'packed'; they must be options by transport"),
        ({3: {}}, "given for 3, which are not in transports"),
    ],
)
def test_options_that_reach_nobody_are_refused(world, options, reason):
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match=reason):
        world.prefill(KV.layout(), transports=["tcp", "memory", "loopback"], transport_options=options)
    assert threading.active_count() == before


def test_ready_transports_have_their_options_already(world):
    transport = LoopbackTransport("ready")
    with pytest.raises(ConfigurationError, match="given for loopback, which are not in transports"):
        world.decode(KV.layout(), transports=[transport], transport_options={"loopback": {}})
    transport.close()
