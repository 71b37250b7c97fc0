"""`kvbaton bench digest`: the same work with and without digests, and a kernel that reads the source's rows."""

import numpy as np

from kvbaton import copy
from kvbaton.bench import digests
from kvbaton.bench.contenders.work import TENSORS, Work
from kvbaton.bench.kernel import Bench
from kvbaton.bench.pairs import Timing
from kvbaton.bench.turns import Outcome


def test_the_kernel_reads_the_rows_that_are_moved(monkeypatch):
    seen = []

    def digest(shape, side, units, numbers, bases, *, threads):
        seen.append((len(shape), len(units), threads))
        return copy.digest(shape, side, units, numbers, bases, threads=threads)

    monkeypatch.setattr("kvbaton.bench.kernel.digest", digest)
    work = Work.of(64, TENSORS * 64 * 3)
    bench = Bench(work)
    bench.digest(2)
    ((boxes, units, threads),) = seen
    assert boxes * units == work.pieces
    assert threads == 2
    np.testing.assert_array_equal(bench.transfer.source_units, work.chosen("source"))


def test_rooms_with_digests_are_held_against_those_without(monkeypatch):
    asked = []

    def take_turns(contenders, work, runs, seconds):
        asked.append((work["piece"] * work["pages"] * TENSORS, runs))
        times = {"plain": 1.0, "digest": 4.0}
        return {
            each.name: Outcome(each, (Timing(times[each.arguments[1]], 0, 0, None),) if runs else (), "no time")
            for each in contenders
        }

    monkeypatch.setattr(digests, "take_turns", take_turns)
    work = Work.of(2048, 1 << 20)
    assert digests._hand_over("shm", work, 3).ratio == 0.25
    small = digests._small("shm", 3)
    assert (small.ratio, small.value) == (4.0, 4e6)
    assert asked == [(1 << 20, 3), (16 << 10, 60)]
    assert "no time" in digests._hand_over("tcp", work, 0).note
