"""The simulation of whole managers: seeds, replays, shrinking, and what it must be able to see."""

import json
import os
import subprocess
import sys
from random import Random

import msgspec
import pytest
from typer.testing import CliRunner

from kvbaton.check.faults.causes import is_explained
from kvbaton.check.faults.content import CANARY, POISON, places_of
from kvbaton.check.faults.memory import Memory
from kvbaton.check.faults.models import Shape, decode_layout, prefill_layout
from kvbaton.check.faults.reasons import kind_of
from kvbaton.check.faults.scenario import KINDS, Scenario, draw
from kvbaton.check.faults.shrink import shrink
from kvbaton.check.faults.simulate import run_seeds, simulate
from kvbaton.cli.main import make_app

SEEDS = 2000
PROCESSES = min(2, os.cpu_count() or 1)


def test_two_thousand_worlds_violate_nothing():
    totals = run_seeds(0, SEEDS, processes=PROCESSES)
    assert not [(result.seed, str(result.violations[0])) for result in totals.failed]
    assert totals.seeds == SEEDS
    assert totals.steps > 400 * SEEDS
    # A fault that never struck was not tested, and a world in which all fails tests little.
    assert not [kind for kind in KINDS if not totals.faults[kind]]
    assert totals.outcomes["decode: success"] > 5 * SEEDS
    assert "decode: other" not in totals.outcomes
    assert totals.seen["pool_full"] > SEEDS / 10


def test_a_seed_is_the_same_world_every_time():
    first, second = simulate(draw(17)), simulate(draw(17))
    assert (first.digest, first.steps) == (second.digest, second.steps)
    assert simulate(draw(18)).digest != first.digest


@pytest.mark.parametrize("seed", [3, 70])
def test_a_world_does_not_depend_on_the_order_of_hashes(seed):
    code = f"from kvbaton.check.faults.simulate import *; print(simulate(draw({seed})).digest)"
    digests = set()
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        digests.add(
            subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout
        )
    assert digests == {b"%d\n" % simulate(draw(seed)).digest}


def test_worlds_of_many_requests():
    totals = run_seeds(100_000, 3, size=4)
    assert not totals.failed
    assert totals.outcomes["decode: success"] > 60


def test_a_scenario_survives_the_way_through_json():
    scenario = draw(5)
    assert msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario) == scenario


class TestShrinking:
    def test_what_has_nothing_to_do_with_it_goes(self):
        scenario = next(draw(seed) for seed in range(100) if len(draw(seed).faults) > 5)
        culprit = scenario.faults[3]

        def fails(smaller):
            return culprit in smaller.faults and any(request.tokens > 4 for request in smaller.requests)

        assert any(request.tokens > 4 for request in scenario.requests)
        smallest = shrink(scenario, fails)
        assert smallest.faults == (culprit,)
        assert len(smallest.requests) == 1
        assert len(smallest.shape.parts) == 1
        assert smallest.requests[0].cuts == ()

    def test_one_that_does_not_fail_stays_as_it_is(self):
        assert shrink(draw(5), lambda scenario: False) == draw(5)

    def test_it_ends_after_so_many_runs(self):
        runs = []
        shrink(draw(5), lambda scenario: runs.append(scenario) or len(runs) == 1, runs=7)
        assert len(runs) <= 7


def test_a_byte_that_changes_on_its_way_is_found_by_digests_and_by_nothing_else():
    scenario = next(
        scenario for scenario in map(draw, range(100)) if {each.kind for each in scenario.faults} == {"flip"}
    )
    assert scenario.digest
    seen = simulate(scenario)
    assert not seen.violations
    assert seen.outcomes["decode: digests differ"]
    (violation, *_) = simulate(msgspec.structs.replace(scenario, digest=False)).violations
    assert "succeeded without its bytes" in violation.what


class TestMemory:
    LAYOUT = decode_layout(Shape(("kv", "swa", "conv", "aux")), 0)

    def rank(self):
        told = []
        return Memory(self.LAYOUT, told.append), told

    def test_what_belongs_there_may_come(self):
        memory, told = self.rank()
        lease = memory.lend(1, {"kv": 2, "conv": 1})
        memory.expect(lease, {"kv": (1, 7, 0), "conv": (0, 0, 0)})
        memory.array[lease.needed] = lease.content
        memory.look("now")
        memory.check_complete(lease)
        memory.take_back(lease)
        assert not told
        assert (memory.array == CANARY).all()

    @pytest.mark.parametrize("where", ["needed", "owned", "free"])
    def test_a_byte_that_does_not_belong_there_is_seen(self, where):
        memory, told = self.rank()
        lease = memory.lend(1, {"kv": 2})
        memory.expect(lease, {"kv": (1, 7, 0)})
        taken = set(lease.owned.tolist())
        places = {
            "needed": lease.needed[0],
            "owned": sorted(taken - set(lease.needed.tolist()))[0],
            "free": next(at for at in range(len(memory.array)) if at not in taken),
        }
        memory.array[places[where]] = 7 if lease.content[0] != 7 else 8
        memory.look("now")
        assert ("nobody" in told[0]) == (where == "free")

    def test_a_byte_that_is_missing_is_seen(self):
        memory, told = self.rank()
        lease = memory.lend(1, {"kv": 1})
        memory.expect(lease, {"kv": (0, 4, 0)})
        memory.array[lease.needed[1:]] = lease.content[1:]
        memory.look("now")
        assert not told
        memory.check_complete(lease)
        assert "1 bytes of rows of request 1" in told[0]

    def test_a_bit_that_flips_is_seen_at_the_end_and_not_before(self):
        memory, told = self.rank()
        lease = memory.lend(1, {"kv": 1})
        memory.expect(lease, {"kv": (0, 4, 0)})
        before = memory.array.copy()
        assert not memory.flip(before, Random(1))
        memory.array[lease.needed] = lease.content
        assert memory.flip(before, Random(1))
        memory.look("now")
        assert not told
        memory.check_complete(lease)
        assert "1 bytes of rows of request 1" in told[0]

    def test_rows_are_lent_together_or_not_at_all(self):
        memory, _ = self.rank()
        before = memory.free
        assert memory.lend(1, {"kv": 1, "conv": before["conv"] + 1}) is None
        assert memory.free == before


def test_ranks_agree_on_what_they_share_and_nothing_else():
    shape = Shape(("kv", "conv", "aux"), prefill_tp=2)
    whole, halves = decode_layout(shape, 0), [prefill_layout(shape, 0, rank) for rank in range(2)]
    for name, places in places_of(whole).items():
        parts = [set(places_of(half)[name].identity.tolist()) for half in halves]
        assert set(places.identity.tolist()) == parts[0] | parts[1]
        assert len(places.identity) == len(set(places.identity.tolist()))
        assert bool(parts[0] & parts[1]) == (name == "aux")


def test_content_is_neither_canary_nor_poison():
    import numpy as np

    places = places_of(decode_layout(Shape(("kv",)), 0))["kv"]
    content = places.content(3, np.arange(500))
    assert not np.isin(content, (CANARY, POISON)).any()
    assert len(np.unique(content)) == 254


@pytest.mark.parametrize(
    ("reason", "faults", "waited", "explained"),
    [
        ("write to decode rank 0 failed: a piece was lost", {"piece_lost"}, False, True),
        ("write to decode rank 0 failed: a piece was lost", {"abort_decode"}, False, False),
        ("part 0 was lost: its control connection closed", {"kill"}, False, True),
        ("part 0 was lost: its control connection closed", {"lost_chunk"}, True, False),
        ("decode rank 0: the decode rank shut down", {"close_manager"}, False, True),
        ("decode rank 0: the decode rank shut down", {"kill"}, True, False),
        ("no data-parallel replica opened it", {"registry_restart", "duplicate"}, False, False),
        ("no data-parallel replica opened it", {"registry_restart", "duplicate"}, True, True),
        ("something that nobody knows", set(KINDS), True, False),
    ],
)
def test_an_end_needs_a_cause(reason, faults, waited, explained):
    assert is_explained(reason, frozenset(faults), waited=waited) == explained


def test_reasons_have_kinds():
    assert kind_of("part 1 of 4: no progress for 7 s: 1 writes have not ended") == "deadline: no progress"
    assert kind_of("") == "other"


class TestCommand:
    def test_figures(self, tmp_path):
        target = tmp_path / "faults.json"
        result = CliRunner().invoke(
            make_app(), ["check", "faults", "--seeds", "12", "--first", "30", "--json", str(target)]
        )
        assert result.exit_code == 0, result.output
        assert "seeds 30 to 41: 12 worlds" in " ".join(result.output.split())
        figures = json.loads(target.read_text())
        assert figures["ok"] is True
        assert (figures["seeds"], figures["first"], figures["failed"]) == (12, 30, [])
        assert set(figures["faults"]) == set(KINDS)
        assert figures["steps"] > 1000

    def test_a_failing_seed_is_printed_and_its_scenario_can_be_run(self, tmp_path, monkeypatch):
        from kvbaton.protocol.decode_core import DecodeCore

        def on_done(self, room, link, done, now, original=DecodeCore._on_done):
            if not room.status.terminal:
                room.remaining = 1
            return original(self, room, link, done, now)

        monkeypatch.setattr(DecodeCore, "_on_done", on_done)
        target = tmp_path / "faults.json"
        result = CliRunner().invoke(make_app(), ["check", "faults", "--seeds", "20", "--json", str(target)])
        assert result.exit_code == 1
        figures = json.loads(target.read_text())
        seed = figures["failed"][0]["seed"]
        assert f"kvbaton check faults --first {seed} --seeds 1" in result.output
        assert "succeeded without its bytes" in result.output
        assert len(figures["smallest"]["requests"]) <= 1
        smallest = tmp_path / "smallest.json"
        smallest.write_text(json.dumps(figures["smallest"]))
        assert CliRunner().invoke(make_app(), ["check", "faults", "--scenario", str(smallest)]).exit_code == 1
        monkeypatch.undo()
        assert CliRunner().invoke(make_app(), ["check", "faults", "--scenario", str(smallest)]).exit_code == 0

    def test_a_scenario_that_is_none(self, tmp_path):
        (tmp_path / "no.json").write_text("[]")
        result = CliRunner().invoke(make_app(), ["check", "faults", "--scenario", str(tmp_path / "no.json")])
        assert result.exit_code != 0
