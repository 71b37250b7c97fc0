from collections import Counter

import pytest
from simulation import CALM, SLIPS, STORM, World

from kvbaton.protocol import Status

STORMS = 300
BLOCK = 50


@pytest.mark.parametrize("first", range(0, STORMS, BLOCK))
def test_storms_keep_every_promise(first):
    outcomes = Counter()
    for seed in range(first, first + BLOCK):
        try:
            outcomes += World(seed, STORM).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay with World({seed}, STORM).run()") from error
    # Faults must neither be absent nor drown everything: both ends are reached on both sides.
    for side in ("prefill", "decode"):
        assert outcomes[side, Status.SUCCESS] > BLOCK
        assert outcomes[side, Status.FAILED] > BLOCK


def test_without_faults_every_room_succeeds():
    for seed in range(60):
        outcomes = World(seed, CALM).run()
        assert outcomes == {("prefill", Status.SUCCESS): 40, ("decode", Status.SUCCESS): 40}, f"seed {seed}"


def test_engines_that_slip_fail_their_rooms_on_both_sides():
    outcomes = Counter()
    for seed in range(60):
        try:
            outcomes += World(seed, SLIPS).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay with World({seed}, SLIPS).run()") from error
    assert min(outcomes.values()) > 100, outcomes


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 3), (3, 1), (4, 4)])
def test_other_grids(prefills, decodes):
    for seed in range(20):
        try:
            World(seed, STORM, prefills=prefills, decodes=decodes).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {prefills} prefill and {decodes} decode ranks") from error
