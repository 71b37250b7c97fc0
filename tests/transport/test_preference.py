"""The order of transports, by what they can do."""

import itertools
from types import SimpleNamespace

import pytest

from kvbaton.transport import Capabilities
from kvbaton.transport.preference import best_first, preference

MAPPED = Capabilities(True, False, frozenset({"host"}), True)
FABRIC = Capabilities(False, True, frozenset({"host", "cuda"}), False, one_sided=True, hardware=True)
SOCKETS = Capabilities(False, True, frozenset({"host"}), False)
SOFTWARE = Capabilities(False, True, frozenset({"host"}), False, one_sided=True)


@pytest.mark.parametrize("order", list(itertools.permutations([MAPPED, FABRIC, SOCKETS])))
def test_mapped_then_network_cards_then_sockets(order):
    transports = [SimpleNamespace(capabilities=each) for each in order]
    assert [each.capabilities for each in best_first(transports)] == [MAPPED, FABRIC, SOCKETS]


def test_a_fabric_without_a_card_is_no_better_than_sockets_and_equals_keep_their_order():
    transports = [SimpleNamespace(capabilities=each) for each in (SOCKETS, SOFTWARE, FABRIC)]
    assert [each.capabilities for each in best_first(transports)] == [FABRIC, SOCKETS, SOFTWARE]
    assert preference(SOFTWARE) == preference(SOCKETS)
    assert [preference(each).better_than_sockets for each in (MAPPED, FABRIC, SOCKETS)] == [True, True, False]


def test_reasons_differ():
    reasons = {preference(each).reason for each in (MAPPED, FABRIC, SOCKETS)}
    assert len(reasons) == 3
