"""Contenders in processes of their own: what they move is checked, and one that is missing says so."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from kvbaton.bench import transfer
from kvbaton.bench.contenders.work import TENSORS, Work
from kvbaton.bench.pairs import Contender, ContenderFailed, Pair, contenders_python
from kvbaton.bench.report import write_report
from kvbaton.bench.turns import LEAST_RUNS, take_turns

SMALL = Work(512, 8)
OURS = [Contender("memcpy", "floors", ("memcpy2",)), Contender("socket", "floors", ("socket",))]
OURS += [Contender(name, "baton", (name,)) for name in ("shm", "tcp")]
FIELDS = ["name", "value", "unit", "peer", "ratio", "target", "met", "target_unit", "note"]


def test_the_work_is_shuffled_and_the_same_at_every_call():
    rows = SMALL.chosen("source")
    assert len(set(rows.tolist())) == 8
    assert rows.max() < SMALL.rows == 16
    assert rows.tolist() != SMALL.chosen("destination").tolist()
    np.testing.assert_array_equal(rows, SMALL.chosen("source"))
    indices = SMALL.indices("source")
    assert len(set(indices.tolist())) == SMALL.pieces == TENSORS * 8
    assert SMALL.nbytes * 2 == SMALL.pool_bytes


def test_the_checksum_sees_every_byte_of_the_request_and_no_other():
    pool = np.zeros(SMALL.pool_bytes, np.uint8)
    SMALL.fill(pool)
    before = SMALL.checksum(pool, "source")
    chosen = set(SMALL.chosen("source").tolist())
    for row in range(SMALL.rows):
        for at in (row * 512, (TENSORS - 1) * SMALL.rows * 512 + row * 512 + 511):
            pool[at] ^= 1
            assert (SMALL.checksum(pool, "source") != before) == (row in chosen)
            pool[at] ^= 1


@pytest.mark.parametrize("contender", OURS, ids=lambda contender: contender.name)
def test_a_pair_moves_the_bytes_more_than_once(contender):
    with Pair(contender, SMALL._asdict()) as pair:
        for _ in range(2):
            timing = pair.run()
            assert timing.seconds > 0
            assert timing.source_processor > 0
        pair.source.ask("no_such_command")
        with pytest.raises(ContenderFailed, match=f"{contender.name}, source: AttributeError"):
            pair.source.answer()


def test_bytes_that_differ_are_a_failure():
    with Pair(OURS[0], SMALL._asdict()) as pair:
        pair.expected += 1
        with pytest.raises(ContenderFailed, match=r"memcpy: checksum \d+ at the destination, not"):
            pair.run()


def test_a_process_that_ends_is_a_failure_that_tells_what_it_said():
    with pytest.raises(ContenderFailed, match=r"nobody, destination: .*(ended|could not be sent).*no_such_script"):
        Pair(Contender("nobody", "no_such_script"), SMALL._asdict())


def test_turns_leave_out_who_is_missing_or_fails_and_limit_the_slow():
    contenders = [
        OURS[0],
        Contender("no library", "nixl", (), "no_such_library"),
        Contender("breaks", "floors", ("memcpy0",)),
    ]
    outcomes = take_turns(contenders, SMALL._asdict(), runs=LEAST_RUNS + 1, seconds=1e-9)
    assert len(outcomes["memcpy"].timings) == LEAST_RUNS
    assert outcomes["memcpy"].seconds > 0
    assert "no_such_library" in outcomes["no library"].missing or "is missing" in outcomes["no library"].missing
    assert "breaks, " in outcomes["breaks"].missing
    assert not outcomes["breaks"].timings


def test_a_module_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setenv("KVBATON_CONTENDERS", sys.executable)
    missing = Contender("x", "nixl", (), "no_such_library").missing()
    assert "cannot import no_such_library: ModuleNotFoundError" in missing
    assert Contender("x", "nixl", (), "json").missing() == ""


def test_the_report_of_a_transfer_without_vendors(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVBATON_CONTENDERS", str(tmp_path / "no-python"))
    figures = transfer.run(["shm", "tcp"], ["nixl", "mooncake"], [2048], 1, 1)
    write_report(figures, tmp_path / "transfer.json")
    written = json.loads((tmp_path / "transfer.json").read_text())
    assert set(written) == {"machine", "results"}
    assert written["machine"]["cores"] >= 1
    assert all(list(result) == FIELDS for result in written["results"])
    results = {(result["name"], result["peer"]): result for result in written["results"]}
    ours = results["shm, 2 KiB pieces", transfer.MEMCPY]
    assert ours["target"] == 0.5
    assert ours["met"] == (ours["ratio"] >= 0.5)
    theirs = results["memcpy, 2 threads: 2 KiB pieces, 1 MiB", ""]
    assert ours["ratio"] == pytest.approx(ours["value"] / theirs["value"])
    for name, peer, target in (("shm", transfer.NIXL_SHM, 5.0), ("tcp", transfer.NIXL_TCP, 20.0)):
        absent = results[f"{name}, 2 KiB pieces", peer]
        assert absent["value"] > 0
        assert (absent["ratio"], absent["target"], absent["met"]) == (None, target, None)
        assert "no-python is missing" in absent["note"]
    assert results["Mooncake over tcp: 2 KiB pieces, 1 MiB", ""]["value"] is None
    assert "no-python is missing" in capsys.readouterr().out


@pytest.mark.skipif(not contenders_python().exists(), reason="scripts/contenders.sh was not run: no vendor's library")
@pytest.mark.parametrize(
    "contender", [each for listed in transfer.VENDORS.values() for each in listed], ids=lambda each: each.name
)
def test_the_vendors_move_the_same_bytes(contender):
    if why := contender.missing():
        pytest.skip(why)
    with Pair(contender, SMALL._asdict()) as pair:
        assert pair.expected == SMALL.checksum(_filled(), "source")
        pair.rest()
        assert pair.run_alone().seconds > 0


def _filled():
    pool = np.zeros(SMALL.pool_bytes, np.uint8)
    SMALL.fill(pool)
    return pool
