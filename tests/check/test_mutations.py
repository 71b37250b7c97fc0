"""Deliberate bugs in the real classes: the simulation sees each of them within 2,000 worlds."""

import pytest
from mutations import MUTATIONS

from kvbaton.check.faults.scenario import draw
from kvbaton.check.faults.simulate import simulate

SEEDS = 2000
FIRST_SEEDS = {
    "a_dead_data_connection_is_kept": 96,
    "a_failed_source_tells_nobody": 757,
    "a_manager_closes_under_writes": 92,
    "epochs_are_ignored_at_decode": 76,
    "parked_offers_never_expire": 77,
    "parked_offers_of_a_lost_peer_stay": 219,
    "parts_are_counted_without_identity": 468,
    "rooms_are_not_announced_again": 88,
    "rooms_go_on_when_their_manager_closes": 62,
    "the_fence_is_dropped": 119,
}
"""Where to begin for bugs that only few worlds can show: each world is one of the 2,000 first."""


def first_violation(seeds):
    for seed in seeds:
        result = simulate(draw(seed))
        if result.violations:
            return result
    return None


def test_the_list_is_long_enough():
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_is_seen(name):
    at = FIRST_SEEDS.get(name, 0)
    assert at < SEEDS
    with MUTATIONS[name]():
        found = first_violation([*range(at, SEEDS), *range(at)])
    assert found is not None


@pytest.mark.parametrize("name", MUTATIONS)
def test_where_a_bug_is_seen_there_is_nothing_without_it(name):
    assert first_violation([FIRST_SEEDS.get(name, 0)]) is None
