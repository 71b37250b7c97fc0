"""Runs that are joined, against pieces that are spelt out one by one."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.explain import Request, explain_ranks, side_of
from kvbaton.explain.explain import bind
from kvbaton.explain.runs import RunLengths, merge_runs, run_lengths
from kvbaton.plan import assign, compile_pair
from kvbaton.topology import read_topology


def spelt_out(transfers):
    """Lengths of runs: each box's pieces in order, joined while they go on at the next byte of both sides."""
    lengths = []
    for boxes, source_units, destination_units in transfers:
        own_scale = [False] * len(boxes.shape)
        if boxes.cast is not None:
            own_scale = (boxes.cast.how[:, 0] > 1) | (boxes.cast.scale[:, 0] >= 0)
        for shape, at, to, read, alone in zip(*boxes[:3], boxes.source_shape[:, 2], own_scale, strict=True):
            single = shape[0] * shape[1] == 1 and not alone
            open_run = None
            for unit, other in zip(source_units.tolist(), destination_units.tolist(), strict=True):
                begin, end = (
                    int(side[1] + number // side[3] * side[2] + number % side[3] * side[4])
                    for side, number in ((at, unit), (to, other))
                )
                for i, j in itertools.product(range(shape[0]), range(shape[1])):
                    place = (begin + int(i * at[5] + j * at[6]), end + int(i * to[5] + j * to[6]))
                    if single and open_run is not None and open_run[0] == place:
                        lengths[-1] += int(shape[2])
                    else:
                        lengths.append(int(shape[2]))
                    open_run = (place[0] + int(read), place[1] + int(shape[2])), None
    return Counter(lengths)


sides = st.fixed_dictionaries(
    {
        "tp": st.sampled_from((1, 2, 4)),
        "page_size": st.sampled_from((1, 2, 3, 8)),
        "order": st.sampled_from(("NHD", "HND")),
        "placement": st.sampled_from(("layers_first", "fused", "blocks_first")),
        "cp": st.sampled_from((1, {"size": 2, "unit": 2}, {"size": 3, "unit": 1})),
        "components": st.sampled_from(
            (
                {},
                {"kv": {"dtype": "float32"}},
                {"conv": {"factor": 0.3}},
                {"kv": {"dtype": "float8_e4m3fn", "scale": {"axes": ["token", "head"]}}},
            )
        ),
    }
)
MODEL = {
    "layers": 2,
    "components": {"kv": {"heads": 2, "head_dim": 3}, "conv": {"blocks": {"q": 4, "v": 8}, "columns": 3}},
}


@settings(max_examples=50, deadline=None)
@given(sides, sides, st.integers(1, 40), st.booleans(), st.booleans())
def test_runs_are_those_spelt_out(source, destination, tokens, contiguous, striped):
    request = Request(tokens, contiguous=contiguous)
    at, to = (side_of(read_topology({"model": MODEL, **side}), request) for side in (source, destination))
    total = 0
    for index, layout in enumerate(to.layouts):
        for rank, share in zip(
            at.layouts, assign(at.layouts, layout, destination_index=index, striped=striped, cast=True), strict=True
        ):
            plan = compile_pair(rank, layout, share, cast=True)
            for name in plan.components:
                rows = [
                    request.pages(end, end.component(name), side)
                    for end, side in ((rank, "source"), (layout, "destination"))
                ]
                transfers = bind(plan, name, layout, request.needed(layout.component(name)), *rows)
                runs = run_lengths(transfers)
                assert dict(zip(runs.lengths.tolist(), runs.counts.tolist(), strict=True)) == spelt_out(transfers)
                assert runs.nbytes == sum(transfer.nbytes for transfer in transfers)
                total += runs.nbytes
    assert explain_ranks(at, to, request, striped=striped, cast=True).nbytes == total


@given(st.lists(st.dictionaries(st.integers(1, 50), st.integers(1, 9), max_size=5), max_size=4))
def test_figures_of_merged_runs(listed):
    many = [
        RunLengths(np.array(sorted(runs), np.int64), np.array([runs[n] for n in sorted(runs)], np.int64))
        for runs in listed
    ]
    merged = merge_runs(many)
    every = sorted(length for runs in listed for length, count in runs.items() for _ in range(count))
    assert (merged.pieces, merged.nbytes) == (len(every), sum(every))
    assert merged.shortest == (every[0] if every else 0)
    assert merged.longest == (every[-1] if every else 0)
    assert merged.median == (every[(len(every) - 1) // 2] if every else 0)
