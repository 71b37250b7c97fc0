"""Processes that are killed or stopped in the middle of a write: what comes back when, and what never lands.

The process that is struck is caught while it writes: its peer sends the signal when it sees the first bytes.
"""

import queue
import signal
import time

import pytest
from driven_ranks import LARGE, hand_over
from process_transports import EVERY_TRANSPORT

PAGES = 60
PATIENT = {"heartbeat_seconds": 50, "peer_timeout_seconds": 150}
"""Settings with which nobody is lost by silence."""
LOST = "FAILED part 0 of 1 (tp0/1 pp0/1 cp0/1 dp0/1, sends kv) was lost"


@pytest.fixture(params=EVERY_TRANSPORT)
def transport(request):
    return request.param


def strike(start, transport, decode, number):
    """Catch a prefill process in the middle of a write; returns it, and the room."""
    prefill = start("prefill", transport, LARGE)
    hand_over(prefill, decode, 1)
    for room in range(100, 110):
        assert decode.ask("receive", room, PAGES) == "offered"
        decode.tell("strike", prefill.process.pid, number)
        prefill.tell("send", room, PAGES)
        if decode.answer() == "middle":
            return prefill, room
        # The write was faster than the signal.
        if number == signal.SIGKILL:
            prefill = start("prefill", transport, LARGE)
        else:
            prefill.signal(signal.SIGCONT)
            assert prefill.answer() == "sent"
        decode.ask("over", room)
        decode.ask("released", room)
        decode.ask("wipe")
    return pytest.fail("the writes are over before the signals come")


def nothing_more_lands(decode, room, count):
    """The content of a finished room stays as it is, and all other rows untouched, while the old writer may write."""
    for _ in range(5):
        assert decode.ask("check", room, count) == "same"


class TestPrefill:
    def test_it_is_killed(self, start, transport):
        """That is seen at once, and not by its silence; its successor writes into the same rows."""
        decode = start("decode", transport, LARGE, limits=PATIENT)
        _, room = strike(start, transport, decode, signal.SIGKILL)
        assert decode.ask("over", room).startswith(LOST)
        assert decode.ask("released", room) == "released"
        decode.ask("wipe")
        successor = start("prefill", transport, LARGE)
        hand_over(successor, decode, 2, PAGES)

    def test_it_is_stopped_and_goes_on(self, start, transport):
        """Not before the writer is proven quiet do the rows come back; its late bytes never land in a reused row."""
        decode = start("decode", transport, LARGE)
        prefill, room = strike(start, transport, decode, signal.SIGSTOP)
        assert decode.ask("over", room).startswith(LOST)
        decode.tell("released", room)
        if transport == "tcp":
            # Its connections are cut: what it still sends is taken by nobody.
            assert decode.answer() == "released"
        else:
            with pytest.raises(queue.Empty):
                decode.answer(1.5)
            prefill.signal(signal.SIGCONT)
            # It says itself that nothing of it is under way any more; no room is needed for that.
            assert decode.answer() == "released"
        decode.ask("wipe")
        if transport == "tcp":
            successor = start("prefill", transport, LARGE)
            successor.ask("send", 2, PAGES)
            decode.ask("receive", 2, PAGES)
            assert decode.ask("over", 2) == "SUCCESS "
            prefill.signal(signal.SIGCONT)
        assert prefill.answer() == "sent"
        # Where the last byte was out before it stood still, it has served the room as far as it knows.
        assert prefill.ask("over", room).split()[0] in ("FAILED", "SUCCESS")
        assert prefill.ask("released", room) == "released"
        if transport == "tcp":
            nothing_more_lands(decode, 2, PAGES)
        else:
            hand_over(prefill, decode, 2, PAGES)

    def test_it_is_stopped_and_killed(self, start, transport):
        decode = start("decode", transport, LARGE)
        prefill, room = strike(start, transport, decode, signal.SIGSTOP)
        assert decode.ask("over", room).startswith(LOST)
        prefill.kill()
        assert decode.ask("released", room) == "released"
        decode.ask("wipe")
        hand_over(start("prefill", transport, LARGE), decode, 2, PAGES)


class TestDecode:
    def test_it_is_killed(self, start, transport):
        """The writer's room fails at once, its own rows come back, and it goes on with others."""
        prefill = start("prefill", transport, LARGE, limits=PATIENT)
        decode = start("decode", transport, LARGE)
        hand_over(prefill, decode, 1)
        decode.ask("receive", 100, PAGES)
        decode.tell("strike", decode.process.pid, signal.SIGKILL)
        prefill.ask("send_chunk", 100, PAGES - 10)
        decode.process.wait(10)
        outcome = prefill.ask("over", 100)
        assert outcome.startswith("FAILED decode rank 0 was lost"), outcome
        assert prefill.ask("released", 100) == "released"
        hand_over(prefill, start("decode", transport, LARGE), 2, PAGES)

    def test_it_is_stopped_and_goes_on(self, start, transport):
        """The writer lets go of it; both work together again when it wakes up."""
        prefill = start("prefill", transport, LARGE)
        decode = start("decode", transport, LARGE)
        hand_over(prefill, decode, 1)
        decode.ask("receive", 100, PAGES)
        assert decode.ask("transferring", 100) == "TRANSFERRING"
        prefill.ask("send_chunk", 100, PAGES - 10)
        decode.tell("strike", decode.process.pid, signal.SIGSTOP)
        outcome = prefill.ask("over", 100)
        assert outcome.startswith("FAILED decode rank 0 was lost"), outcome
        assert prefill.ask("released", 100) == "released"
        # Its rows are its own again: nothing reads them for the one that sleeps.
        hand_over(prefill, start("decode", transport, LARGE), 2, PAGES)
        decode.signal(signal.SIGCONT)
        assert decode.answer() in ("middle", "late")
        outcome = decode.ask("over", 100)
        assert outcome.startswith(LOST), outcome
        if transport == "mooncake":
            # The library does not take writes back from a peer that stood still, so the writer cannot say that they are
            # over: the rows wait for its end.
            prefill.kill()
            prefill = start("prefill", transport, LARGE)
        assert decode.ask("released", 100) == "released"
        decode.ask("wipe")
        hand_over(prefill, decode, 3, PAGES)


class TestAbort:
    """D08 between processes: rows come back when the write is over, and may be used again at once."""

    def test_by_decode_in_the_middle(self, start, transport):
        prefill, decode = start("prefill", transport, LARGE), start("decode", transport, LARGE)
        hand_over(prefill, decode, 1)
        for room in (2, 3):
            decode.ask("receive", room, PAGES)
            decode.tell("abort_when_moving", room)
            prefill.ask("send", room, PAGES)
            assert decode.answer() in ("middle", "late")
            assert decode.ask("over", room).startswith("FAILED aborted by the decode engine")
            assert decode.ask("released", room) == "released"
            decode.ask("wipe")
            prefill.ask("over", room)
            assert prefill.ask("released", room) == "released"
            hand_over(prefill, decode, 100 + room, PAGES)

    def test_by_prefill_in_the_middle(self, start, transport):
        prefill, decode = start("prefill", transport, LARGE), start("decode", transport, LARGE)
        hand_over(prefill, decode, 1)
        for room in (2, 3):
            decode.ask("receive", room, PAGES)
            prefill.ask("send_chunk", room, PAGES - 10)
            decode.ask("moving", room)
            prefill.ask("abort", room)
            outcome = decode.ask("over", room)
            assert "part 0 of 1" in outcome, outcome
            assert outcome.endswith("aborted by the prefill engine"), outcome
            assert decode.ask("released", room) == prefill.ask("released", room) == "released"
            decode.ask("wipe")
            hand_over(prefill, decode, 100 + room, PAGES)


def kept_by(rank, before):
    """What ``rank`` keeps when nothing is under way: no heartbeat, and no peer that is being let go of."""
    limit = time.monotonic() + 10
    looks = [rank.ask("kept")]
    while len(looks) < 5 or (len(before) > 1 and min(looks) > before[1] and time.monotonic() < limit):
        time.sleep(0.05)
        looks.append(rank.ask("kept"))
    return min(looks)


class TestReplaced:
    """D15: whoever replaces a rank is known by its instance id, and nothing is kept for the one before."""

    def test_ten_prefill_ranks_after_another(self, start, transport):
        decode = start("decode", transport)
        kept = []
        for life in range(10):
            prefill = start("prefill", transport)
            hand_over(prefill, decode, life)
            decode.ask("close", life)
            kept.append(kept_by(decode, kept))
            prefill.kill()
            assert decode.ask("fenced") == "fenced"
        assert kept[1:] == [kept[1]] * 9

    def test_ten_decode_ranks_after_another(self, start, transport):
        prefill = start("prefill", transport)
        kept = []
        for life in range(10):
            decode = start("decode", transport)
            hand_over(prefill, decode, life)
            prefill.ask("close", life)
            kept.append(kept_by(prefill, kept if transport != "mooncake" else ()))
            decode.kill()
            assert prefill.ask("alone") == "alone"
        if transport == "mooncake":
            # Its TCP keeps the socket of each peer that it ever wrote to, also of dead ones: no call closes it.
            words = [each.rsplit(" ", 1) for each in kept]
            kept = [f"{tables} {int(descriptors) - life}" for life, (tables, descriptors) in enumerate(words)]
        assert kept[1:] == [kept[1]] * 9
