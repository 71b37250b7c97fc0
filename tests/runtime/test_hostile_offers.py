"""A decode rank that joined and offers rows that are none: the prefill rank checks each before a byte moves."""

import dataclasses

import msgspec
import numpy as np
import pytest
from rank_world import CANARY, FAST, wait_over, wait_released
from room_pairs import FULL, failed, pair

from kvbaton.protocol import Offer, Rows, Send, rows_to_bytes


def kv(rows, start=0):
    return {"components": {"kv": Rows(np.array(rows, "<i8").tobytes(), start), "conv": Rows(rows_to_bytes([2]))}}


def conv(rows):
    return {"components": {"kv": Rows(rows_to_bytes([4, 5])), "conv": Rows(np.array(rows, "<i8").tobytes())}}


HOSTILE = {
    "the first row that is not there": (kv([4, 16]), "row 16 is outside the 16"),
    "a row far away": (kv([4, 2**62]), f"row {2**62} is outside the 16"),
    "a row that wraps": (kv([4, 2**63 - 1]), "is outside the 16"),
    "a row below 0": (kv([4, -1]), "row -1"),
    "a slot that is not there": (conv([4]), "row 4 is outside the 4"),
    "a slot below 0": (conv([-(2**63)]), f"row {-(2**63)}"),
    "two slots": (conv([1, 2]), "1 rows at the source and 2 at the destination"),
    "bytes that are no rows": ({"components": {"kv": Rows(b"\x04" * 15), "conv": Rows(b"")}}, "15 bytes"),
    "a start that is no page": (kv([4, 5], 3), "not a multiple of the page size 4"),
    "a start behind the tokens": (kv([4, 5], 1 << 39), "cover its local tokens"),
    "a prefix behind the tokens": ({"prefix": 9}, "prefix of 9 tokens"),
    "fewer rows than tokens": (kv([4]), "cover its local tokens 0..4"),
    "more tokens than there are": ({"tokens": 1 << 40}, "tokens"),
    "an aux row that is not there": ({"aux_row": 8}, "row 8 is outside the 8"),
    "an aux row far away": ({"aux_row": 1 << 40}, f"row {1 << 40} is outside the 8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_rows_of_a_peer_are_checked_before_a_byte_moves(any_world, monkeypatch, name):
    """Aux data are written by the transport here, so that the aux row is one of those rows."""
    changes, reason = HOSTILE[name]
    source, destination = pair(any_world, FULL, settings=dataclasses.replace(FAST, aux="fabric"))
    source.fill("conv", [1])
    source.fill("aux", [1])
    core = destination.manager.side.core
    offer = core.offer

    def hostile(*arguments, **options):
        return [
            msgspec.structs.replace(action, message=msgspec.structs.replace(action.message, **changes))
            if isinstance(action, Send) and isinstance(action.message, Offer)
            else action
            for action in offer(*arguments, **options)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(core, "offer", hostile)
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=2)
        sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=1)
        wait_over(sender, receiver)
    failed(sender, reason)
    failed(receiver, reason)
    wait_released(sender, receiver)
    assert (destination.memory.array == CANARY).all()
    # Both go on.
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=2)
    sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=1)
    wait_released(sender, receiver)
    for part, rows, tokens in (("kv", [4, 5], (0, 8)), ("conv", [2], (0, 0)), ("aux", [2], (0, 0))):
        destination.check(part, rows, tokens)
    destination.check_rest()
    for rank in (source, destination):
        assert not rank.manager._control.faults
