"""Hand-overs between grids of ranks, and the benchmarks that use them, on tiny cases."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from kvbaton.bench import handover, kernel, latency, rooms
from kvbaton.bench.contenders.cases import Case, page_words, state_words
from kvbaton.bench.contenders.rank import RankSide
from kvbaton.bench.pairs import ContenderFailed
from kvbaton.bench.world import World

TINY = Case(layers=2, page_size=4, tokens=10, requests=3, prefill_tp=2, state_layers=2)


def test_the_content_tells_any_two_places_apart_that_a_wrong_copy_could_mix_up():
    words = page_words(TINY, 0, 0, False, range(8))
    assert words.shape == (10, 8, 128)
    assert len({row.tobytes() for row in words.reshape(-1, 128)}) == 80
    seen = {page_words(TINY, *place, range(8)).tobytes() for place in np.ndindex(3, 2, 2)}
    assert len(seen) == 12
    np.testing.assert_array_equal(words[:, 2:4], page_words(TINY, 0, 0, False, range(2, 4)))
    states = {state_words(request, layer, np.arange(5), 4).tobytes() for request, layer in np.ndindex(3, 2)}
    assert len(states) == 6


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_what_a_rank_writes_it_finds_again_and_a_wrong_byte_too(order):
    side = RankSide("source", "shm", 1)
    side.case = TINY._replace(order=order)
    side.prepare(side.case._asdict())
    parts = [part for request in range(3) for part in side._content(request)]
    assert len(parts) == 3 * (4 + 2 + 2 + 10)
    assert all(np.array_equal(there[...], expected) for _, there, expected in parts)
    assert all(expected.any() for name, _, expected in parts if name.startswith("kv"))
    position = int(np.flatnonzero(side.memory[0].array)[0])
    side.memory[0].array[position] ^= 1
    assert len(side.check()) == 1
    # `check` empties the pools.
    assert len(side.check()) == len(parts)


@pytest.mark.parametrize("case", [TINY, TINY._replace(prefill_tp=1, decode_tp=2, order="HND")], ids=["2-1", "1-2"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_world_hands_all_requests_over_again_and_again(case, transport):
    with World(case, transport) as world:
        for _ in range(2):
            run = world.run()
            assert 0 < run.first <= run.median <= run.last
            assert run.returned > 0
            assert run.source_processor > 0
            assert run.destination_processor > 0
        # The pools are empty now: nothing but a hand-over can fill them.
        with pytest.raises(
            ContenderFailed, match="tensors differ at the destination, the first of request 0: kv key 0"
        ):
            world.check()


def test_rooms_slices_and_memory():
    figures = rooms.run_rooms(["shm"], megabytes=4, runs=1, many=32, flat=64)
    assert [figure.name for figure in figures] == [
        "32 rooms of 512 KiB at once, shm",
        "32 rooms of 512 KiB at once, shm, p50 of the rooms",
        "32 rooms of 128 KiB at once, shm",
        "32 rooms of 128 KiB at once, shm, p50 of the rooms",
        "memory over 64 rooms, shm",
    ]
    assert figures[0].ratio is not None
    assert figures[0].met == (figures[0].ratio >= rooms.MANY_TARGET)
    assert 0 < figures[1].value <= 1
    (slices,) = rooms.run_slices(["tcp"], megabytes=2, runs=1)
    assert slices.met == (slices.ratio >= rooms.SLICE_TARGET)


def test_latency():
    figures = latency.run(["shm"], rooms=10, pages=16)
    values = {figure.name: figure.value for figure in figures}
    assert values["hand-over of 16 KiB, shm, p50"] <= values["hand-over of 16 KiB, shm, p99"]
    assert all(value > 0 for value in values.values())
    (target,) = [figure for figure in figures if figure.name == "send() in the engine's thread, 16 pages, shm, p99"]
    assert target.met == (target.value < 100)


def test_the_kernel_alone():
    figures = kernel.run([256], megabytes=1, runs=1)
    assert [figure.name.split(",")[0] for figure in figures] == ["copy", "gather", "scatter"] * 2 + ["copy"]
    assert all(figure.value > 0 and figure.ratio > 0 for figure in figures)


def test_the_kernel_bench_sees_a_copy_that_is_wrong(monkeypatch):
    monkeypatch.setattr(kernel, "copy_boxes", lambda *_: None)
    with pytest.raises(Exception, match="checksum"):
        kernel.run([256], megabytes=1, runs=1)


@pytest.fixture
def tiny_cases(monkeypatch):
    monkeypatch.setattr(handover, "CASES", {"a": TINY._replace(requests=1), "d": TINY})


@pytest.mark.usefixtures("tiny_cases")
def test_a_hand_over_without_a_harness():
    figures = handover.run(None, ["a", "d"], ["shm"], 1)
    assert [(figure.target, figure.met, figure.ratio) for figure in figures[:1]] == [(5.0, None, None)]
    assert "no harness was named" in figures[0].note
    assert figures[0].value > 0
    assert [figure.name.rpartition(", ")[2] for figure in figures] == [
        "shm",
        "shm",
        "shm",
        "p50 of the requests",
        "shm",
    ]


HARNESS = """
import argparse, json
parser = argparse.ArgumentParser()
for option in ("--backend", "--case", "--reps", "--ucx-tls", "--json", "--log"):
    parser.add_argument(option)
given = parser.parse_args()
assert given.backend == "nixl" and given.ucx_tls in (None, "tcp,self")
rows = [{"e2e_ms": 1000.0 * n, "p50_ms": 500.0 * n, "cpu_prefill_s": 1.0, "bad": BAD} for n in (1, 2, 6)]
json.dump([{"rows": rows}], open(given.json, "w"))
"""


@pytest.mark.usefixtures("tiny_cases")
@pytest.mark.parametrize(
    ("script", "missing"),
    [
        (HARNESS.replace("BAD", "[]"), ""),
        (HARNESS.replace("BAD", "[{'1': 2}]"), "the bytes that SGLang's manager moved are wrong"),
        ("raise SystemExit('no sglang here')", "the harness failed: no sglang here"),
        (None, "harness.py is missing"),
    ],
)
def test_a_hand_over_beside_a_harness(script, missing, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBATON_CONTENDERS", sys.executable)
    if script is not None:
        (tmp_path / "harness.py").write_text(script)
    figures = handover.run(tmp_path, ["a"], ["tcp"], 1)
    if missing:
        assert missing in figures[0].note
        assert figures[0].met is None
        return
    # The median of the harness's repetitions is two seconds.
    assert figures[0].ratio == pytest.approx(2000 / figures[0].value)
    assert figures[0].met == (figures[0].ratio >= 20)
    assert figures[1].ratio == pytest.approx(figures[1].value / 1000)
    assert json.dumps([figure.ratio for figure in figures])
