"""The end of a connection, by a clock that a test moves: its states share the time of whoever waits for it."""

import socket
from types import SimpleNamespace

import numpy as np
import pytest

from kvbaton.memory import Region
from kvbaton.transport.conformance.case import rows
from kvbaton.transport.fabric import link, side
from kvbaton.transport.fabric.area import Area, flags
from kvbaton.transport.fabric.base import FabricPeer
from kvbaton.transport.fabric.link import DRAINING, LEAVING, LETTING_GO, OPEN, OVER, Link
from kvbaton.transport.fabric.loads import cut_loads
from kvbaton.transport.fabric.options import FabricOptions
from kvbaton.transport.fabric.outgoing import Remote
from kvbaton.transport.fabric.shares import Staging
from kvbaton.transport.table import RegionTable
from kvbaton.transport.tickets import Tickets

OPTIONS = FabricOptions(slabs=1, staging_slabs=1, slab_bytes=4096)


class StuckPump:
    """Calls at once, and has a library that never ends what was posted and lets go of nothing, until told."""

    def __init__(self):
        self.links = {}
        self.staging = Staging(1)
        self.posted = []
        self.given_up = []
        self.lets_go = False

    def call(self, command):
        command()
        return True

    def takes(self, owner):
        return True

    def post(self, owner, peer, writes, ended):
        self.posted.append(ended)

    def let_go(self, owner, peer):
        return self.lets_go

    def give_up(self, owner, peer, keep, over):
        self.given_up.append(over)

    def listen(self, sock, link, *, writing=False):
        pass

    def forget(self, sock):
        pass


class Stuck:
    """A link with one write that the library has."""

    def __init__(self, clock):
        self.clock = clock
        self.pump, self.tickets, self.over = StuckPump(), Tickets(), []
        sock, self.peer = socket.socketpair()
        memory = np.arange(64, dtype=np.uint8)
        lengths = np.array([64])
        remote = Remote("far", 7, FabricPeer("far"), lengths, np.array([-1]), flags([True]), (0,), 4096)
        area = Area.of(Region.of(np.zeros(OPTIONS.area_bytes, np.uint8)), OPTIONS)
        table = RegionTable([Region.of(memory)])
        self.link = Link(self.pump, sock, remote, area, table, self.tickets, self.over)
        self.link.submit(1, iter(()), cut_loads([rows(64, [0], [0])], 4096))
        assert self.link.advance()
        assert len(self.pump.posted) == 1

    def at(self, now):
        """The state after a look at that time."""
        self.clock.now = now
        self.link.tick(now)
        return self.link._state


@pytest.fixture
def stuck(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: clock.now))
    made = Stuck(clock)
    yield made
    made.peer.close()
    made.link._sock.close()


def test_a_disconnect_from_a_peer_that_does_not_go_on_has_one_deadline(stuck):
    assert stuck.at(100.0) == OPEN
    stuck.link.ask_to_stop("enough")
    assert [stuck.at(now) for now in (100.0, 100.9, 101.0)] == [DRAINING, DRAINING, LETTING_GO]
    assert stuck.at(101.4) == LETTING_GO
    assert not stuck.pump.given_up
    assert stuck.at(101.5) == LEAVING
    assert len(stuck.pump.given_up) == 1
    assert stuck.tickets.drain() == []
    assert [stuck.at(now) for now in (101.9, 102.0)] == [LEAVING, OVER]
    assert [tuple(ended) for ended in stuck.tickets.drain()] == [(1, "enough")]
    assert stuck.link._ended.is_set()


def test_a_disconnect_that_comes_later_shortens_what_the_library_has(stuck):
    stuck.link.broke("the network is down")
    assert [stuck.at(now) for now in (100.0, 101.0)] == [LETTING_GO] * 2
    stuck.link.ask_to_stop("enough")
    assert [stuck.at(now) for now in (102.4, 102.5)] == [LETTING_GO, LEAVING]
    assert [stuck.at(now) for now in (102.9, 103.0)] == [LEAVING, OVER]
    assert [tuple(ended) for ended in stuck.tickets.drain()] == [(1, "the network is down")]


def test_a_peer_that_is_lost_while_nobody_waits_gives_the_library_more_time(stuck):
    stuck.link.broke("the network is down")
    assert [stuck.at(now) for now in (104.9, 105.0)] == [LETTING_GO, LEAVING]


def test_a_library_that_is_quick_costs_no_time(stuck):
    stuck.pump.lets_go = True
    stuck.link.broke("the device fell off")
    assert stuck.link._state == LEAVING
    assert stuck.over == [7]
    stuck.peer.settimeout(10)
    assert stuck.peer.recv(4096) == side.FAREWELL
    stuck.pump.posted[0]("cancelled")
    stuck.peer.shutdown(socket.SHUT_WR)
    stuck.link.readable()
    assert stuck.link._state == OVER


def test_what_the_library_lets_go_of_too_late_is_noted_all_the_same(stuck):
    stuck.link.ask_to_stop("enough")
    for now in (101.0, 101.5, 102.0):
        stuck.at(now)
    assert stuck.over == []
    (over,) = stuck.pump.given_up
    over()
    assert stuck.over == [7]
