"""Data-parallel replicas at prefill: rooms find the one that opened them, whichever it is."""

import dataclasses
import random
import threading

import pytest
from rank_world import FAST, Model, succeeded, wait, wait_over, wait_released
from room_pairs import failed

import kvbaton as kb
from kvbaton import errors
from kvbaton.registry import UnknownInstance
from kvbaton.registry.server import RegistryServer

KV = Model(("kv",))
TOKENS, PAGES = 8, 2
QUICK = dataclasses.replace(FAST, registry_heartbeat_seconds=0.05)


def replicas(world, count=3, tp=2, rows=64, **options):
    """The ranks of each replica."""
    options.setdefault("settings", QUICK)
    return [
        world.prefill(*(KV.layout(rank, tp, rows=rows, dp=(dp, count)) for rank in range(tp)), **options)
        for dp in range(count)
    ]


def decode_rank(world, rows=64, **options):
    options.setdefault("settings", QUICK)
    return world.decode(KV.layout(rows=rows), **options)[0]


def send(ranks, room, row):
    """Every rank of a replica opens the room and hands over its two pages, the first of them in ``row``."""
    senders = []
    for rank in ranks:
        rank.fill("kv", [row, row + 1], (0, TOKENS), seed=room)
        senders.append(rank.manager.sender(room))
        senders[-1].finish({"kv": [row, row + 1]}, (0, TOKENS))
    return senders


def receive(decode, room, row, **where):
    receiver = decode.manager.receiver(room, **where)
    receiver.offer({"kv": [row, row + 1]}, TOKENS)
    return receiver


def over(decode, room, row, receiver, senders):
    succeeded(receiver, *senders)
    wait_released(receiver, *senders)
    decode.check("kv", [row, row + 1], (0, TOKENS), seed=room)
    for each in (receiver, *senders):
        each.close()


def close(*rooms):
    for room in rooms:
        room.close()


@pytest.fixture(params=["memory", "http"])
def registry(request):
    if request.param == "memory":
        yield kb.MemoryRegistry()
        return
    with RegistryServer(returning_seconds=0.0) as server:
        yield kb.HttpRegistry(server.url)


class TestFinding:
    @pytest.mark.parametrize("first", ["sender", "receiver", "either"])
    def test_every_room_finds_its_replica(self, world, registry, first):
        prefill = replicas(world, registry=registry)
        decode = decode_rank(world, registry=registry)
        chance = random.Random(7)
        rooms = [chance.randrange(1 << 63) for _ in range(24)]
        home = [chance.randrange(3) for _ in rooms]
        assert all([room % k % 3 for room in rooms] != home for k in range(1, 50)), "no rule may give the replica"
        senders, receivers = {}, {}
        for at, room in enumerate(rooms):
            early = first == "receiver" or (first == "either" and at % 2)
            if early:
                receivers[room] = receive(decode, room, PAGES * at)
            else:
                senders[room] = send(prefill[home[at]], room, PAGES * at)
        for at, room in enumerate(rooms):
            if room in receivers:
                senders[room] = send(prefill[home[at]], room, PAGES * at)
            else:
                receivers[room] = receive(decode, room, PAGES * at)
        for at, room in enumerate(rooms):
            over(decode, room, PAGES * at, receivers[room], senders[room])
        decode.check_rest()
        world.assert_empty()
        world.assert_no_faults()
        wait(lambda: not registry.find_rooms("default", rooms).rooms, "the rooms to be withdrawn")

    def test_several_decode_ranks_of_one_request(self, world):
        """Each of them asks for itself, and all are told the same."""
        prefill = replicas(world, tp=1)
        ranks = world.decode(*(KV.layout(rank, 2) for rank in range(2)), settings=QUICK)
        receivers = [receive(rank, 5, 4) for rank in ranks]
        senders = send(prefill[2], 5, 0)
        succeeded(*receivers, *senders)
        for rank in ranks:
            rank.check("kv", [4, 5], (0, TOKENS), seed=5)
            rank.check_rest()
        close(*receivers, *senders)
        world.assert_empty()

    def test_one_replica_is_asked_for_once(self, world):
        """Where there is only one, nothing is announced, and no room but the first needs the registry."""
        registry = Counting()
        prefill = replicas(world, 1, registry=registry)
        decode = decode_rank(world, registry=registry)
        for room in range(4):
            over(decode, room, 0, receive(decode, room, 0), send(prefill[0], room, 0))
        assert [name for name, _ in registry.calls] == ["find"]

    def test_one_rank_announces_for_its_replica(self, world):
        registry = Counting()
        prefill = replicas(world, registry=registry)
        senders = send(prefill[1], 7, 0)
        wait(lambda: registry.find_rooms("default", [7]).rooms == {7: 1})
        close(*senders)
        wait(lambda: not registry.find_rooms("default", [7]).rooms)
        assert {who for name, who in registry.calls if name == "announce"} == {prefill[1][0].manager.instance}


class TestNamed:
    def test_the_replica_that_was_named_is_used(self, world):
        """Nothing is looked for; an Offer that comes before the room is opened is parked there."""
        registry = Counting()
        prefill = replicas(world, registry=registry)
        decode = decode_rank(world, registry=registry)
        receivers = [receive(decode, room, 4 * room, dp_rank=dp) for room, dp in enumerate((2, 0, 2, 1))]
        for receiver in receivers:
            wait(lambda receiver=receiver: receiver.poll() is kb.Status.TRANSFERRING)
        for room, dp in enumerate((2, 0, 2, 1)):
            over(decode, room, 4 * room, receivers[room], send(prefill[dp], room, 4 * room))
        decode.check_rest()
        assert "find" not in [name for name, _ in registry.calls]

    @pytest.mark.parametrize("count", [1, 3])
    def test_one_that_does_not_exist_is_refused_at_once(self, world, registry, count):
        replicas(world, count, tp=1, registry=registry)
        decode = decode_rank(world, registry=registry)
        for dp_rank in (count, 100):
            receiver = decode.manager.receiver(1, dp_rank=dp_rank)
            failed(
                receiver, "deployment default", f"no data-parallel rank {dp_rank}: it has {count} (0 to {count - 1})"
            )
            wait_released(receiver)
            receiver.close()
        world.assert_empty()

    @pytest.mark.parametrize("dp_rank", [-1, 1 << 40, 1.5, "1"])
    def test_one_that_cannot_exist_is_an_error_of_the_call(self, world, dp_rank):
        decode = decode_rank(world)
        with pytest.raises(errors.ConfigurationError, match="room 1: dp_rank"):
            decode.manager.receiver(1, dp_rank=dp_rank)
        assert len(decode.manager.side.rooms) == 0


class TestEnds:
    def test_nobody_opens_the_room(self, world, registry):
        replicas(world, tp=1, registry=registry, deployment="blue")
        limits = dataclasses.replace(QUICK, deadlines=kb.Deadlines(offer_wait=0.3))
        decode = decode_rank(world, registry=registry, settings=limits, deployment="blue")
        receiver = receive(decode, 17, 0)
        failed(
            receiver,
            "no data-parallel replica of deployment blue opened room 17 within 0.3 s: it has 3 replicas",
            error=errors.DeadlineExceeded,
        )
        wait_released(receiver)
        receiver.close()
        world.assert_empty()

    def test_no_deployment(self, world, registry):
        decode = decode_rank(world, registry=registry)
        receiver = decode.manager.receiver(1)
        failed(receiver, "no rank of deployment 'default' is registered")
        wait_released(receiver)

    def test_an_error_inside_the_client(self, world):
        class Broken(kb.MemoryRegistry):
            def find_rooms(self, *arguments):
                raise ZeroDivisionError("inside")

        decode = decode_rank(world, registry=Broken())
        failed(decode.manager.receiver(1), "inside")

    @pytest.mark.parametrize("how", ["abort", "close"])
    def test_a_room_that_fails_before_its_replica_is_known(self, world, how):
        """Its replica is told once it opens the room: it would wait for an Offer."""
        prefill = replicas(world)
        decode = decode_rank(world)
        receiver = receive(decode, 9, 0)
        if how == "abort":
            receiver.abort("the client left")
        receiver.close()
        wait_released(receiver)
        assert len(decode.manager.side._finder) == 1
        senders = send(prefill[1], 9, 0)
        for sender in senders:
            failed(sender, "the client left" if how == "abort" else "was closed", error=errors.TransferAborted)
        close(*senders)
        world.assert_empty()
        over(decode, 10, 4, receive(decode, 10, 4), send(prefill[1], 10, 4))
        decode.check_rest()

    @pytest.mark.parametrize("known", [False, True])
    def test_a_room_that_its_replica_gave_up_before_it_was_looked_for(self, world, registry, known):
        """Also where it never was announced: decode hears the reason, and the other ranks of the replica hear of it."""
        world.registry = registry
        prefill = replicas(world)
        decode = decode_rank(world)
        if known:
            over(decode, 8, 4, receive(decode, 8, 4), send(prefill[1], 8, 0))
        first, other = (rank.manager.sender(9) for rank in prefill[1])
        first.abort("the client left")
        first.close()
        receiver = receive(decode, 9, 0)
        failed(receiver, "the client left", error=errors.TransferAborted)
        failed(other, "the client left", error=errors.TransferAborted)
        wait_released(first, other, receiver)
        close(receiver, other)
        world.assert_empty()
        over(decode, 9, 4, receive(decode, 9, 4), send(prefill[1], 9, 0))

    @pytest.mark.parametrize("where", [{}, {"dp_rank": 2}])
    def test_a_room_that_is_opened_anew_is_not_withdrawn(self, world, where):
        prefill = replicas(world)
        decode = decode_rank(world)
        for _ in range(3):
            receiver = receive(decode, 9, 0)
            receiver.close()
            wait_released(receiver)
        over(decode, 9, 4, receive(decode, 9, 4, **where), send(prefill[2], 9, 0))
        decode.check_rest()
        world.assert_empty()

    def test_closing_while_rooms_are_looked_for(self, world, registry):
        replicas(world, registry=registry)
        decode = decode_rank(world, registry=registry)
        receivers = [receive(decode, room, 2 * room) for room in range(4)]
        finder, threads = decode.manager.side._finder, decode.manager._threads
        wait(lambda: threads, "a question to be under way")
        decode.manager.close()
        for receiver in receivers:
            failed(receiver, "shut down", error=errors.TransferAborted)
            assert receiver.rows_released
        assert not threads
        assert len(finder) == 0

    def test_a_replica_that_goes_takes_only_its_rooms(self, world, registry):
        prefill = replicas(world, registry=registry)
        decode, fresh = decode_rank(world, registry=registry), decode_rank(world, registry=registry)
        for dp in range(3):
            over(decode, dp, 0, receive(decode, dp, 0), send(prefill[dp], dp, 0))
        senders = {dp: [rank.manager.sender(10 + dp) for rank in prefill[dp]] for dp in range(3)}
        receivers = [receive(decode, 10 + dp, 10 + 2 * dp) for dp in range(3)]
        for receiver in receivers:
            wait(lambda receiver=receiver: receiver.poll() is kb.Status.TRANSFERRING)
        for rank in prefill[1]:
            rank.manager.close()
        failed(receivers[1], "shut down")
        for dp in (0, 2):
            close(*senders[dp])
            failed(receivers[dp], "closed before the room had ended")
            wait_released(receivers[dp])
            receivers[dp].close()
            over(decode, 20 + dp, 20, receive(decode, 20 + dp, 20), send(prefill[dp], 20 + dp, 20))
            over(fresh, 30 + dp, 20, receive(fresh, 30 + dp, 20), send(prefill[dp], 30 + dp, 20))
        failed(receive(fresh, 40, 0, dp_rank=1), "0 of 2 ranks; missing: tp0/2 pp0/1 cp0/1 dp1/3")

    def test_two_replicas_that_open_one_room(self, world):
        """The second one fails, and its error names both; the first one serves the room."""
        settings = dataclasses.replace(QUICK, room_conflict_seconds=0.05)
        prefill = replicas(world, tp=1, settings=settings)
        decode = decode_rank(world)
        senders = send(prefill[2], 5, 0)
        wait(lambda: world.registry.find_rooms("default", [5]).rooms, "the first one to be announced")
        second = prefill[1][0].manager.sender(5)
        failed(second, "room 5 was opened by two data-parallel replicas: 2 announced it first, this is 1")
        over(decode, 5, 0, receive(decode, 5, 0), senders)
        second.close()
        decode.check_rest()
        world.assert_empty()

    def test_a_room_that_goes_from_one_replica_to_another(self, world):
        """The second one waits until the first has closed it."""
        settings = dataclasses.replace(QUICK, room_conflict_seconds=60.0)
        prefill = replicas(world, tp=1, settings=settings)
        decode = decode_rank(world)
        first = prefill[2][0].manager.sender(5)
        wait(lambda: world.registry.find_rooms("default", [5]).rooms, "the first one to be announced")
        senders = send(prefill[1], 5, 0)
        wait(lambda: prefill[1][0].manager.side.announcer._conflicts, "the conflict to be noticed")
        first.close()
        wait(lambda: world.registry.find_rooms("default", [5]).rooms == {5: 1}, "the second one")
        over(decode, 5, 0, receive(decode, 5, 0), senders)
        world.assert_empty()


class TestRegistryThatGoes:
    def test_it_restarts_and_forgets(self, world):
        """Rooms announced before, opened meanwhile and looked for meanwhile are all found."""
        server = RegistryServer()
        server.start()
        client = kb.HttpRegistry(server.url)
        prefill = replicas(world, tp=1, registry=client)
        decode = decode_rank(world, registry=client)
        over(decode, 1, 0, receive(decode, 1, 0), send(prefill[0], 1, 0))
        before = send(prefill[2], 2, 4)
        wait(lambda: client.find_rooms("default", [2]).rooms == {2: 2})
        waiting = receive(decode, 3, 6)
        wait(lambda: decode.manager._threads, "room 3 to be asked for")
        server.stop()
        meanwhile = [send(prefill[1], 3, 6), send(prefill[0], 4, 8)]
        later = receive(decode, 4, 8)
        with RegistryServer(port=server.port):
            over(decode, 3, 6, waiting, meanwhile[0])
            over(decode, 4, 8, later, meanwhile[1])
            over(decode, 2, 4, receive(decode, 2, 4), before)
            decode.check_rest()
            world.assert_empty()
            for rank in world.ranks:
                rank.manager.close()

    def test_it_fails_for_a_while(self, world):
        registry = Counting()
        prefill = replicas(world, tp=1, registry=registry)
        decode = decode_rank(world, registry=registry)
        over(decode, 1, 0, receive(decode, 1, 0), send(prefill[0], 1, 0))
        registry.down = True
        senders, receiver = send(prefill[2], 2, 4), receive(decode, 2, 4)
        failures = registry.failures
        wait(lambda: registry.failures > failures + 4, "both sides to try again")
        registry.down = False
        over(decode, 2, 4, receiver, senders)
        world.assert_empty()

    def test_a_deadline_says_what_failed(self, world):
        registry = Counting()
        prefill = replicas(world, tp=1, registry=registry)
        limits = dataclasses.replace(QUICK, handshake_seconds=0.3)
        decode = decode_rank(world, registry=registry, settings=limits)
        over(decode, 1, 0, receive(decode, 1, 0), send(prefill[0], 1, 0))
        registry.down = True
        receiver = receive(decode, 2, 4)
        failed(receiver, "no answer within 0.3 s", "the registry is down", error=errors.DeadlineExceeded)

    def test_it_forgets_a_rank_that_lives(self, world):
        """The announcement that it refuses brings the rank back, long before its next heartbeat is due."""
        slow = dataclasses.replace(FAST, registry_heartbeat_seconds=60.0)
        prefill = replicas(world, tp=1, settings=slow)
        decode = decode_rank(world)
        old = send(prefill[1], 1, 0)
        wait(lambda: world.registry.find_rooms("default", [1]).rooms)
        world.registry.remove(prefill[1][0].manager.instance)
        new = send(prefill[1], 2, 4)
        over(decode, 1, 0, receive(decode, 1, 0), old)
        over(decode, 2, 4, receive(decode, 2, 4), new)
        with pytest.raises(UnknownInstance):
            world.registry.announce_rooms("nobody", [], [])


def test_a_burst_of_rooms_costs_few_requests(world):
    """1,000 rooms of three replicas; requests are held back until all are opened, so that their number is certain."""
    count = 1000
    with RegistryServer() as server:
        registry = Gated(server.url)
        prefill = replicas(world, tp=1, rows=count, registry=registry)
        decode = decode_rank(world, rows=count, registry=registry)
        home = [random.Random(room).randrange(3) for room in range(count)]
        receivers, senders = [], []
        for room in range(count):
            rank = prefill[home[room]][0]
            rank.fill("kv", [room], (0, 4), seed=room)
            senders.append(rank.manager.sender(room))
            senders[-1].finish({"kv": [room]}, (0, 4))
            receivers.append(decode.manager.receiver(room))
            receivers[-1].offer({"kv": [room]}, 4)
        registry.gate.set()
        wait_over(*receivers, *senders)
        assert {room.reason for room in (*receivers, *senders)} == {""}
        for room in range(count):
            decode.check("kv", [room], (0, 4), seed=room)
        decode.check_rest()
        announced = [path for path in registry.paths if path.endswith("/rooms")]
        asked = [path for path in registry.paths if path.endswith("/find")]
        assert 3 <= len(announced) <= 6
        # One more for each answer that finds only some of them.
        assert 1 <= len(asked) <= 10
        close(*receivers, *senders)
        world.assert_empty()
        for rank in world.ranks:
            rank.manager.close()


class Counting(kb.MemoryRegistry):
    """Notes who announces and asks; fails while it is ``down``."""

    def __init__(self):
        super().__init__()
        self.calls, self.down, self.failures = [], False, 0

    def _check(self):
        if self.down:
            self.failures += 1
            raise errors.RegistryError("the registry is down")

    def announce_rooms(self, instance, opened, closed, ended=()):
        self._check()
        self.calls.append(("announce", instance))
        return super().announce_rooms(instance, opened, closed, ended)

    def find_rooms(self, deployment, rooms, wait_seconds=0.0, asker=""):
        self._check()
        self.calls.append(("find", asker))
        return super().find_rooms(deployment, rooms, wait_seconds, asker)


class Gated(kb.HttpRegistry):
    """Holds requests about rooms back until `gate` is open, and counts them."""

    def __init__(self, url):
        super().__init__(url)
        self.gate, self.paths = threading.Event(), []

    def _call(self, method, path, *arguments, **options):
        if "/rooms" in path:
            self.paths.append(path)
            assert self.gate.wait(20)
        return super()._call(method, path, *arguments, **options)
