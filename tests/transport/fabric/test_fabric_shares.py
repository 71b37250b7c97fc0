"""Peers that stand still leave enough of everything for those that do not."""

import logging
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_process import eventually

from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric import link, pump
from kvbaton.transport.fabric.base import FabricLimits
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.shares import Shares, Staging
from kvbaton.transport.fabric.transport import FabricTransport


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.booleans()), max_size=60))
def test_owners_that_never_give_back_leave_one_for_each_other_owner(total, asked):
    shares = Shares(total)
    stuck = set(range(total // 2))
    held = dict.fromkeys(range(61), 0)

    def take(owner, most):
        while most and shares.allows(owner):
            shares.take(owner)
            held[owner] += 1
            most -= 1

    for owner, most, gives in asked:
        take(owner, most)
        if gives and owner not in stuck and held[owner]:
            shares.give(owner)
            held[owner] -= 1
        assert shares.free == total - sum(held.values()) >= 0
    for owner in stuck:
        take(owner, total)
    for owner in set(held) - stuck:
        for _ in range(held[owner]):
            shares.give(owner)
    assert shares.allows(60)


@pytest.mark.parametrize("total", [16, 32, 33])
def test_one_owner_alone_gets_a_quarter_at_least(total):
    shares = Shares(total)
    while shares.allows("one"):
        shares.take("one")
    assert total // 4 <= total - shares.free <= total // 2


def test_slabs_are_handed_out_once():
    staging = Staging(8)
    taken = [staging.take(owner) for owner in range(8)]
    assert sorted(taken) == list(range(8))
    assert staging.take(8) is None
    staging.give(3, taken[3])
    assert staging.take(8) == taken[3]


class Crowd:
    """A writer and many destinations of 1 MiB."""

    numbers = iter(range(1_000_000))

    def __init__(self, executor, stopped, moving, staging, posts):
        number = next(self.numbers)
        options = {"executor": executor, "slabs": "64", "slab_bytes": "64KiB", "staging_slabs": str(staging)}
        limits = FabricLimits(writes=16, posts=posts)
        self.ends = [MemoryFabric(f"crowd-{number}-{place}", limits=limits) for place in range(1 + stopped + moving)]
        names = [fabric._instance for fabric in self.ends]
        self.writer, *self.others = (
            FabricTransport(name, fabric, options=options) for name, fabric in zip(names, self.ends, strict=True)
        )
        self.source = np.random.default_rng(1).integers(0, CANARY, 1 << 20, dtype=np.uint8)
        self.writer.register([Region.of(self.source)])
        self.targets = [np.full(1 << 20, CANARY, dtype=np.uint8) for _ in self.others]
        self.peers = []
        for other, target in zip(self.others, self.targets, strict=True):
            other.register([Region.of(target)])
            other.admit(self.writer.describe())
            self.peers.append(self.writer.connect(other.describe()))
        for fabric in self.ends[1 : 1 + stopped]:
            fabric.faults.stopped = True
        self.ended = {}

    def write(self, place, ticket):
        everything = np.arange(256)
        self.writer.write(self.peers[place], [rows(4096, everything, everything)], ticket)

    def over(self, *tickets):
        self.ended.update(self.writer.poll())
        return set(tickets) <= set(self.ended)

    def close(self):
        for fabric in self.ends:
            fabric.faults.stopped = fabric.faults.stubborn = False
        for transport in (self.writer, *self.others):
            transport.close()
        assert not [misuse for fabric in self.ends for misuse in fabric.misuses]


@pytest.fixture
def crowd():
    made = []

    def make(*arguments):
        made.append(Crowd(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("executor", ["packed", "direct"])
@pytest.mark.parametrize("leave", [False, True], ids=["connected", "gone"])
def test_peers_that_stand_still_never_stop_the_others(crowd, executor, leave, monkeypatch, caplog):
    monkeypatch.setattr(link, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(pump, "_KEPT", [])
    stopped, moving = 4, 12
    many = crowd(executor, stopped, moving, 8, 8)
    for place in range(stopped):
        for ticket in range(3):
            many.write(place, 1000 + 10 * place + ticket)
        time.sleep(0.05)  # It takes all that it gets, before the next one comes.
    if leave:
        many.ends[0].faults.stubborn = True
        with caplog.at_level(logging.CRITICAL):
            for peer in many.peers[:stopped]:
                many.writer.disconnect(peer)
    tickets = [(place, 100 * turn + place) for turn in range(3) for place in range(stopped, stopped + moving)]
    for place, ticket in tickets:
        many.write(place, ticket)
    assert eventually(lambda: many.over(*(ticket for _, ticket in tickets))), many.ended
    assert {many.ended[ticket] for _, ticket in tickets} == {""}
    for target in many.targets[stopped:]:
        np.testing.assert_array_equal(target, many.source)
    assert all((many.ended.get(1000 + 10 * place) is not None) is leave for place in range(stopped))
