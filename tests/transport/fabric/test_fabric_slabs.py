"""Which slabs are granted to whom, and what must be known before one is granted again."""

import time

import pytest

from kvbaton.transport.fabric import slabs
from kvbaton.transport.fabric.slabs import Death, Departed, Guest, Slabs
from kvbaton.transport.process import ProcessKey


def guest(instance="writer", connection=0, direct=False, granted=(1, 2), process=None):
    return Guest(instance, connection, direct, granted, Death(process))


def test_a_connection_gets_a_share_and_fewer_as_they_run_out():
    pool = Slabs(64, 8)
    granted = [pool.grant() for _ in range(5)]
    assert [len(some) for some in granted] == [8, 7, 6, 5, 4]
    while some := pool.grant():
        granted.append(some)
    assert len(granted) >= 24
    assert sorted(slab for some in granted for slab in some) == list(range(64))
    assert pool.grant() == ()
    pool.give_back(granted[0])
    assert pool.free == 8
    assert pool.grant() == granted[0][:1]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_slabs_go_one_by_one(count):
    pool = Slabs(count, 8)
    assert [len(pool.grant()) for _ in range(count + 1)] == [1] * count + [0]


def test_nothing_is_forgotten_of_a_writer_whose_process_lives():
    departed = Departed(0.0)
    departed.add(guest(direct=True, process=ProcessKey.own()))
    assert departed.settle() == ()
    assert departed.may_write("writer")
    assert departed.slabs == 2
    departed.close()


def test_time_frees_slabs_of_writers_that_cannot_be_seen_but_proves_no_fence():
    departed = Departed(0.05)
    departed.add(guest(direct=True))
    departed.add(guest("packer", granted=(3,)))
    assert departed.settle() == ()
    time.sleep(0.06)
    assert departed.settle() == (1, 2, 3)
    assert departed.may_write("writer")
    assert not departed.may_write("packer")
    assert departed.settle() == ()


def test_a_writer_that_comes_again_speaks_for_its_earlier_connections():
    departed = Departed(600.0)
    for number in range(3):
        departed.add(guest(connection=number, direct=True, granted=(number,)))
    departed.add(guest("other", connection=1, granted=(9,)))
    assert departed.forgive("writer", (0, 1)) == (0, 1)
    assert departed.may_write("writer")
    assert departed.forgive("writer") == (2,)
    assert not departed.may_write("writer")
    assert departed.slabs == 1


def test_a_process_that_has_ended_is_proof_after_a_while(monkeypatch):
    ended = ProcessKey(2**22 + 1, 1, ProcessKey.own().boot, ProcessKey.own().namespace)
    monkeypatch.setattr(slabs, "LINGER_SECONDS", 0.05)
    departed = Departed(600.0)
    departed.add(guest(direct=True, process=ended))
    assert departed.settle() == ()
    time.sleep(0.06)
    assert departed.settle() == (1, 2)
    assert not departed.may_write("writer")


def test_a_process_of_another_host_cannot_be_seen():
    assert not Death(ProcessKey(1, 1, "another boot", "another namespace")).visible
    assert not Death(None).visible
