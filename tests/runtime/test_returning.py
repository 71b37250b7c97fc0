"""Look-ups in a registry that has just started: ranks may return to it, so that they are tried again."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_world import FAST, succeeded, wait
from room_pairs import KV, failed

import kvbaton as kb
from kvbaton.registry import RegistryRefused, UnknownDeployment
from kvbaton.registry.server import RegistryServer
from kvbaton.runtime.returning import FIRST_PAUSE, LONGEST_PAUSE, Returning, returning_seconds

TOKENS = 8


class Counting(kb.HttpRegistry):
    refused = 0

    def topology(self, deployment="default", dp_rank=None):
        try:
            return super().topology(deployment, dp_rank)
        except RegistryRefused:
            self.refused += 1
            raise

    def find_rooms(self, deployment, rooms, wait_seconds=0.0, asker=""):
        try:
            return super().find_rooms(deployment, rooms, wait_seconds, asker)
        except RegistryRefused:
            self.refused += 1
            raise


class TestReturning:
    def test_other_errors_stand(self):
        returning = Returning()
        assert not returning.failed("a", RegistryRefused("no"), 0.0, 100.0)
        assert not returning.failed("a", kb.errors.RegistryError("cannot be reached"), 0.0, 100.0)
        assert not returning.failed("a", ValueError(), 0.0, 100.0)
        assert returning.next_try() is None
        assert len(returning) == 0

    def test_pauses_grow_and_are_forgotten(self):
        returning = Returning()
        now, pauses = 0.0, []
        for _ in range(6):
            assert returning.failed("a", RegistryRefused("no", 60.0), now, 100.0)
            assert returning.due(now) == []
            pauses.append(returning.next_try() - now)
            now = returning.next_try()
            assert returning.due(now) == ["a"]
        assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5])
        returning.forget("a")
        assert len(returning) == 0
        assert returning.failed("a", RegistryRefused("no", 60.0), now, 100.0)
        assert returning.next_try() == now + FIRST_PAUSE

    def test_one_that_is_forgotten_is_not_tried(self):
        returning = Returning()
        assert returning.failed("a", RegistryRefused("no", 1.0), 0.0, 9.0)
        returning.forget("a")
        assert returning.due(9.0) == []

    @given(
        seconds=st.floats(0.001, 1e12),
        left=st.floats(0.0, 30.0),
        answers=st.floats(0.0, 2.0),
    )
    def test_it_ends_in_time_whatever_a_registry_says(self, seconds, left, answers):
        """The last try is within the deadline, there are few of them, and one comes after ranks may have returned."""
        returning, now, tries, settled = Returning(), 0.0, 0, seconds
        while returning.failed("a", RegistryRefused("no", max(settled - now, 0.0)), now, left):
            (now,) = {returning.next_try()}
            assert now < left
            assert returning.due(now) == ["a"]
            tries += 1
            now += answers
        assert tries <= 5 + left / LONGEST_PAUSE
        assert len(returning) == 0
        # Unless there was no time for another.
        assert now >= settled or now + LONGEST_PAUSE >= left

    def test_what_an_error_says(self):
        assert returning_seconds(UnknownDeployment("no", 2.5)) == 2.5
        assert returning_seconds(UnknownDeployment("no")) == 0.0


@pytest.mark.parametrize("where", [{}, {"dp_rank": 0}], ids=["asks for the room", "names the replica"])
def test_a_room_waits_for_ranks_that_return(world, where):
    """Opened while the registry knew nobody, then while one of two ranks was missing."""
    with RegistryServer() as server:
        registry = Counting(server.url)
        (decode,) = world.decode(KV.layout(), registry=registry)
        receiver = decode.manager.receiver(3, **where)
        receiver.offer({"kv": [4, 5]}, TOKENS)
        wait(lambda: registry.refused > 2, "the look-up to be tried again")
        prefill = world.prefill(KV.layout(0, 2), registry=registry)
        refused = registry.refused
        wait(lambda: registry.refused > refused + 2, "a look-up with one rank")
        prefill += world.prefill(KV.layout(1, 2), registry=registry)
        senders = []
        for rank in prefill:
            rank.fill("kv", [0, 1], (0, TOKENS), seed=3)
            senders.append(rank.manager.sender(3))
            senders[-1].finish({"kv": [0, 1]}, (0, TOKENS))
        succeeded(receiver, *senders)
        decode.check("kv", [4, 5], (0, TOKENS), seed=3)
        for room in (receiver, *senders):
            room.close()


@pytest.mark.parametrize("where", [{}, {"dp_rank": 0}], ids=["asks for the room", "names the replica"])
def test_when_nobody_returned_the_reason_is_the_registrys(world, where):
    with RegistryServer(ttl=0.3) as server:
        registry = Counting(server.url)
        (decode,) = world.decode(KV.layout(), registry=registry)
        failed(decode.manager.receiver(3, **where), "no rank of deployment 'default' is registered")
        assert registry.refused > 1
        assert len(decode.manager.side._sources._returning) == 0


@pytest.mark.parametrize("where", [{}, {"dp_rank": 0}], ids=["asks for the room", "names the replica"])
def test_it_ends_by_the_handshakes_deadline(world, where):
    with RegistryServer(ttl=60.0) as server:
        limits = dataclasses.replace(FAST, handshake_seconds=0.4)
        (decode,) = world.decode(KV.layout(), registry=kb.HttpRegistry(server.url), settings=limits)
        failed(decode.manager.receiver(3, **where), "no rank of deployment 'default' is registered", "may return")
