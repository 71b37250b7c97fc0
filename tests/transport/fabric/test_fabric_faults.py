"""What a transport does when the fabric does not: lost peers, failing and endless writes, full queues, fences."""

import logging
import threading
import time

import numpy as np
import pytest
from fabric_ends import Ends
from peer_process import eventually

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.transport.fabric import link, pump, transport
from kvbaton.transport.fabric.base import FabricLimits


@pytest.fixture
def make():
    made = []

    def ends(*arguments, **options):
        made.append(Ends(*arguments, **options))
        return made[-1].connect()

    yield ends
    for one in made:
        one.close()


@pytest.fixture(params=["packed", "direct"])
def executor(request):
    return request.param


def test_a_write_that_fails_ends_its_ticket_and_no_other(make, executor):
    ends = make(executor)
    ends.fabrics[0].faults.fail = lambda handle: "the cable is out" if handle == 0 else ""
    ends.write(1)
    assert ends.errors(1) == ["the cable is out"]
    ends.write(2)
    assert ends.errors(2) == [""]
    np.testing.assert_array_equal(ends.target, ends.source)
    assert ends.peer.alive


def test_a_write_that_the_fabric_refuses_ends_its_ticket_and_no_other(make, executor):
    ends = make(executor)
    ends.fabrics[0].faults.refuse = lambda handle: "no such key" if handle == 0 else ""
    ends.write(1)
    (error,) = ends.errors(1)
    assert "no such key" in error
    assert ends.names[1] in error
    ends.write(2)
    assert ends.errors(2) == [""]


def test_a_dead_peer_ends_every_ticket_and_takes_no_further_write(make, executor):
    ends = make(executor)
    for ticket in range(5):
        ends.write(ticket)
    ends.fabrics[1].faults.dead = True
    assert all("is gone" in error or "broke" in error for error in ends.errors(*range(5)) if error)
    assert any(ends.ended.values())
    assert eventually(lambda: not ends.peer.alive)
    with pytest.raises(TransportError, match="connect again"):
        ends.write(9)
    with pytest.raises(TransportUnavailable, match="has ended"):
        ends.writer.connect(ends.destination.describe())
    # The failed connection gave its slabs back.
    assert eventually(lambda: ends.destination._receiver.free_slabs == 8)


def test_the_end_of_the_side_channel_is_the_end_of_the_peer(make, executor):
    ends = make(executor)
    ends.stick()
    (connection,) = ends.destination._receiver.connections_of(ends.names[0])
    connection.cut_off()
    (error,) = ends.errors(1)
    assert ends.names[1] in error
    assert not ends.peer.alive


def test_endless_writes_are_taken_back_by_a_disconnect(make, executor, monkeypatch):
    monkeypatch.setattr(link, "LEAVE_SECONDS", 0.2)
    ends = make(executor)
    ends.stick()
    ends.write(2)
    ends.writer.disconnect(ends.peer)
    assert all(f"disconnected from peer {ends.names[1]}" in error for error in ends.errors(1, 2))
    ends.fabrics[0].faults.stuck = False
    before = ends.target.copy()
    ends.peer = ends.writer.connect(ends.destination.describe())
    np.testing.assert_array_equal(ends.target, before)
    ends.write(3)
    assert ends.errors(3) == [""]


def test_memory_that_a_library_may_still_read_is_kept_and_told(make, executor, monkeypatch, caplog):
    monkeypatch.setattr(link, "LEAVE_SECONDS", 0.2)
    kept = []
    monkeypatch.setattr(pump, "_KEPT", kept)
    ends = make(executor)
    ends.stick(stubborn=True)
    with caplog.at_level(logging.ERROR):
        ends.writer.disconnect(ends.peer)
    assert ends.errors(1) == [f"disconnected from peer {ends.names[1]} before the write was over"]
    assert "could not take back" in caplog.text
    assert any(ends.writer.table in memory for _, memory in kept)
    # No goodbye: its slabs are not granted again, as long as its process lives.
    assert eventually(lambda: not ends.destination._receiver.connections_of(ends.names[0]))
    assert ends.destination._receiver.free_slabs == 7


def test_a_staging_slab_that_a_library_may_still_read_is_used_again_only_when_it_says_so(make, monkeypatch):
    monkeypatch.setattr(link, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(pump, "_KEPT", [])
    ends = make("packed", slabs="64", staging_slabs="1")
    ends.stick(stubborn=True)
    area = ends.writer._area
    staging = area.packed(64 << 16, area.region.nbytes - (64 << 16)).view
    before = bytes(staging)
    ends.writer.disconnect(ends.peer)
    assert ends.errors(1)[0]
    ends.peer = ends.writer.connect(ends.destination.describe())
    ends.source[:] = 7
    ends.write(2)
    time.sleep(0.2)
    assert ends.collect().keys() == {1}, "the write did not wait"
    assert bytes(staging) == before
    ends.fabrics[0].faults.stuck = False
    assert ends.errors(2) == [""]
    np.testing.assert_array_equal(ends.target, ends.source)


def test_a_library_that_lets_go_late_has_it_told_when_the_writer_comes_again(make, executor, monkeypatch):
    """The peer keeps the slabs of a connection without a goodbye, until it hears that it is over after all."""
    monkeypatch.setattr(link, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(pump, "_KEPT", [])
    ends = make(executor)
    receiver = ends.destination._receiver
    ends.stick(stubborn=True)
    ends.writer.disconnect(ends.peer)
    assert ends.errors(1)[0]
    assert eventually(lambda: not receiver.connections_of(ends.names[0]))
    ends.peer = ends.writer.connect(ends.destination.describe())
    assert receiver.free_slabs == 6, "slabs that a library may still write into were granted again"
    ends.fabrics[0].faults.stuck = ends.fabrics[0].faults.stubborn = False
    assert eventually(lambda: ends.writer._over[ends.names[1]])
    ends.writer.disconnect(ends.peer)
    ends.peer = ends.writer.connect(ends.destination.describe())
    assert eventually(lambda: receiver.free_slabs == 7)
    ends.write(2)
    assert ends.errors(2) == [""]


def test_what_is_over_is_remembered_of_so_many_peers(make, monkeypatch):
    monkeypatch.setattr(transport, "REMEMBERED", 2)
    ends = make("packed", slabs="64")
    for _ in range(4):
        other = Ends("packed")
        ends.writer.disconnect(ends.writer.connect(other.destination.describe()))
        other.close()
    assert list(ends.writer._over) == [f"destination-{int(other.names[1].split('-')[1]) - back}" for back in (1, 0)]


def test_queues_of_one_are_enough(make, executor):
    ends = make(executor, limits=FabricLimits(writes=3, write_bytes=70_000, posts=1))
    for ticket in range(10):
        ends.write(ticket)
    assert ends.errors(*range(10)) == [""] * 10
    np.testing.assert_array_equal(ends.target, ends.source)


def test_nothing_spins_when_nothing_is_under_way(make, executor):
    ends = make(executor)
    ends.write(1)
    assert ends.errors(1) == [""]
    time.sleep(0.05)
    before = ends.fabrics[0].polls
    time.sleep(0.2)
    assert ends.fabrics[0].polls == before


def test_a_library_that_raises_breaks_its_peers_but_not_the_thread(make, executor, monkeypatch, caplog):
    ends = make(executor)
    poll, broken = ends.fabrics[0].poll, threading.Event()
    broken.set()

    def failing():
        if broken.is_set():
            raise RuntimeError("the device fell off")
        return poll()

    monkeypatch.setattr(ends.fabrics[0], "poll", failing)
    monkeypatch.setattr(pump, "_KEPT", [])
    with caplog.at_level(logging.CRITICAL):
        ends.write(1)
        (error,) = ends.errors(1)
    assert "the device fell off" in error
    broken.clear()
    ends.peer = ends.writer.connect(ends.destination.describe())
    ends.write(2)
    assert ends.errors(2) == [""]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_peer_that_is_let_go_of_holds_up_no_other(make, executor, monkeypatch, caplog, goes_on):
    monkeypatch.setattr(pump, "_KEPT", [])
    monkeypatch.setattr(link, "LEAVE_SECONDS", 120.0)
    monkeypatch.setitem(link.PATIENCE, link.LETTING_GO, link.Patience(60.0, 0.75))
    ends = make(executor, slabs="64", staging_slabs="8")
    first = ends.peer
    ends.stick(stubborn=True)
    ends.fabrics[1].faults.stopped, ends.fabrics[0].faults.stuck = True, False
    leaving = threading.Thread(target=ends.writer.disconnect, args=(first,))
    leaving.start()
    assert eventually(lambda: first._state == link.LETTING_GO)
    other = Ends(executor)
    ends.peer = ends.writer.connect(other.destination.describe())
    other.destination.admit(ends.writer.describe())
    ends.write(2)
    assert ends.errors(2) == [""]
    assert first._state == link.LETTING_GO, "the library was waited for"
    np.testing.assert_array_equal(other.target, ends.source)
    if goes_on:
        ends.fabrics[1].faults.stopped = False
    else:
        first._deadline = 0.0
    leaving.join(20)
    assert not leaving.is_alive()
    assert ("could not take back" in caplog.text) is not goes_on
    ends.fabrics[1].faults.stopped = False
    other.close()


def test_packed_writers_are_fenced_while_they_are_stuck(make):
    ends = make("packed")
    ends.write(1)
    assert ends.errors(1) == [""]
    ends.fabrics[0].faults.stuck = True
    ends.write(2)
    assert ends.destination.fence(ends.names[0]) is True


def test_a_writer_that_packs_by_itself_is_fenced_though_the_regions_are_exposed(make, monkeypatch):
    monkeypatch.setattr(link, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(pump, "_KEPT", [])
    ends = make("packed", theirs="auto")
    ends.stick(stubborn=True)
    assert ends.destination.fence(ends.names[0]) is True


def test_a_direct_writer_is_fenced_by_its_own_word(make):
    ends = make("direct")
    ends.stick()
    assert ends.destination.fence(ends.names[0]) is True
    assert ends.errors(1) != [""]
    ends.fabrics[0].faults.stuck = False
    before = ends.target.copy()
    time.sleep(0.05)
    np.testing.assert_array_equal(ends.target, before)


def test_a_direct_writer_whose_library_goes_on_is_not_declared_fenced(make, monkeypatch):
    monkeypatch.setitem(link.PATIENCE, link.LETTING_GO, link.Patience(0.1, 0.75))
    monkeypatch.setattr(pump, "_KEPT", [])
    ends = make("direct")
    ends.stick(stubborn=True)
    assert [ends.destination.fence(ends.names[0]) for _ in range(3)] == [False] * 3
    assert ends.errors(1) != [""]
    # The library's own means are a proof; its slabs are free then.
    assert ends.destination._receiver.free_slabs == 7
    ends.fabrics[1].faults.revokes = True
    assert ends.destination.fence(ends.names[0]) is True
    assert ends.destination._receiver.free_slabs == 8


def test_direct_writers_do_not_connect_to_those_that_take_packed_writes_only(make):
    with pytest.raises(TransportUnavailable, match=r"takes packed writes only.*set both to the same"):
        make("direct", theirs="packed")


def test_slabs_run_out_with_a_reason_and_come_back(make):
    ends = make("packed", slabs="1")
    with pytest.raises(TransportUnavailable, match=r"all 1 slabs are granted.*set the option slabs"):
        ends.writer.connect(ends.destination.describe())
    assert ends.destination.counters == {"slabs": 1}
    ends.writer.disconnect(ends.peer)
    assert eventually(lambda: ends.destination._receiver.free_slabs == 1)
    ends.peer = ends.writer.connect(ends.destination.describe())
    ends.write(1)
    assert ends.errors(1) == [""]
