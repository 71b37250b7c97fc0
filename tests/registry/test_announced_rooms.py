"""Which replica opened which room: the table by itself, and both clients of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.layout.nouns import Coords, RankLayout
from kvbaton.registry import (
    FoundRooms,
    HttpRegistry,
    Limits,
    MemoryRegistry,
    Registration,
    RegistryClient,
    RegistryRefused,
    RegistryTable,
    UnknownDeployment,
    UnknownInstance,
)
from kvbaton.registry.rooms import ENDED_SECONDS, MAX_ENDED
from kvbaton.registry.server import RegistryServer


def rank(
    instance: str, dp: int = 0, replicas: int = 3, *, tp: int = 0, size: int = 1, name: str = "default"
) -> Registration:
    layout = RankLayout((), Coords(tp=(tp, size), dp=(dp, replicas)))
    return Registration(instance, "tcp://127.0.0.1:7000", layout, "m", name)


def three(limits: Limits | None = None) -> RegistryTable:
    table = RegistryTable(ttl=10.0, limits=limits)
    for dp in range(3):
        table.register(rank(f"i{dp}", dp), 0.0)
    return table


def test_who_gave_a_room_up_is_known_for_some_seconds() -> None:
    table = three()
    table.announce_rooms("i2", [5], [], 0.0)
    assert table.announce_rooms("i2", [], [], 1.0, [5, 6]) == {}
    assert table.find_rooms("default", [5, 6], 1.0 + ENDED_SECONDS - 0.1).rooms == {5: 2, 6: 2}
    assert table.find_rooms("default", [5, 6], 1.0 + ENDED_SECONDS).rooms == {}
    assert table.rooms == 0


def test_who_opens_a_room_counts_more_than_who_gave_it_up() -> None:
    table = three()
    table.announce_rooms("i2", [], [], 0.0, [5, 6])
    assert table.announce_rooms("i1", [5], [], 0.5) == {}
    assert table.find_rooms("default", [5, 6], 1.0).rooms == {5: 1, 6: 2}
    table.announce_rooms("i1", [], [5], 1.0)
    assert table.find_rooms("default", [5], 1.0).rooms == {}


def test_what_was_given_up_is_forgotten_with_its_rank_and_bounded() -> None:
    table = three(Limits(rooms_per_request=1 << 16))
    table.announce_rooms("i2", [], [], 0.0, [5])
    table.remove("i2", 0.0)
    table.register(rank("new", 2), 0.0)
    assert table.find_rooms("default", [5], 0.0).rooms == {}
    table.announce_rooms("i1", [], [], 0.0, range(MAX_ENDED))
    table.announce_rooms("i1", [], [], 0.0, [MAX_ENDED])
    assert table.find_rooms("default", [0, 1, MAX_ENDED], 0.0).rooms == {1: 1, MAX_ENDED: 1}


def test_rooms_are_found_where_they_were_announced() -> None:
    table = three()
    assert table.announce_rooms("i2", [5, 6], [], 0.0) == {}
    assert table.announce_rooms("i0", [7], [], 0.0) == {}
    assert table.find_rooms("default", [5, 6, 7, 8], 0.0) == FoundRooms(3, {5: 2, 6: 2, 7: 0})
    assert table.announce_rooms("i2", [6], [5], 0.0) == {}
    assert table.find_rooms("default", [5, 6, 7], 0.0).rooms == {6: 2, 7: 0}
    assert table.rooms == 2


def test_the_only_replica_has_every_room() -> None:
    table = RegistryTable()
    table.register(rank("a", 0, 1), 0.0)
    assert table.find_rooms("default", [1, 2], 0.0) == FoundRooms(1, {1: 0, 2: 0})


def test_the_first_of_two_replicas_keeps_a_room() -> None:
    table = three()
    table.announce_rooms("i1", [5], [], 0.0)
    assert table.announce_rooms("i2", [4, 5], [], 0.0) == {5: 1}
    assert table.announce_rooms("i2", [], [5], 0.0) == {}
    assert table.find_rooms("default", [4, 5], 0.0).rooms == {4: 2, 5: 1}
    table.announce_rooms("i1", [], [5], 0.0)
    assert table.announce_rooms("i2", [5], [], 0.0) == {}
    assert table.find_rooms("default", [5], 0.0).rooms == {5: 2}


def test_what_is_closed_and_opened_in_one_request_is_open() -> None:
    table = three()
    table.announce_rooms("i1", [5], [], 0.0)
    table.announce_rooms("i1", [5], [5], 0.0)
    assert table.find_rooms("default", [5], 0.0).rooms == {5: 1}


@pytest.mark.parametrize("how", ["ttl", "remove", "replace", "change"])
def test_rooms_are_forgotten_with_the_registration(how: str) -> None:
    table = three()
    table.announce_rooms("i1", [5], [], 0.0)
    table.announce_rooms("i2", [6], [], 0.0)
    now = 0.0
    if how == "ttl":
        now = 10.5
        table.heartbeat("i2", 9.0)
    elif how == "remove":
        table.remove("i1", now)
    else:
        changed = rank("new" if how == "replace" else "i1", 1)
        table.register(msgspec.structs.replace(changed, endpoint="tcp://b:1"), now)
    assert table.find_rooms("default", [5, 6], now).rooms == {6: 2}
    assert table.rooms == 1
    if how != "change":
        with pytest.raises(UnknownInstance, match=r"i1.*register again"):
            table.announce_rooms("i1", [7], [], now)


def test_registering_again_keeps_the_rooms() -> None:
    table = three()
    table.announce_rooms("i1", [5], [], 0.0)
    table.register(rank("i1", 1), 1.0)
    assert table.find_rooms("default", [5], 1.0).rooms == {5: 1}


def test_deployments_do_not_share_rooms() -> None:
    table = three()
    table.register(rank("g", 1, 2, name="green"), 0.0)
    table.announce_rooms("i2", [5], [], 0.0)
    assert table.announce_rooms("g", [5], [], 0.0) == {}
    assert table.find_rooms("green", [5], 0.0) == FoundRooms(2, {5: 1})
    assert table.find_rooms("default", [5], 0.0) == FoundRooms(3, {5: 2})
    with pytest.raises(UnknownDeployment, match="'blue'"):
        table.find_rooms("blue", [5], 0.0)


def test_one_rank_speaks_for_its_replica() -> None:
    table = RegistryTable()
    table.register(rank("a", 1, 2, tp=1, size=2), 0.0)
    with pytest.raises(RegistryRefused, match=r"tp1/2.*dp1/2.*tp, pp and cp rank 0"):
        table.announce_rooms("a", [5], [], 0.0)


@pytest.mark.parametrize("room", [-1, 1 << 63])
def test_numbers_that_are_no_rooms(room: int) -> None:
    table = three()
    for call in (
        lambda: table.announce_rooms("i0", [room], [], 0.0),
        lambda: table.announce_rooms("i0", [], [room], 0.0),
        lambda: table.find_rooms("default", [room], 0.0),
    ):
        with pytest.raises(RegistryRefused, match=f"room {room} is not within"):
            call()
    assert table.rooms == 0


def test_the_rooms_are_bounded() -> None:
    table = three(Limits(rooms=3, rooms_per_request=3))
    table.announce_rooms("i0", [1, 2], [], 0.0)
    with pytest.raises(RegistryRefused, match=r"holds 2 rooms, 2 more.*limit of 3"):
        table.announce_rooms("i1", [3, 4], [], 0.0)
    assert table.rooms == 2
    table.announce_rooms("i1", [3], [], 0.0)
    table.announce_rooms("i1", [3], [], 0.0)
    with pytest.raises(RegistryRefused, match="would be over"):
        table.announce_rooms("i0", [4, 5], [1], 0.0)
    assert table.find_rooms("default", [1, 2, 3], 0.0).rooms == {2: 0, 3: 1}, "what was closed counts"
    for call in (
        lambda: table.announce_rooms("i0", [4, 5], [6, 7], 0.0),
        lambda: table.find_rooms("default", [1, 2, 3, 4], 0.0),
    ):
        with pytest.raises(RegistryRefused, match="4 rooms in one request; at most 3"):
            call()


def test_a_replica_is_there_although_another_is_not() -> None:
    table = RegistryTable()
    for tp in range(2):
        table.register(rank(f"a{tp}", 1, 3, tp=tp, size=2), 0.0)
    table.register(rank("b", 2, 3, tp=1, size=2), 0.0)
    assert [each.instance for each in table.topology("default", 0.0, 1).ranks] == ["a0", "a1"]
    with pytest.raises(RegistryRefused, match=r"1 of 2 ranks; missing: tp0/2 pp0/1 cp0/1 dp2/3$"):
        table.topology("default", 0.0, 2)
    with pytest.raises(RegistryRefused, match=r"0 of 2 ranks; missing: tp0/2 pp0/1 cp0/1 dp0/3; tp1/2"):
        table.topology("default", 0.0, 0)
    with pytest.raises(RegistryRefused, match="3 of 6 ranks"):
        table.topology("default", 0.0)


@pytest.mark.parametrize("dp_rank", [-1, 3, 1 << 40])
def test_a_replica_that_cannot_be_is_refused_with_both_numbers(dp_rank: int) -> None:
    with pytest.raises(RegistryRefused, match=rf"no data-parallel rank {dp_rank}: it has 3 \(0 to 2\)"):
        three().topology("default", 0.0, dp_rank)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["announce", "remove", "register", "wait"]),
        st.integers(0, 2),
        st.sets(st.integers(0, 5)),
        st.sets(st.integers(0, 5)),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_the_rooms_agree_with_a_simple_model(operations: list[tuple[str, int, set[int], set[int]]]) -> None:
    table = RegistryTable(ttl=5.0)
    table.register(rank("keeper", 3, 4), 0.0)
    seen: dict[int, float] = {}
    holder: dict[int, int] = {}
    now = 0.0
    for operation, dp, opened, closed in operations:
        table.register(rank("keeper", 3, 4), now)
        for gone in [each for each, when in seen.items() if now - when > 5.0]:
            del seen[gone]
            holder = {room: by for room, by in holder.items() if by != gone}
        if operation == "wait":
            now += len(opened)
            table.register(rank("keeper", 3, 4), now)
        elif operation == "register":
            table.register(rank(f"i{dp}", dp, 4), now)
            seen[dp] = now
        elif operation == "remove":
            table.remove(f"i{dp}", now)
            seen.pop(dp, None)
            holder = {room: by for room, by in holder.items() if by != dp}
        elif dp in seen:
            held = table.announce_rooms(f"i{dp}", opened, closed, now)
            holder = {room: by for room, by in holder.items() if by != dp or room not in closed}
            assert held == {room: holder[room] for room in opened if holder.get(room, dp) != dp}
            holder |= {room: dp for room in opened if room not in holder}
        else:
            with pytest.raises(UnknownInstance):
                table.announce_rooms(f"i{dp}", opened, closed, now)
        alive = {room: by for room, by in holder.items() if now - seen.get(by, -9.0) <= 5.0}
        assert table.find_rooms("default", range(6), now) == FoundRooms(4, alive)
        assert table.rooms == len(alive)


# The clients.


@pytest.fixture(params=["memory", "http"])
def registry(request: pytest.FixtureRequest) -> Iterator[RegistryClient]:
    if request.param == "memory":
        yield MemoryRegistry()
        return
    with RegistryServer() as server:
        yield HttpRegistry(server.url)


@pytest.fixture
def filled(registry: RegistryClient) -> RegistryClient:
    for dp in range(3):
        registry.register(rank(f"i{dp}", dp))
    return registry


class Asking:
    """A call of ``find_rooms`` in a thread."""

    def __init__(self, registry: RegistryClient, rooms: list[int], seconds: float = 20.0, asker: str = "") -> None:
        self.answer: FoundRooms | Exception | None = None

        def work() -> None:
            try:
                self.answer = registry.find_rooms("default", rooms, seconds, asker)
            except Exception as error:
                self.answer = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def result(self) -> FoundRooms | Exception | None:
        self.thread.join(10)
        assert not self.thread.is_alive(), "nobody answers"
        return self.answer


def test_clients_find_what_clients_announced(filled: RegistryClient) -> None:
    large = (1 << 63) - 1
    assert filled.announce_rooms("i2", [5, large], []) == {}
    assert filled.announce_rooms("i1", (5, 6), {7}) == {5: 2}
    assert filled.find_rooms("default", [5, 6, 8, large]) == FoundRooms(3, {5: 2, 6: 1, large: 2})
    filled.announce_rooms("i2", [], [5, large])
    assert filled.find_rooms("default", [5, 6, large], 20.0) == FoundRooms(3, {6: 1})
    assert filled.find_rooms("default", []) == FoundRooms(3, {})


def test_clients_learn_why_they_are_refused(filled: RegistryClient) -> None:
    with pytest.raises(UnknownInstance, match=r"stranger.*register again"):
        filled.announce_rooms("stranger", [1], [])
    with pytest.raises(RegistryRefused, match="no rank of deployment 'green'"):
        filled.find_rooms("green", [1], 20.0)
    with pytest.raises(RegistryRefused, match="room -1 is not within"):
        filled.find_rooms("default", [-1])
    with pytest.raises(RegistryRefused, match=r"no data-parallel rank 7: it has 3"):
        filled.topology("default", 7)
    assert [each.instance for each in filled.topology("default", 1).ranks] == ["i1"]


def test_an_answer_waits_for_the_first_room(filled: RegistryClient) -> None:
    asking = [Asking(filled, [5, 6]), Asking(filled, [6, 7])]
    other = Asking(filled, [8], asker="x")
    filled.announce_rooms("i0", [9], [])
    filled.announce_rooms("i1", [6], [])
    assert [each.result() for each in asking] == [FoundRooms(3, {6: 1})] * 2
    assert other.thread.is_alive()
    filled.announce_rooms("i0", [8], [])
    assert other.result() == FoundRooms(3, {8: 0})


def test_an_answer_does_not_wait_for_ever(filled: RegistryClient) -> None:
    assert filled.find_rooms("default", [5], 0.05) == FoundRooms(3, {})


def test_whoever_asks_again_ends_the_earlier_wait(filled: RegistryClient) -> None:
    """In either order of arrival one of the two ends at once; the other one waits for its rooms."""
    two = [Asking(filled, [5], asker="me"), Asking(filled, [5, 6], asker="me")]
    other = Asking(filled, [5, 6], asker="somebody else")
    while all(each.thread.is_alive() for each in two):
        time.sleep(0.005)
    assert [each.answer for each in two if not each.thread.is_alive()] == [FoundRooms(3, {})]
    assert other.thread.is_alive()
    filled.announce_rooms("i2", [5], [])
    assert other.result() == FoundRooms(3, {5: 2})
    assert FoundRooms(3, {5: 2}) in [each.result() for each in two]


def test_a_wait_ends_when_the_deployment_goes(registry: RegistryClient) -> None:
    registry.register(rank("a", 0, 2))
    asking = Asking(registry, [5], 0.3)
    registry.remove("a")
    assert isinstance(asking.result(), RegistryRefused)


def test_a_server_that_stops_answers_who_waits() -> None:
    with RegistryServer() as server:
        client = HttpRegistry(server.url)
        client.register(rank("a", 0, 2))
        asking = Asking(client, [5])
        while not len(server._waiting):
            time.sleep(0.005)
    assert asking.result() == FoundRooms(2, {})
    assert len(server._waiting) == 0
    assert server._waiting._by_room == server._waiting._by_asker == {}
