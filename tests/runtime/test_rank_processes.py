"""Ranks in processes of their own, over a real registry: hand-over, and what is left when one is killed or stopped."""

import os
import queue
import signal
import subprocess
import sys

import pytest
from driven_ranks import LARGE, SCRIPT, SOURCE, hand_over

from kvbaton.registry.server import RegistryServer


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hand_over(start, transport):
    prefill, decode = start("prefill", transport), start("decode", transport)
    hand_over(prefill, decode, 1)
    hand_over(prefill, decode, 2, 64)
    assert decode.close() == 0
    assert prefill.close() == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prefill_is_killed_in_the_middle(start, transport):
    """Its room fails with a reason and gives its rows back; its successor serves the next room (D15)."""
    decode = start("decode", transport, LARGE)
    prefill = start("prefill", transport, LARGE)
    hand_over(prefill, decode, 1)
    before = decode.ask("kept").rsplit(" ", 1)[1]
    prefill.ask("send_chunk", 2, 60)
    decode.ask("receive", 2, 62)
    assert decode.ask("moving", 2) == "moving"
    prefill.kill()
    outcome = decode.ask("over", 2, seconds=5)
    assert outcome.startswith("FAILED"), outcome
    assert "part 0 of 1 (tp0/1 pp0/1 cp0/1 dp0/1, sends kv) was lost" in outcome
    assert decode.ask("released", 2, seconds=5) == "released"
    decode.ask("wipe")
    for room in (1, 2):
        decode.ask("close", room)
    successor = start("prefill", transport, LARGE)
    hand_over(successor, decode, 3)
    assert decode.ask("kept").rsplit(" ", 1)[1] == before, "descriptors of the dead process are still open"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_decode_is_killed_in_the_middle(start, transport):
    prefill = start("prefill", transport, LARGE)
    decode = start("decode", transport, LARGE)
    hand_over(prefill, decode, 1)
    decode.ask("receive", 2, 62)
    prefill.ask("send_chunk", 2, 60)
    decode.ask("moving", 2)
    decode.kill()
    outcome = prefill.ask("over", 2, seconds=5)
    assert outcome.startswith("FAILED"), outcome
    assert "decode rank 0" in outcome
    assert prefill.ask("released", 2, seconds=5) == "released"
    other = start("decode", transport, LARGE)
    hand_over(prefill, other, 3)


def test_prefill_is_stopped_over_shm(start):
    """The room fails within the peer's timeout. A stopped process may go on writing: its rows stay until it is dead."""
    prefill, decode = start("prefill", "shm"), start("decode", "shm")
    hand_over(prefill, decode, 1)
    decode.ask("receive", 2, 20)
    assert decode.ask("transferring", 2) == "TRANSFERRING"
    prefill.signal(signal.SIGSTOP)
    outcome = decode.ask("over", 2, seconds=6)
    assert outcome.startswith("FAILED"), outcome
    assert decode.ask("is_released", 2) == "False"
    decode.tell("released", 2)
    with pytest.raises(queue.Empty):
        decode.answer(1)
    prefill.kill()
    assert decode.answer(5) == "released"


def test_decode_is_stopped(start):
    """The prefill side goes on with others; the two work together again when it wakes up."""
    prefill, decode = start("prefill", "tcp"), start("decode", "tcp")
    other = start("decode", "tcp")
    hand_over(prefill, decode, 1)
    decode.ask("receive", 2, 20)
    decode.ask("transferring", 2)
    prefill.ask("send_chunk", 2, 10)
    assert prefill.ask("transferring", 2) == "TRANSFERRING"
    decode.signal(signal.SIGSTOP)
    outcome = prefill.ask("over", 2, seconds=6)
    assert outcome.startswith("FAILED decode rank 0 was lost"), outcome
    hand_over(prefill, other, 3)
    decode.signal(signal.SIGCONT)
    outcome = decode.ask("over", 2)
    assert outcome.startswith("FAILED"), outcome
    assert decode.ask("released", 2) == "released"
    decode.ask("wipe")
    hand_over(prefill, decode, 4)


def test_prefill_is_stopped_over_tcp(start):
    """Its connections are cut, so the rows come back while it sleeps; when it wakes up it is used again."""
    prefill, decode = start("prefill", "tcp"), start("decode", "tcp")
    hand_over(prefill, decode, 1)
    decode.ask("receive", 2, 20)
    assert decode.ask("transferring", 2) == "TRANSFERRING"
    prefill.signal(signal.SIGSTOP)
    outcome = decode.ask("over", 2, seconds=6)
    assert outcome.startswith("FAILED"), outcome
    assert decode.ask("released", 2, seconds=6) == "released"
    prefill.signal(signal.SIGCONT)
    prefill.ask("send", 3, 20)
    hand_over(prefill, decode, 4)


@pytest.mark.parametrize(("transport", "stopped"), [("shm", False), ("tcp", False), ("shm", True)])
def test_one_of_the_ranks_that_share_a_latent_dies(start, transport, stopped):
    """Its rooms fail and name it, and their rows wait for its fence; rooms of another source go on."""
    with RegistryServer() as elsewhere:
        ranks = [start("prefill", transport, LARGE, (rank, 4)) for rank in range(4)]
        other = start("prefill", transport, LARGE, (0, 1), elsewhere.url)
        decode = start("decode", transport, LARGE, (0, 1))
        for rank in ranks[1:]:
            rank.ask("send", 1, 20)
        hand_over(ranks[0], decode, 1)
        decode.ask("receive_at", 5, 20, elsewhere.port)
        assert decode.ask("transferring", 5) == "TRANSFERRING"
        for rank in ranks:
            rank.ask("send_chunk", 2, 60)
        decode.ask("receive", 2, 62)
        assert decode.ask("moving", 2) == "moving"
        victim = ranks[1]
        if stopped:
            victim.signal(signal.SIGSTOP)
        else:
            victim.kill()
        outcome = decode.ask("over", 2, seconds=6)
        assert outcome.startswith("FAILED part 1 of 4 (tp1/4 pp0/1 cp0/1 dp0/1, sends kv) was lost"), outcome
        if stopped:
            # It maps our memory, and may wake up and write.
            assert decode.ask("is_released", 2) == "False"
            victim.kill()
        assert decode.ask("released", 2) == "released"
        decode.ask("wipe")
        for rank in (ranks[0], *ranks[2:]):
            outcome = rank.ask("over", 2)
            assert outcome.startswith("FAILED decode rank 0: part 1 of 4"), outcome
        other.ask("send", 5, 20)
        assert decode.ask("over", 5) == "SUCCESS "
        assert decode.ask("check", 5, 20) == "same"
        for process in (other, decode):
            process.close()


def test_many_successors_leave_nothing(start):
    """D15: replacements leave tables and descriptors as they were."""
    decode = start("decode", "shm")
    counts = []
    for life in range(4):
        prefill = start("prefill", "shm")
        hand_over(prefill, decode, life)
        decode.ask("close", life)
        counts.append(decode.ask("kept"))
        prefill.kill()
    assert counts == [counts[0]] * 4


def test_a_manager_that_nobody_closed_does_not_hold_up_the_exit(start):
    with RegistryServer() as server:
        program = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from rank_process import Driver
driver = Driver("prefill", {server.url!r}, "tcp", 1)
driver.send(1, 3)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": SOURCE}, timeout=20, capture_output=True
        )
        assert done.returncode == 0, done.stderr
