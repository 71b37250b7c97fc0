"""Groups of ranks behind an engine: rooms of several ranks as one, ranks in other processes, and ranks that fail."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import pytest
import torch
from hf_pair import GREEDY, WAIT_SECONDS, Pair, cached_model, prompt, single, wait_until_free
from rank_checks import bytes_of

from kvbaton.engines.base import GenerateRequest
from kvbaton.engines.hf import StoreExchange, decode, open_engine
from kvbaton.engines.hf.ranks import GroupRoom
from kvbaton.errors import ConfigurationError, RegistryError, RoomError
from kvbaton.layout import Coords
from kvbaton.protocol import Status
from kvbaton.registry import MemoryRegistry, RegistryRefused
from kvbaton.transport import create

LOOPBACK = {"manager_options": {"transports": ("loopback",)}}
_rooms = itertools.count(1_000_000)


def request(ids) -> GenerateRequest:
    room = next(_rooms)
    return GenerateRequest(f"request {room}", ids, room, GREEDY)


class FakeRoom:
    def __init__(self, status, reason="", released=False, seconds=1.0, moved=None):
        self.status, self.reason, self.rows_released, self.seconds = status, reason, released, seconds
        self.bytes_by_component = moved or {}

    def poll(self):
        return self.status


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ([Status.WAITING, Status.TRANSFERRING], Status.WAITING),
        ([Status.TRANSFERRING, Status.SUCCESS], Status.TRANSFERRING),
        ([Status.WAITING, Status.SUCCESS], Status.WAITING),
        ([Status.WAITING, Status.FAILED], Status.FAILED),
        ([Status.SUCCESS, Status.FAILED], Status.FAILED),
        ([Status.SUCCESS, Status.SUCCESS], Status.SUCCESS),
    ],
)
def test_a_group_is_as_far_as_the_last_of_its_rooms(states, together):
    coords = [Coords(tp=(rank, 2)) for rank in range(2)]
    assert GroupRoom([FakeRoom(state) for state in states], coords).poll() is together


def test_figures_and_reasons_of_a_group():
    coords = [Coords(tp=(rank, 2)) for rank in range(2)]
    rooms = [
        FakeRoom(Status.SUCCESS, "", True, 2.0, {"kv": 3}),
        FakeRoom(Status.FAILED, "it broke", False, 1.0, {"kv": 4}),
    ]
    group = GroupRoom(rooms, coords)
    assert (group.reason, group.seconds, group.bytes_by_component) == (
        "rank tp1/2 pp0/1 cp0/1 dp0/1: it broke",
        2.0,
        {"kv": 7},
    )
    assert not group.rows_released
    rooms[1].rows_released = True
    assert group.rows_released
    assert GroupRoom([rooms[1]], coords[:1]).reason == "it broke"


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v4", "gemma3"])
def test_engines_that_hold_parts_of_the_ranks_answer_as_one(name):
    """As if in two processes each: the decode engines give each other what theirs received."""
    registry, model = MemoryRegistry(), cached_model(name)
    grid = {"tp": 2, "pp": 2, "registry": registry, "pool_tokens": 512, "max_running_requests": 4, **LOOPBACK}
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meetings = [torch.distributed.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20)) for _ in range(2)]
    prefills = [open_engine(model, role="prefill", ranks=ranks, **grid) for ranks in ([0, 1], [2, 3])]
    decodes = [
        open_engine(
            model,
            role="decode",
            ranks=ranks,
            exchange=StoreExchange(meeting, ranks, 4),
            max_batch=1,
            page_size=4,
            **grid,
        )
        for ranks, meeting in zip(([0, 3], [1, 2]), meetings, strict=True)
    ]
    engines = [*prefills, *decodes]
    try:
        requests = [request(prompt(tokens)) for tokens in (37, 70, 5)]
        handles = {}
        for number, engine in enumerate(engines):
            # The decode engines get them in opposite order.
            for each in reversed(requests) if number == 3 else requests:
                handles[engine, each] = engine.submit(each)
        for each in requests:
            for engine in decodes:
                tokens, end = handles[engine, each].result(WAIT_SECONDS)
                assert (end.finish, end.error) == ("length", "")
                assert tokens == single(name, each.input_ids).token_ids
            for engine in prefills:
                assert handles[engine, each].result(WAIT_SECONDS)[1].finish == "length"
            moved = [bytes_of(handles[engine, each] for engine in side) for side in (prefills, decodes)]
            assert +moved[0] == +moved[1]
        for engine in engines:
            wait_until_free(engine.pools)
        assert store.num_keys() <= 1, "what was taken by all was not removed"
    finally:
        for engine in reversed(engines):
            engine.close()


def test_a_part_of_the_ranks_needs_an_exchange():
    with pytest.raises(ConfigurationError, match="holds 1 of 2 decode ranks; pass exchange="):
        open_engine(cached_model("qwen3"), role="decode", registry=MemoryRegistry(), tp=2, ranks=[0], **LOOPBACK)


def test_what_other_processes_do_not_bring_fails_the_request(monkeypatch):
    class Silent:
        def put(self, room, packed):
            assert [len(data) > 0 for data in packed.values()] == [True]

        def take(self, room):
            return None

    monkeypatch.setattr(decode, "EXCHANGE_SECONDS", 0.1)
    registry = MemoryRegistry()
    common = {"registry": registry, "tp": 2, **LOOPBACK}
    prefill = open_engine(cached_model("qwen3"), role="prefill", **common)
    sides = [
        open_engine(cached_model("qwen3"), role="decode", ranks=[rank], exchange=Silent(), **common) for rank in (0, 1)
    ]
    try:
        asked = request(prompt(20))
        prefill.submit(asked)
        for end in [side.submit(asked) for side in sides]:
            assert "did not come within 0.1 s" in end.result(WAIT_SECONDS)[1].error
        for engine in (prefill, *sides):
            wait_until_free(engine.pools)
    finally:
        for engine in (*sides, prefill):
            engine.close()


def test_a_rank_that_is_lost_fails_the_request_by_name_and_gives_all_rows_back():
    sides = {"prefill": {"tp": 2, "cp": 2, **LOOPBACK}, "decode": {"tp": 2, **LOOPBACK}}
    with Pair("qwen3", **sides, chunk_tokens=8) as pair:
        ids = prompt(40)
        assert pair.answers([ids]) == [single("qwen3", ids, split=8).token_ids]
        extend, pieces = pair.prefill.runner.extend, []

        def losing(cache, piece):
            pieces.append(piece)
            if len(pieces) == 3:
                pair.prefill.manager.managers[2].close()
            return extend(cache, piece)

        pair.prefill.runner.extend = losing
        sent, received = pair.submit(ids)
        errors = [handle.result(WAIT_SECONDS)[1].error for handle in (sent, received)]
        # Rank 2 of the grid, as itself or as a decode rank tells another.
        assert all(error.startswith("rank tp") and ("cp1/2" in error or "part 2" in error) for error in errors), errors
        pair.settle()


def test_a_room_in_use_on_one_rank_is_free_again_on_the_others():
    with Pair("qwen3", prefill={"tp": 4, **LOOPBACK}, decode=LOOPBACK) as pair:
        managers = pair.prefill.manager.managers
        taken = managers[2].sender(77)
        with pytest.raises(RoomError, match="77"):
            pair.prefill.submit(GenerateRequest("one", prompt(5), 77, GREEDY))
        taken.close()
        # Closed rooms are forgotten a little later.
        for manager in managers:
            _open_when_free(manager, 77).close()


def _open_when_free(manager, room):
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return manager.sender(room)
        except RoomError:
            assert time.monotonic() < deadline
            time.sleep(0.002)


def test_ranks_that_are_open_are_closed_when_another_cannot_be():
    class Choosy(MemoryRegistry):
        def register(self, registration):
            if registration.coords.tp[0] == 3:
                raise RegistryError("not that one")
            super().register(registration)

    registry = Choosy()
    with pytest.raises(RegistryError, match="not that one"):
        open_engine(cached_model("qwen3"), role="prefill", registry=registry, tp=4, **LOOPBACK)
    with pytest.raises(RegistryRefused, match="no rank"):
        registry.topology()


def test_a_ready_transport_cannot_be_shared_by_ranks():
    transport = create("loopback", instance="shared", bind="127.0.0.1", advertise="127.0.0.1")
    try:
        with pytest.raises(ConfigurationError, match="2 ranks cannot share the loopback transport"):
            open_engine(
                cached_model("qwen3"),
                role="decode",
                registry=MemoryRegistry(),
                tp=2,
                manager_options={"transports": [transport]},
            )
    finally:
        transport.close()
