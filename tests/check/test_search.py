import json
import sys

import pytest

from kvbaton.check.search import WORLDS, Bounds, World, replay, search, shortest
from kvbaton.check.search.bounds import SHORT
from kvbaton.check.search.fingerprint import fingerprint
from kvbaton.check.search.prefill_process import PrefillProcess
from kvbaton.cli.main import main
from kvbaton.errors import ConfigurationError
from kvbaton.protocol import DecodeCore, PrefillCore
from kvbaton.protocol.decode_room import DecodeRoom

LONG = [name for name in WORLDS if name not in SHORT]


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvbaton", "check", "search", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("name", SHORT)
def test_every_state_keeps_every_promise(name):
    result = search(World(WORLDS[name]))
    assert result.trace is None
    assert result.ends > 0
    assert result.transitions > result.states > 1000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LONG)
def test_every_state_keeps_every_promise_in_minutes(name):
    result = search(World(WORLDS[name]))
    assert result.trace is None
    assert result.ends > 0
    assert result.states > 100_000


def test_both_ends_are_reached_in_a_world_that_can_fail():
    world = World(Bounds(prefills=1))
    search(world)
    statuses = {
        state.status.name
        for table in world.tables
        for number in range(len(table))
        for state in table.load(number).lives.values()
    }
    assert statuses == {"WAITING", "TRANSFERRING", "SUCCESS", "FAILED"}


def test_a_search_is_the_same_every_time():
    bounds = Bounds(prefills=1, rooms=(7, 8), prompt=True, deadlines="idle")
    first, second = (search(World(bounds)) for _ in range(2))
    assert first == second
    assert shortest(World(bounds)) is None


def test_a_world_that_goes_round_is_told(monkeypatch):
    """A sender that may abort again and again, to no effect, keeps the world going for ever."""
    real = PrefillCore.abort

    def abort(self, room, reason, now):
        return [] if self._rooms[room].destinations else real(self, room, reason, now)

    monkeypatch.setattr(PrefillCore, "abort", abort)
    result = search(World(Bounds(prefills=1)))
    assert result.trace is not None
    assert "round for ever" in result.trace.problem


def test_states_differ_if_anything_in_them_does():
    process = PrefillProcess(WORLDS["room"], 0)
    before = fingerprint(process)
    assert fingerprint(PrefillProcess(WORLDS["room"], 0)) == before
    process.core.unexpected["words for people"] += 1
    assert fingerprint(process) == before
    process.core.a_new_field = 1
    assert fingerprint(process) != before


def test_one_object_in_two_places_is_not_two_objects():
    core = DecodeCore()
    room = DecodeRoom(1, 0.0, 0.0)
    core._rooms = {1: room}
    core.kept = [room]
    one = fingerprint(core)
    core.kept = [DecodeRoom(1, 0.0, 0.0)]
    assert fingerprint(core) != one


def test_times_decide_nothing():
    assert fingerprint(DecodeRoom(1, 0.0, 0.0)) == fingerprint(DecodeRoom(1, 5.0, 7.0))
    assert fingerprint(DecodeRoom(1, 0.0, 0.0)) != fingerprint(DecodeRoom(1, 0.0, 0.0, remaining=1))


def test_bounds_are_checked():
    with pytest.raises(ConfigurationError, match="repeats is 10; it must be from 0 to 9"):
        Bounds(repeats=10)
    with pytest.raises(ConfigurationError, match="prefills is 0; it must be from 1 to 9"):
        Bounds(prefills=0)
    with pytest.raises(ConfigurationError, match="rooms is empty"):
        Bounds(rooms=())


def test_the_command_prints_figures(monkeypatch, capsys):
    assert command(monkeypatch, "--world", "calm", "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ok"] is True
    (world,) = figures["worlds"]
    assert world["world"] == "calm"
    assert world["transitions"] > world["states"] > 1000
    assert world["bounds"]["rooms"] == [7, 7]
    assert command(monkeypatch, "--world", "calm") == 0
    assert "kept" in capsys.readouterr().out


def test_the_command_prints_a_way_that_can_be_gone_again(monkeypatch, capsys):
    monkeypatch.setattr(DecodeRoom, "unquiet", lambda self: [])
    assert command(monkeypatch, "--world", "ranks") == 1
    told = capsys.readouterr().out
    assert "BROKEN: a write of part 0 to life 0 began, and its rows had been given back" in told
    (again,) = [line.split() for line in told.splitlines() if "--replay" in line]
    assert command(monkeypatch, *again[3:]) == 1
    assert "BROKEN" in capsys.readouterr().out
    monkeypatch.undo()
    assert command(monkeypatch, *again[3:]) == 0
    told = capsys.readouterr().out
    assert "every promise was kept" in told
    assert "decode 0: aborts life 0 (room 7)" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "nowhere"], "--world nowhere: there is no such world; there are calm, "),
        (["--world", "calm", "--replay", "1.x"], "--replay 1.x: no such way in the world calm"),
        (["--world", "calm", "--replay", "99"], "--replay 99: no such way in the world calm"),
    ],
)
def test_what_there_is_not_is_refused(arguments, message, monkeypatch, capsys):
    assert command(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_replay_has_the_steps_of_its_trace(monkeypatch):
    monkeypatch.setattr(DecodeRoom, "unquiet", lambda self: [])
    world = World(Bounds(prefills=1))
    trace = shortest(world)
    steps = replay(World(Bounds(prefills=1)), trace.choices)
    assert [step.problem for step in steps] == [""] * (len(steps) - 1) + [trace.problem]
