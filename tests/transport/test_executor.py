"""Which way bytes go."""

import pytest

from kvbaton.transport import Capabilities
from kvbaton.transport.executor import COPY_BYTES_PER_SECOND, POST_SECONDS, choose_executor

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
    enough = int(POST_SECONDS * COPY_BYTES_PER_SECOND / 2)
    for pieces in (1, 1000):
        assert choose_executor(ONE_SIDED, pieces, pieces * (enough + 2)).name == "direct"
        assert choose_executor(ONE_SIDED, pieces, pieces * (enough - 2)).name == "packed"


def test_the_reason_has_the_numbers():
    reason = choose_executor(ONE_SIDED, 1000, 2_048_000).reason
    assert reason == (
        "posting 1,000 pieces of 2,048 bytes on average costs about 13.0 ms, "
        "gathering and scattering 2,048,000 bytes 0.6 ms"
    )
