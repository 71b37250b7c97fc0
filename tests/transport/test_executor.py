"""Which way bytes go."""

import pytest

from kvbaton.transport import Capabilities
from kvbaton.transport.base import Costs
from kvbaton.transport.executor import choose_executor

HOST = frozenset({"host"})
MAPPED = Capabilities(True, False, HOST, True)
STREAM = Capabilities(False, True, HOST, False)
ONE_SIDED = Capabilities(False, True, HOST, False, one_sided=True)


@pytest.mark.parametrize("capabilities", [MAPPED, STREAM, ONE_SIDED])
def test_nothing_goes_no_way(capabilities):
    assert choose_executor(capabilities, 0, 0).name == "none"


def test_mapped_memory_and_streams_do_not_ask_for_pieces():
    for pieces in (1, 1 << 20):
        assert choose_executor(MAPPED, pieces, 1 << 20).name == "mapped"
        assert choose_executor(STREAM, pieces, 1 << 20).name == "packed"


def test_one_sided_writes_pieces_that_are_worth_a_post():
    # A post costs as long as it takes to copy so many bytes twice.
    enough = int(Costs().piece_seconds * Costs().copy_bytes_per_second / 2)
    for pieces in (1, 1000):
        assert choose_executor(ONE_SIDED, pieces, pieces * (enough + 2)).name == "direct"
        assert choose_executor(ONE_SIDED, pieces, pieces * (enough - 2)).name == "packed"


def test_the_reason_has_the_numbers():
    reason = choose_executor(ONE_SIDED, 1000, 2_048_000).reason
    assert reason == (
        "posting 1,000 pieces of 2,048 bytes on average costs about 13.0 ms, "
        "gathering and scattering 2,048,000 bytes 0.6 ms"
    )


def test_each_transport_has_its_own_costs():
    cheap = ONE_SIDED._replace(costs=Costs(piece_seconds=1e-9))
    assert choose_executor(ONE_SIDED, 1000, 2_048_000).name == "packed"
    assert choose_executor(cheap, 1000, 2_048_000).name == "direct"
    far = ONE_SIDED._replace(costs=Costs(piece_seconds=1e-6, packed_seconds=1e-3))
    assert choose_executor(far, 100, 100).name == "direct"
    assert choose_executor(far, 2000, 2000).name == "packed"


@pytest.mark.parametrize("wanted", ["direct", "packed"])
def test_the_option_overrides_the_costs_but_not_what_can_be(wanted):
    for pieces, nbytes in ((1, 1 << 30), (1 << 20, 1 << 20)):
        assert choose_executor(ONE_SIDED, pieces, nbytes, wanted).name == wanted
        assert wanted in choose_executor(ONE_SIDED, pieces, nbytes, wanted).reason
    assert choose_executor(MAPPED, 1, 1, wanted).name == "mapped"
    assert choose_executor(STREAM, 1, 1, wanted).name == "packed"
    assert choose_executor(ONE_SIDED, 0, 0, wanted).name == "none"
