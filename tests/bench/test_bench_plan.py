"""The two contenders of the planner's benchmark must do the same work, or their ratio says nothing."""

import json

import numpy as np
import pytest

from kvbaton.bench.plan import run
from kvbaton.bench.plan_cases import bind_cases, pair_cases, piece_count
from kvbaton.bench.plan_lists import group_in_lists, pieces_of_rows
from kvbaton.bench.report import write_report
from kvbaton.plan import group_rows

SMALL = bind_cases(3000)


def spelled_out(transfers):
    """``(source byte, destination byte)`` of every byte that moves, sorted."""
    pairs = []
    for boxes, *units in transfers:
        for shape, *sides in zip(*boxes[:3], strict=True):
            inner = np.indices(shape).reshape(3, -1)
            places = []
            for (_, offset, row_stride, per_row, unit_stride, *strides), chosen in zip(sides, units, strict=True):
                begin = offset + chosen // per_row * row_stride + chosen % per_row * unit_stride
                places.append((begin[:, None] + np.array([*strides, 1]) @ inner).reshape(-1))
            pairs.append(np.stack(places, axis=1))
    return ordered(np.concatenate(pairs))


def bytes_of(pieces):
    return ordered(np.concatenate([np.arange(run)[:, None] + [begin, begin_to] for begin, begin_to, run in pieces]))


def ordered(pairs):
    return pairs[np.lexsort(pairs.T)]


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_both_ways_move_the_same_bytes(case):
    transfers = case.bind()
    assert piece_count(transfers) >= 1500
    np.testing.assert_array_equal(spelled_out(transfers), bytes_of(case.lists()))


@pytest.mark.parametrize("case", pair_cases()[:9:3], ids=lambda case: case.name)
def test_the_pieces_of_a_row_are_those_of_the_plan(case):
    (plan,) = case.compile()
    right = sum(stream.whole.bytes_per_unit for streams in plan._streams.values() for stream in streams)
    assert sum(run for _, _, run in pieces_of_rows(case.sources[0], case.destination)) == right


def test_both_ways_group_alike():
    generator = np.random.default_rng(5)
    at, to = (generator.integers(0, 3, 2000).cumsum() for _ in range(2))
    assert group_in_lists(at.tolist(), to.tolist()) == list(
        zip(*(part.tolist() for part in group_rows(at, to)), strict=True)
    )


def test_the_report(tmp_path, capsys):
    figures = run(10_000, 1)
    write_report(figures, tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())["results"]
    assert [entry["name"] for entry in written] == [figure.name for figure in figures]
    assert all(entry["target_unit"] == entry["unit"] == "ms" and entry["value"] > 0 for entry in written)
    assert "20 ms" in capsys.readouterr().out
