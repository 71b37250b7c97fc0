"""A receiver's reason names the prefill rank that failed: its part, where it stands, and what it sends."""

import dataclasses
import uuid

from rank_world import FAST, Model, wait, wait_released
from room_pairs import Gate, failed

import kvbaton as kb
from kvbaton import errors
from kvbaton.transport.loopback import LoopbackTransport

HYBRID = Model(("latent", "conv", "kv"))
ROWS = {"latent": [0, 1], "conv": [0], "kv": [0, 1]}
NAME = "part 2 of 4 (tp2/4 pp0/1 cp0/1 dp0/1, sends latent, conv, kv)"


def four(world, **limits):
    """Four prefill ranks, and a decode rank with these deadlines."""
    settings = dataclasses.replace(FAST, striped=True, deadlines=kb.Deadlines(**limits))
    (decode,) = world.decode(HYBRID.layout(), settings=settings)
    return world.prefill(*(HYBRID.layout(rank, 4) for rank in range(4))), decode


def begin(ranks, decode):
    receiver = decode.manager.receiver(1)
    receiver.offer(ROWS, 8)
    senders = [rank.manager.sender(1) for rank in ranks]
    wait(lambda: all(room.poll() is kb.Status.TRANSFERRING for room in (receiver, *senders)))
    return senders, receiver


def test_a_rank_that_aborts(world):
    ranks, decode = four(world)
    senders, receiver = begin(ranks, decode)
    senders[2].abort("out of pages")
    failed(receiver, f"{NAME}: out of pages", error=errors.TransferAborted)
    wait_released(receiver, *senders)


def test_a_rank_whose_connection_ends(world):
    ranks, decode = four(world)
    senders, receiver = begin(ranks, decode)
    control = decode.manager._control
    endpoint = ranks[2].manager.endpoint
    (peer,) = [peer for peer in control._dialled if endpoint in peer]
    control.post(lambda: control._lost(peer, "the network was away"))
    failed(receiver, f"{NAME} was lost: the network was away", error=errors.PeerLost)
    wait_released(receiver, *senders)


def test_ranks_that_do_not_finish(world):
    ranks, decode = four(world, transfer=0.5)
    senders, receiver = begin(ranks, decode)
    for rank in (0, 1, 3):
        senders[rank].finish(ROWS, (0, 8))
    failed(receiver, f"still missing: {NAME}", error=errors.DeadlineExceeded)
    assert receiver.reason.endswith(NAME), "the others were done"
    wait_released(receiver, *senders)


def test_a_rank_that_is_fenced_while_another_one_fails(world):
    """The room fails because of the one; its rows wait for the other, whose write hangs, until that is cut off."""
    gate = Gate()
    settings = dataclasses.replace(FAST, striped=True, deadlines=kb.Deadlines(drain=0.2))
    transport = LoopbackTransport(uuid.uuid4().hex, fail=gate)
    ranks = [
        world.prefill(HYBRID.layout(rank, 4), transports=[transport if rank == 2 else "loopback"])[0]
        for rank in range(4)
    ]
    (decode,) = world.decode(HYBRID.layout(), settings=settings)
    senders, receiver = begin(ranks, decode)
    senders[2].finish(ROWS, (0, 8))
    gate.wait_entered()
    senders[0].abort("gives up")
    failed(receiver, "part 0 of 4 (tp0/4 pp0/1 cp0/1 dp0/1, sends latent, conv, kv): gives up")
    wait_released(receiver)
    gate.open()
    wait_released(*senders)
    decode.check_rest()
