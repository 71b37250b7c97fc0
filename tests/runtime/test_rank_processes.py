"""Ranks in processes of their own, over a real registry: hand-over, and one of several that dies."""

import os
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
