"""A network between living ranks that is away for a while, both ways or one way, and connections that break.

Every port of a rank is behind a proxy that holds up what is sent; over shared memory only the control plane has one.
"""

import pytest
from driven_ranks import LARGE, hand_over

PAGES = 60
LOST = "FAILED part 0 of 1 (tp0/1 pp0/1 cp0/1 dp0/1, sends kv) was lost"


def ranks(start, transport, **options):
    prefill = start("prefill", transport, LARGE, cables=True, **options)
    decode = start("decode", transport, LARGE, cables=True, **options)
    hand_over(prefill, decode, 1)
    return prefill, decode


def begin(prefill, decode, room):
    """A room in which bytes have moved, and more are to come."""
    decode.ask("receive", room, PAGES)
    prefill.ask("send_chunk", room, PAGES - 10)
    assert decode.ask("moving", room) == "moving"
    assert prefill.ask("transferring", room) == "TRANSFERRING"


def both_failed(prefill, decode, room):
    outcome = decode.ask("over", room)
    assert outcome.startswith(LOST), outcome
    outcome = prefill.ask("over", room)
    assert outcome.startswith("FAILED decode rank 0"), outcome


BOTH_WAYS, ONE_WAY, OTHER_WAY = (1, 1), (1, 0), (0, 1)


@pytest.mark.parametrize(
    ("transport", "ways"),
    [
        ("shm", BOTH_WAYS),
        ("tcp", BOTH_WAYS),
        ("tcp", ONE_WAY),
        pytest.param("tcp", OTHER_WAY, marks=pytest.mark.long),
        pytest.param("shm", ONE_WAY, marks=pytest.mark.long),
        pytest.param("shm", OTHER_WAY, marks=pytest.mark.long),
    ],
)
def test_the_network_is_away_and_comes_back(start, transport, ways):
    """Both sides fail the room by themselves. Rows come back when the writer is proven quiet: over shared memory, when
    the network is back, without any new room; then all is as before."""
    prefill, decode = ranks(start, transport)
    begin(prefill, decode, 2)
    prefill.ask("cut", *ways)
    decode.ask("cut", *ways)
    both_failed(prefill, decode, 2)
    assert prefill.ask("released", 2) == "released"
    if transport == "shm":
        assert decode.ask("is_released", 2) == "False"
    else:
        assert decode.ask("released", 2) == "released"
    prefill.ask("heal")
    decode.ask("heal")
    assert decode.ask("released", 2) == "released"
    decode.ask("wipe")
    hand_over(prefill, decode, 3, PAGES)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_connection_breaks(start, transport):
    """Between processes that live and reach each other, nothing waits for a timeout or a deadline."""
    prefill, decode = ranks(start, transport)
    begin(prefill, decode, 2)
    prefill.ask("reset")
    decode.ask("reset")
    both_failed(prefill, decode, 2)
    assert decode.ask("released", 2) == "released"
    assert prefill.ask("released", 2) == "released"
    decode.ask("wipe")
    hand_over(prefill, decode, 3, PAGES)


def test_a_short_absence_is_nothing(start):
    """Shorter than the peer's timeout: the room goes on where it was."""
    # On a busy machine the questions until it is back may take seconds.
    prefill, decode = ranks(start, "tcp", limits={"peer_timeout_seconds": 30.0})
    decode.ask("receive", 2, PAGES)
    prefill.ask("cut", 1, 1)
    decode.ask("cut", 1, 1)
    prefill.ask("send", 2, PAGES)
    prefill.ask("heal")
    decode.ask("heal")
    assert decode.ask("over", 2) == "SUCCESS "
    assert decode.ask("check", 2, PAGES) == "same"
