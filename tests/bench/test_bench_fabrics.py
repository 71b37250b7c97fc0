"""`kvbaton bench fabrics`: the rows that it makes, and the write that it measures."""

import importlib.util

import numpy as np
import pytest

from kvbaton.bench import fabrics
from kvbaton.bench.contenders.fabric import transfer_of
from kvbaton.bench.contenders.work import TENSORS, Work
from kvbaton.bench.pairs import Contender, Timing
from kvbaton.bench.turns import Outcome
from kvbaton.copy import copy_boxes


def outcome(name, seconds, missing=""):
    timings = (Timing(seconds, seconds, seconds, None),) if seconds else ()
    return Outcome(Contender(name, "fabric"), timings, missing)


def test_transfer_moves_the_rows_that_every_contender_moves():
    work = Work.of(16, TENSORS * 16 * 5)
    source, destination = np.zeros(work.pool_bytes, np.uint8), np.zeros(work.pool_bytes, np.uint8)
    work.fill(source)
    transfer = transfer_of(work)
    assert transfer.nbytes == work.nbytes
    assert transfer.pieces == work.pieces
    bases = (np.array([pool.ctypes.data]) for pool in (source, destination))
    copy_boxes(transfer, *bases)
    assert work.checksum(destination, "destination") == work.checksum(source, "source")
    assert np.count_nonzero(destination) == work.nbytes


def test_packed_is_held_against_every_direct_way_of_the_same_run():
    work = Work.of(2048, 1 << 20)
    name = "nixl over shm"
    seconds = {"packed": 1.0, "auto": 2.0, "direct": 8.0, "direct, num_threads=8": 2.0}
    outcomes = {f"{name}, {way}": outcome(f"{name}, {way}", taken) for way, taken in seconds.items()}
    figures = fabrics._figures(name, work, outcomes)
    packed = {figure.peer: figure for figure in figures if figure.name.startswith(f"{name}, packed")}
    assert {peer: (figure.ratio, figure.met) for peer, figure in packed.items()} == {
        f"{name}, direct": (8.0, True),
        f"{name}, direct, num_threads=8": (2.0, False),
    }
    assert [figure.target for figure in figures if ", auto" in figure.name] == [None, None]


def test_library_that_is_not_installed_is_said_to_be_absent():
    work = Work.of(2048, 1 << 20)
    name = "mooncake over tcp"
    ways = ("packed", "auto", "direct")
    outcomes = {f"{name}, {way}": outcome(f"{name}, {way}", 0.0, "cannot import it") for way in ways}
    figures = fabrics._figures(name, work, outcomes)
    assert [figure.value for figure in figures] == [None] * 3
    assert all("cannot import it" in figure.note for figure in figures)


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed: make setup-fabrics")
def test_a_run_over_nixl_checks_every_byte():
    figures = fabrics.run(["nixl over tcp"], [2048], 1, 1)
    assert [figure.name.split(",")[1] for figure in figures] == [" packed", " auto", " direct"]
    assert all(figure.value for figure in figures)
