"""Which descriptors a rank of the soak should have closed: by what its transports say that they keep."""

import os
import socket

import pytest

from kvbaton.check.soak.descriptors import Met, leaked, left_behind, open_descriptors
from kvbaton.observe import PeerRecord
from kvbaton.transport import Capabilities, create
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport


class Declared:
    def __init__(self, name, kept_sockets):
        self.name = name
        self.capabilities = Capabilities(False, True, frozenset(), False, kept_sockets=kept_sockets)


def meet(met, transport, *instances):
    for instance in instances:
        met.peer_joined(None, PeerRecord(instance, "tp0/1", transport))


def test_what_may_be_kept_is_what_transports_declare():
    met = Met([Declared("one", 0), Declared("keeper", 4)])
    assert met.kept_sockets == 0
    meet(met, "one", "a", "b", "c")
    assert met.kept_sockets == 0
    meet(met, "keeper", "a", "d", "a")
    assert met.kept_sockets == 8


@pytest.mark.parametrize(
    ("before", "after", "kept", "found"),
    [
        ({"socket:[N]": 9}, {"socket:[N]": 9}, 0, {}),
        ({"socket:[N]": 9}, {"socket:[N]": 3}, 0, {}),
        ({"socket:[N]": 9}, {"socket:[N]": 10}, 0, {"socket:[N]": 1}),
        ({"socket:[N]": 9}, {"socket:[N]": 17}, 8, {}),
        ({"socket:[N]": 9}, {"socket:[N]": 18}, 8, {"socket:[N]": 9}),
        ({"socket:[N]": 9}, {"socket:[N]": 9, "/memfd:kvbaton (deleted)": 1}, 8, {"/memfd:kvbaton (deleted)": 1}),
        ({"socket:[N]": 9, "pipe:[N]": 1}, {"socket:[N]": 10}, 0, {}),
        ({"socket:[N]": 9}, {"socket:[N]": 12, "pipe:[N]": 1}, 4, {"socket:[N]": 3, "pipe:[N]": 1}),
    ],
)
def test_what_is_more_than_before(before, after, kept, found):
    assert leaked(before, after, kept) == found


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_leak_of_one_descriptor_is_seen_however_many_were_met(name):
    transport = create(name, instance="me")
    met = Met([transport])
    meet(met, name, *"abcdefgh")
    before = open_descriptors()
    with socket.socket():
        assert leaked(before, open_descriptors(), met.kept_sockets) == {"socket:[N]": 1}
    forgotten = os.memfd_create("forgotten")
    assert sum(leaked(before, open_descriptors(), met.kept_sockets).values()) == 1
    os.close(forgotten)
    assert leaked(before, open_descriptors(), met.kept_sockets) == {}
    transport.close()


def test_a_fabric_says_what_its_library_keeps(monkeypatch):
    for kept in (0, 4):
        monkeypatch.setattr(MemoryFabric, "kept_sockets", kept)
        transport = FabricTransport("me", MemoryFabric("me"))
        assert transport.capabilities.kept_sockets == kept
        transport.close()


def test_files_that_other_programs_make_meanwhile_are_not_ours():
    names = ["psm_4711", "4711.lock", "loads_b47110e_3bc11a63.shm", "mp-4712-0", "47110"]
    assert left_behind(names, {4711}) == ["psm_4711", "4711.lock"]
