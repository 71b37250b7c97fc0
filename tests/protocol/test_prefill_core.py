import dataclasses
import itertools
import re

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvbaton.errors import DeadlineExceeded, HandshakeError, PeerLost, RoomError, RowsError, TransferAborted
from kvbaton.layout import PAGED, SLOT, Ownership, window
from kvbaton.protocol import (
    Abort,
    AbortAck,
    ComponentNeed,
    Deadlines,
    Done,
    Offer,
    PeerShare,
    Ping,
    Pong,
    PrefillCore,
    RoomChanged,
    Rows,
    RowsReleased,
    Send,
    SendDone,
    StartWrite,
    Status,
    rows_to_bytes,
)
from kvbaton.protocol.prefill_room import Submission, merge

KV = {"kv": ComponentNeed(PAGED)}
LIMITS = Deadlines(offer_wait=30, transfer=20, drain=5, parked_offers=3, parked_bytes=1000, parked_seconds=10)


def share(components=KV, index=0, of=1, part=0, sends=True, aux=False):
    return PeerShare(components, index, of, part, sends, aux)


def core_with(*shares):
    core = PrefillCore(LIMITS)
    for number, each in enumerate(shares or (share(),)):
        core.peer_joined(f"d{number}", each)
    return core


def offer(room=7, epoch=1, tokens=32, names=("kv",), prefix=0, rows=(3, 4), aux_row=-1):
    return Offer(room, epoch, tokens, {name: Rows(rows_to_bytes(rows)) for name in names}, prefix, aux_row)


def of_kind(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def sent(actions):
    return [action.message for action in of_kind(actions, Send)]


def finish(core, room=7, tokens=32, ranges=None, slots=(), aux=False, now=0.0, handle=9):
    return core.finish(room, handle, tokens, {"kv": (0, tokens)} if ranges is None else ranges, slots, aux, now)


def empty_but_peers(core):
    sizes = core.table_sizes()
    del sizes["peers"], sizes["remembered"]
    return not any(sizes.values())


@pytest.mark.parametrize("offer_first", [True, False])
def test_one_room_from_open_to_success(offer_first):
    core = core_with()
    core.open(7, 0.0)
    actions = []
    if offer_first:
        actions += core.handle("d0", offer(), 1.0)
        assert actions == [RoomChanged(7, Status.TRANSFERRING)]
    actions += core.submit(7, 1, {"kv": (0, 16)}, 2.0)
    actions += finish(core, ranges={"kv": (16, 32)}, handle=2)
    if not offer_first:
        assert core.status(7) is Status.WAITING
        actions += core.handle("d0", offer(), 3.0)
    writes = of_kind(actions, StartWrite)
    assert [(write.handle, write.pieces, write.slots) for write in writes] == [
        (1, {"kv": (0, 16)}, ()),
        (2, {"kv": (16, 32)}, ()),
    ]
    assert core.offer(7, "d0") == offer()
    # Tickets may end in any order; Done comes with the last.
    assert core.written(writes[1].ticket, "", 4.0, {"kv": 100}) == []
    assert core.written(writes[0].ticket, "", 4.0, {"kv": 50}) == [
        SendDone("d0", Done(7, 1, 0, 2, {"kv": 150}), aux=False),
        RoomChanged(7, Status.SUCCESS),
        RowsReleased(7),
    ]
    assert core.rows_released(7)
    core.close(7, 0.0)
    assert core.status(7) is Status.FAILED
    assert empty_but_peers(core)


@pytest.mark.parametrize(
    ("needs", "tokens", "prefix", "expected"),
    [
        ({"kv": ComponentNeed(PAGED)}, 32, 0, {"kv": (0, 32)}),
        ({"kv": ComponentNeed(PAGED)}, 32, 20, {"kv": (20, 32)}),
        ({"kv": ComponentNeed(PAGED)}, 32, 32, None),
        ({"kv": ComponentNeed(window(8))}, 32, 0, {"kv": (24, 32)}),
        ({"kv": ComponentNeed(window(8))}, 32, 28, {"kv": (28, 32)}),
        ({"kv": ComponentNeed(window(64))}, 32, 0, {"kv": (0, 32)}),
        # This decode rank owns tokens 16..31 of each 32: nothing of the first 16.
        ({"kv": ComponentNeed(PAGED, Ownership(16, 2, 1))}, 16, 0, None),
        ({"kv": ComponentNeed(PAGED, Ownership(16, 2, 1))}, 17, 0, {"kv": (0, 17)}),
    ],
)
def test_only_what_is_needed_is_written(needs, tokens, prefix, expected):
    core = core_with(share(needs))
    core.open(7, 0.0)
    rows = () if expected is None else (3,)
    core.handle("d0", offer(tokens=tokens, prefix=prefix, rows=rows), 0.0)
    actions = finish(core, tokens=tokens)
    assert [write.pieces for write in of_kind(actions, StartWrite)] == ([] if expected is None else [expected])
    assert bool(of_kind(actions, SendDone)) == (expected is None)


@pytest.mark.parametrize(
    ("needs", "asked", "given", "text"),
    [
        (KV, {"tokens": 32}, {"tokens": 33}, "finished 33 tokens.* for 32"),
        (KV, {}, {"ranges": {"kv": (0, 31)}}, "'kv': tokens 0 to 32 are needed, those from 31 on were not sent"),
        (KV, {"prefix": 4}, {"ranges": {"kv": (5, 32)}}, "'kv': tokens 4 to 32 are needed, those from 4 on"),
        (KV, {}, {"ranges": {}}, "'kv': tokens 0 to 32"),
        ({"kv": ComponentNeed(window(8))}, {}, {"ranges": {"kv": (25, 32)}}, "'kv': tokens 24 to 32"),
        ({"gdn": ComponentNeed(SLOT)}, {"names": ("gdn",)}, {}, "'gdn': the receiver offered slots"),
        (KV, {"aux_row": 0}, {}, "waits for aux data"),
    ],
)
@pytest.mark.parametrize("offer_first", [True, False])
def test_what_is_missing_fails_both_sides_with_its_name_and_numbers(needs, asked, given, text, offer_first):
    core = core_with(share(needs, aux=True))
    core.open(7, 0.0)
    steps = [lambda: core.handle("d0", offer(**asked), 1.0), lambda: finish(core, **given)]
    actions = [action for step in (steps if offer_first else steps[::-1]) for action in step()]
    assert not of_kind(actions, StartWrite)
    assert not of_kind(actions, SendDone)
    assert core.status(7) is Status.FAILED
    abort, ack = sent(actions)
    assert isinstance(abort, Abort)
    assert ack == AbortAck(7, 1, 0, drained=True)
    for reason in (core.reason(7), abort.reason):
        assert re.search(text, reason), reason


@pytest.mark.parametrize(
    ("needs", "names", "rows", "text"),
    [
        (KV, (), (), "'kv': the receiver offered 0 rows for tokens 0 to 32"),
        (KV, ("kv",), (), "'kv': the receiver offered 0 rows"),
        ({"gdn": ComponentNeed(SLOT)}, ("kv",), (1,), "'gdn': the receiver offered no slots"),
    ],
)
def test_an_offer_without_rows_for_what_moves_is_refused(needs, names, rows, text):
    core = core_with(share(needs))
    core.open(7, 0.0)
    actions = core.handle("d0", offer(names=names, rows=rows), 0.0)
    assert core.status(7) is Status.FAILED
    assert text in core.reason(7)
    assert [type(message) for message in sent(actions)] == [Abort, AbortAck]


@pytest.mark.parametrize(
    "bad",
    [
        Offer(7, 1, 32, {"kv": Rows(bytes(9))}),
        Offer(7, 1, 32, {"kv": Rows(b"\xff" * 8)}),
        Offer(7, 1, 32, {"other": Rows(b"\xff" * 8), "kv": Rows(bytes(8))}),
        Offer(7, 1, 32, {"kv": Rows(bytes(8))}, prefix=33),
    ],
)
def test_a_malformed_offer_fails_its_room_alone(bad):
    core = core_with(share(), share())
    core.open(7, 0.0)
    core.open(8, 0.0)
    core.handle("d1", offer(room=8), 0.0)
    actions = core.handle("d0", bad, 0.0)
    assert [type(message) for message in sent(actions)] == [Abort, AbortAck]
    assert core.unexpected == {"malformed Offer": 1}
    assert core.status(7) is Status.FAILED
    assert core.status(8) is Status.TRANSFERRING


def test_components_outside_the_share_are_left_to_the_other_ranks():
    core = core_with()
    core.open(7, 0.0)
    core.handle("d0", offer(names=("kv", "of another rank")), 0.0)
    (write,) = of_kind(finish(core, ranges={"kv": (0, 32), "not shared": (0, 32)}, slots={"nor this"}), StartWrite)
    assert write.pieces == {"kv": (0, 32)}
    assert write.slots == ()


def test_slots_move_with_the_finish_and_an_empty_list_means_none():
    needs = {"gdn": ComponentNeed(SLOT), "conv": ComponentNeed(SLOT)}
    core = core_with(share(needs))
    core.open(7, 0.0)
    core.handle("d0", Offer(7, 1, 32, {"gdn": Rows(rows_to_bytes([5])), "conv": Rows(b"")}), 0.0)
    (write,) = of_kind(finish(core, slots={"gdn", "conv"}), StartWrite)
    assert (write.pieces, write.slots) == ({}, ("gdn",))


def test_every_decode_rank_must_be_served():
    core = core_with(share(index=0, of=2), share(index=1, of=2, sends=False, components={}))
    core.open(7, 0.0)
    (write,) = of_kind(core.handle("d0", offer(), 0.0) + finish(core), StartWrite)
    core.written(write.ticket, "", 1.0)
    assert core.status(7) is Status.TRANSFERRING
    actions = core.handle("d1", offer(epoch=1), 2.0)
    assert actions == [RoomChanged(7, Status.SUCCESS), RowsReleased(7)]


def test_a_failed_write_is_told_to_every_decode_rank_and_confirmed_when_quiet():
    core = core_with(share(index=0, of=2), share(index=1, of=2))
    core.open(7, 0.0)
    core.handle("d0", offer(), 0.0)
    core.handle("d1", offer(epoch=4), 0.0)
    first, second = of_kind(finish(core), StartWrite)
    actions = core.written(first.ticket, "wire broke", 1.0)
    reason = "write to decode rank 0 failed: wire broke"
    assert actions == [
        RoomChanged(7, Status.FAILED, reason),
        Send("d0", Abort(7, 1, reason)),
        Send("d0", AbortAck(7, 1, 0, drained=True)),
        Send("d1", Abort(7, 4, reason)),
    ]
    assert not core.rows_released(7)
    assert core.written(second.ticket, "", 2.0) == [Send("d1", AbortAck(7, 4, 0, drained=True)), RowsReleased(7)]
    assert core.status(7) is Status.FAILED


def test_an_offer_counts_once_and_other_epochs_do_not_touch_the_room():
    core = core_with()
    core.open(7, 0.0)
    core.handle("d0", offer(epoch=2), 0.0)
    for again in (offer(epoch=2), offer(epoch=2, rows=(8, 9)), offer(epoch=1, rows=(8, 9))):
        assert core.handle("d0", again, 0.0) == []
    assert core.offer(7, "d0") == offer(epoch=2)
    assert core.unexpected == {"repeated Offer": 2, "stale Offer": 1}
    # A later epoch is the next life of the room: it waits, and leaves this one alone.
    assert core.handle("d0", offer(epoch=3, rows=(8, 9)), 0.0) == []
    assert core.offer(7, "d0") == offer(epoch=2)
    assert core.table_sizes()["parked"] == 1
    core.abort(7, "enough", 0.0)
    core.close(7, 0.0)
    assert core.open(7, 1.0) == [RoomChanged(7, Status.TRANSFERRING)]
    assert core.offer(7, "d0") == offer(epoch=3, rows=(8, 9))


def test_an_offer_for_a_room_that_failed_is_answered_at_once():
    core = core_with()
    core.open(7, 0.0)
    core.abort(7, "out of memory", 0.0)
    assert sent(core.handle("d0", offer(), 1.0)) == [
        Abort(7, 1, "out of memory", "TransferAborted"),
        AbortAck(7, 1, 0, drained=True),
    ]


def test_an_offer_after_its_abort_starts_nothing():
    core = core_with()
    assert core.handle("d0", Abort(7, 1, offered=True), 0.0) == [Send("d0", AbortAck(7, 1, 0, drained=True))]
    assert core.handle("d0", offer(), 1.0) == []
    assert core.open(7, 2.0) == []
    assert core.status(7) is Status.WAITING
    core.close(7, 0.0)
    assert empty_but_peers(core)


def test_a_peer_that_withdrew_before_its_offer_may_offer_for_the_next_life():
    core = core_with()
    core.open(7, 0.0)
    actions = core.handle("d0", Abort(7, 1, "changed its mind", "TransferAborted", offered=False), 0.0)
    assert actions[0] == RoomChanged(7, Status.FAILED, "decode rank 0: changed its mind", TransferAborted)
    assert core.handle("d0", offer(epoch=2), 1.0) == []
    core.close(7, 0.0)
    assert core.open(7, 2.0) == [RoomChanged(7, Status.TRANSFERRING)]


def test_an_offer_after_success_is_for_the_next_life():
    core = core_with()
    core.open(7, 0.0)
    core.handle("d0", offer(prefix=32), 0.0)
    finish(core)
    assert core.status(7) is Status.SUCCESS
    assert core.handle("d0", offer(epoch=2), 1.0) == []
    core.close(7, 0.0)
    assert core.open(7, 2.0) == [RoomChanged(7, Status.TRANSFERRING)]


def test_a_room_in_use_by_others_is_refused_to_strangers():
    core = core_with(share(index=0, of=2), share(index=0, of=2), share(index=1, of=3), share(index=1, of=2))
    core.open(7, 0.0)
    core.handle("d0", offer(), 0.0)
    for stranger in ("d1", "d2"):
        assert [type(message) for message in sent(core.handle(stranger, offer(), 0.0))] == [Abort, AbortAck]
        # Nor can a stranger end it.
        core.handle(stranger, Abort(7, 2), 0.0)
    assert core.unexpected == {"Offer for a room of others": 2}
    assert core.status(7) is Status.TRANSFERRING
    core.handle("d3", offer(), 0.0)
    writes = of_kind(finish(core), StartWrite)
    assert [write.peer for write in writes] == ["d0", "d3"]


def test_early_offers_are_bounded_in_number_and_bytes_and_expire():
    core = core_with(share(of=3), share(index=1, of=3), share(index=2, of=3))
    for room, peer in ((1, "d0"), (2, "d1"), (3, "d2")):
        assert core.handle(peer, offer(room=room), float(room)) == []
    abort, ack = sent(core.handle("d0", offer(room=4, epoch=2), 3.0))
    assert "limit 3" in abort.reason
    assert ack.drained
    assert core.next_deadline() == 11.0
    assert core.tick(10.9) == []
    assert [message.room for message in sent(core.tick(12.5))] == [1, 1, 2, 2]
    abort, _ = sent(core.handle("d0", offer(room=5, epoch=3, rows=range(200)), 12.0))
    assert "limit 1000" in abort.reason
    assert core.table_sizes()["parked"] == 1
    for peer in ("d0", "d1", "d2"):
        core.peer_lost(peer, "gone", 13.0)
    assert not any(core.table_sizes().values())


@pytest.mark.parametrize(("rows", "held"), [((1,), 8), (range(100), 5)])
def test_a_peer_that_offers_without_end_leaves_room_for_others(rows, held):
    """One of them may have half of the places, and of the bytes; another one gets what it needs."""
    core = PrefillCore(dataclasses.replace(LIMITS, parked_offers=16, parked_bytes=8000))
    for index in range(2):
        core.peer_joined(f"d{index}", share(index=index, of=2))
    refused = []
    for room in range(40):
        refused += sent(core.handle("d0", offer(room=room, epoch=room + 1, rows=rows), 0.0))
    assert core.table_sizes()["parked"] == held
    assert len(refused) == 2 * (40 - held)
    assert "may fill as much as it leaves free" in refused[0].reason
    for room in range(2):
        assert core.handle("d1", offer(room=room, epoch=room + 1, rows=rows), 0.0) == []
    # What it held is its own again once a room was opened.
    core.open(0, 0.0)
    assert core.table_sizes()["parked"] == held
    core.close(0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple), max_size=8))
def test_submitted_tokens_are_merged_into_the_fewest_ranges(pieces):
    merged = merge(Submission(0, {"kv": piece}) for piece in pieces).get("kv", ())
    tokens = {token for first, last in pieces for token in range(first, last)}
    assert {token for first, last in merged for token in range(first, last)} == tokens
    assert all(first < last for first, last in merged)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


def test_bytes_of_early_offers_are_given_back():
    core = core_with()
    for epoch in range(1, 10):
        assert core.handle("d0", offer(room=epoch, epoch=epoch, rows=range(120)), 0.0) == []
        core.handle("d0", Abort(epoch, epoch, offered=True), 0.0)
    assert empty_but_peers(core)


def test_a_newer_early_offer_takes_the_place_of_an_older_one():
    core = core_with()
    for epoch in (2, 3, 1):
        core.handle("d0", offer(epoch=epoch, rows=(epoch,)), 0.0)
    core.open(7, 1.0)
    assert core.offer(7, "d0") == offer(epoch=3, rows=(3,))


def test_deadlines_name_what_is_waited_for():
    core = core_with(share(index=0, of=2), share(index=1, of=2))
    core.open(7, 0.0)
    core.handle("d0", offer(), 1.0)
    assert core.next_deadline() == 30.0
    assert core.tick(29.9) == []
    changed = core.tick(30.0)[0]
    assert (changed.status, changed.error) == (Status.FAILED, DeadlineExceeded)
    assert "after 30 s 1 decode ranks (of 2)" in changed.reason
    core.close(7, 0.0)

    core.open(8, 100.0)
    for peer in ("d0", "d1"):
        core.handle(peer, offer(room=8, epoch=9), 101.0)
    assert core.next_deadline() == 121.0
    (first, _) = of_kind(core.submit(8, 1, {"kv": (0, 16)}, 110.0), StartWrite)
    core.written(first.ticket, "", 115.0)
    # Progress moves the deadline; it is looked at when the old one comes.
    assert core.tick(121.0) == []
    assert core.next_deadline() == 135.0
    assert "no progress for 20 s: 1 writes have not ended" in core.tick(135.0)[0].reason
    assert core.next_deadline() is None


def test_a_dead_decode_rank_fails_its_rooms_at_once_and_no_others():
    core = core_with(share(), share())
    for room, peer in ((7, "d0"), (8, "d1"), (9, "d0")):
        core.open(room, 0.0)
        core.handle(peer, offer(room=room, epoch=room), 0.0)
    (write,) = of_kind(finish(core), StartWrite)
    actions = core.peer_lost("d0", "connection reset", 1.0)
    assert [(change.room, change.error) for change in of_kind(actions, RoomChanged)] == [(7, PeerLost), (9, PeerLost)]
    assert not of_kind(actions, Send)
    assert core.status(8) is Status.TRANSFERRING
    # Its ticket still ends, and only then are the rows of the room free.
    assert of_kind(actions, RowsReleased) == [RowsReleased(9)]
    assert core.written(write.ticket, "peer is gone", 2.0) == [RowsReleased(7)]


def test_ten_replaced_peers_leave_nothing_behind():
    core = PrefillCore(LIMITS)
    for number in range(10):
        core.peer_joined(f"in:{number}", share())
        core.handle(f"in:{number}", offer(room=1, epoch=1), 0.0)
        core.handle(f"in:{number}", Abort(2, 9, offered=True), 0.0)
        core.open(3, 0.0)
        core.handle(f"in:{number}", offer(room=3, epoch=2), 0.0)
        core.peer_lost(f"in:{number}", "replaced", 0.0)
        core.close(3, 0.0)
        core.tick(LIMITS.recent_seconds)
        assert not any(core.table_sizes().values())


def test_messages_that_do_not_fit_are_counted_and_ignored():
    core = core_with()
    core.open(7, 0.0)
    for message in (Done(7, 1, 0), AbortAck(7, 1, 0, drained=True)):
        assert core.handle("d0", message, 0.0) == []
    assert core.handle("nobody", offer(), 0.0) == []
    assert core.handle("nobody", Abort(7, 1), 0.0) == []
    assert core.written(12345, "", 0.0) == []
    assert core.handle("d0", Ping(5), 0.0) == [Send("d0", Pong(5))]
    assert core.handle("d0", Pong(5), 0.0) == []
    assert core.status(7) is Status.WAITING
    assert core.unexpected == {
        "Done": 1,
        "AbortAck": 1,
        "Offer of an unknown peer": 1,
        "Abort of an unknown peer": 1,
        "unknown ticket": 1,
    }


def test_misuse_by_the_engine_is_named():
    core = core_with()
    with pytest.raises(RoomError, match="7 is not open"):
        core.submit(7, 1, {}, 0.0)
    core.open(7, 0.0)
    with pytest.raises(RoomError, match="7 is in use"):
        core.open(7, 0.0)
    for ranges in ({"kv": (5, 4)}, {"kv": (-1, 4)}):
        with pytest.raises(RowsError, match="'kv'"):
            core.submit(7, 1, ranges, 0.0)
    core.submit(7, 1, {"kv": (0, 16)}, 0.0)
    with pytest.raises(RowsError, match="0 to 16 reach past the request's 8 tokens"):
        finish(core, tokens=8)
    with pytest.raises(RoomError, match="no offer"):
        core.offer(7, "d0")
    finish(core)
    for again in (lambda: finish(core), lambda: core.submit(7, 1, {}, 0.0)):
        with pytest.raises(RoomError, match="7 is finished"):
            again()
    with pytest.raises(HandshakeError):
        core.peer_joined("d0", share(index=0, of=2))
    assert core.peer_joined("d0", share()) == []


def test_a_closed_room_still_drains_and_its_number_is_taken_until_then():
    core = core_with()
    core.open(7, 0.0)
    core.handle("d0", offer(), 0.0)
    (write,) = of_kind(finish(core), StartWrite)
    core.close(7, 0.0)
    assert core.status(7) is Status.FAILED
    assert not core.rows_released(7)
    with pytest.raises(RoomError, match="last writes"):
        core.open(7, 1.0)
    with pytest.raises(RoomError, match="not open"):
        core.submit(7, 2, {}, 1.0)
    assert core.written(write.ticket, "", 2.0) == [Send("d0", AbortAck(7, 1, 0, drained=True)), RowsReleased(7)]
    assert core.rows_released(7)
    core.open(7, 3.0)
    core.close(7, 0.0)
    assert empty_but_peers(core)


def test_a_rank_that_did_not_join_ends_a_room_that_waits_for_it():
    core = core_with(share(of=2), share())
    for room in (7, 8, 9):
        core.open(room, 0.0)
    core.handle("d0", offer(room=8), 1.0)
    core.handle("d1", offer(room=9), 1.0)
    refused = Abort(7, 1, "dtype is bfloat16 here and float16 there")
    for room in (7, 8):
        (changed, *_) = core.withdrawn(msgspec.structs.replace(refused, room=room), 2.0)
        assert (changed.room, changed.status) == (room, Status.FAILED)
        assert changed.reason == f"a decode rank did not pass the handshake: {refused.reason}"
    # Every rank of this one has offered: whoever says so is none of them.
    assert core.withdrawn(msgspec.structs.replace(refused, room=9), 2.0) == []
    assert core.unexpected["Abort of a rank that did not join"] == 1
    assert core.status(9) is Status.TRANSFERRING


@pytest.mark.parametrize(
    ("opened", "status"), [(LIMITS.recent_seconds - 1, Status.FAILED), (LIMITS.recent_seconds, Status.WAITING)]
)
def test_a_room_that_was_withdrawn_before_it_was_opened(opened, status):
    core = core_with()
    assert core.withdrawn(Abort(7, 1, "another model"), 0.0) == []
    core.tick(opened)
    core.open(7, opened)
    assert core.status(7) is status
    core.close(7, opened)
    core.open(7, opened)
    assert core.status(7) is Status.WAITING
    core.close(7, opened)
    assert core.table_sizes()["remembered"] == 1
    core.tick(200.0)
    assert core.table_sizes()["remembered"] == 0
    assert empty_but_peers(core)


def test_an_offer_that_comes_after_the_room_was_cancelled_and_closed():
    core = core_with(share(of=2), share(index=1, of=2))
    core.open(7, 0.0)
    core.handle("d1", offer(), 0.5)
    core.abort(7, "the client went away", 1.0)
    core.close(7, 1.0)
    abort, ack = sent(core.handle("d0", offer(), 1.5))
    assert (abort.room, abort.epoch, abort.reason) == (7, 1, "the client went away")
    assert ack == AbortAck(7, 1, 0, drained=True)
    # Now both know: what they offer next is for the next life of the number.
    for peer in ("d0", "d1"):
        assert core.handle(peer, offer(epoch=2), 2.0) == []
    core.open(7, 3.0)
    assert core.status(7) is Status.TRANSFERRING
    core.abort(7, "", 4.0)
    core.close(7, 4.0)
    core.tick(100.0)
    assert empty_but_peers(core)


@pytest.mark.parametrize("offered", [True, False])
def test_a_receiver_that_gave_up_before_the_room_was_opened(offered):
    core = core_with()
    if offered:
        assert core.handle("d0", offer(), 0.5) == []
    gone = Abort(7, 1, "the client went away", "TransferAborted", offered=offered)
    assert core.handle("d0", gone, 1.0) == [Send("d0", AbortAck(7, 1, 0, drained=True))]
    (changed, *_) = core.open(7, 2.0)
    assert (changed.status, changed.reason) == (Status.FAILED, "decode rank 0: the client went away")
    core.close(7, 2.0)
    core.open(7, 2.0)
    assert core.status(7) is Status.WAITING


@pytest.mark.parametrize("parked", [True, False])
def test_a_room_that_the_engine_gave_up_before_it_was_opened(parked):
    core = core_with()
    actions = core.handle("d0", offer(), 0.5) if parked else []
    actions += core.cancelled(7, "the client went away", 1.0)
    actions += [] if parked else core.handle("d0", offer(), 1.5)
    abort, ack = sent(actions)
    assert (abort.room, abort.epoch, abort.reason) == (7, 1, "the client went away")
    assert ack == AbortAck(7, 1, 0, drained=True)
    assert core.handle("d0", offer(epoch=2), 2.0) == []
    core.open(7, 3.0)
    assert core.status(7) is Status.TRANSFERRING


def with_written_aux(offer_first, submissions):
    """A core whose only peer has aux data written; all that it did from open to finish, and its tickets ended."""
    written = PeerShare(KV, 0, 1, 0, sends=True, carries_aux=True, writes_aux=True)
    core = core_with(written)
    core.open(7, 0.0)
    actions = list(core.handle("d0", offer(aux_row=5), 1.0)) if offer_first else []
    for number, tokens in enumerate(submissions):
        actions += core.submit(7, number + 1, {"kv": tokens}, 2.0)
    actions += finish(core, ranges={"kv": (submissions[-1][1] if submissions else 0, 32)}, aux=True)
    if not offer_first:
        actions += core.handle("d0", offer(aux_row=5), 3.0)
    return core, actions


@pytest.mark.parametrize("offer_first", [True, False])
@pytest.mark.parametrize("submissions", [[], [(0, 16)], [(0, 16), (16, 32)]])
def test_aux_data_are_written_once_with_the_last_chunk_and_stay_out_of_done(offer_first, submissions):
    core, actions = with_written_aux(offer_first, submissions)
    writes = of_kind(actions, StartWrite)
    assert [write.handle for write in writes if write.aux] == [9]
    assert not of_kind(actions, SendDone)
    ends = [core.written(write.ticket, "", 4.0, {"kv": 1, "aux": int(write.aux)}) for write in writes]
    (done,) = of_kind(ends[-1], SendDone)
    assert not done.aux
    assert done.done.bytes == {"kv": len(writes), "aux": 1}
    assert not [each for end in ends[:-1] for each in of_kind(end, SendDone)]
    assert core.status(7) is Status.SUCCESS
    assert empty_but_peers(core) is False
    core.close(7, 5.0)
    assert empty_but_peers(core)


def test_aux_data_that_could_not_be_written_fail_the_room():
    core, actions = with_written_aux(True, [])
    (write,) = of_kind(actions, StartWrite)
    core.written(write.ticket, "out of reach", 4.0)
    assert core.status(7) is Status.FAILED
    assert "out of reach" in core.reason(7)


def test_aux_data_that_nobody_asked_for_are_not_written():
    core = core_with(PeerShare(KV, 0, 1, 0, sends=True, carries_aux=True, writes_aux=True))
    core.open(7, 0.0)
    actions = [*core.handle("d0", offer(), 1.0), *finish(core, aux=True)]
    assert [write.aux for write in of_kind(actions, StartWrite)] == [False]


class TestDecodeRanksThatConnectAnew:
    """A decode rank is known by its index: what it said on a connection that is gone was about earlier rooms."""

    def test_its_next_room_is_not_refused_for_one_that_it_gave_up(self):
        core = core_with(share(of=2), share(index=1, of=2), share(of=2))
        core.open(7, 0.0)
        core.handle("d0", Abort(7, 1, "no transport works here"), 1.0)
        core.close(7, 1.0)
        assert core.handle("d2", offer(), 2.0) == []
        core.open(7, 2.0)
        assert core.status(7) is Status.TRANSFERRING
        # The other one has not said anything of the first room yet.
        assert [type(message) for message in sent(core.handle("d1", offer(), 2.0))] == []

    def test_the_other_rank_is_still_told_that_it_comes_too_late(self):
        core = core_with(share(of=2), share(index=1, of=2))
        core.open(7, 0.0)
        core.handle("d0", Abort(7, 1, "no transport works here"), 1.0)
        core.close(7, 1.0)
        messages = sent(core.handle("d1", offer(), 2.0))
        assert [type(message) for message in messages] == [Abort, AbortAck]
        assert "no transport works here" in messages[0].reason

    def test_one_that_never_joined_is_remembered_too(self):
        core = core_with()
        core.open(7, 0.0)
        core.withdrawn(Abort(7, 1, "another version"), 1.0, rank=0)
        core.close(7, 1.0)
        assert core.handle("d0", offer(), 2.0) == []
        core.open(7, 2.0)
        assert core.status(7) is Status.TRANSFERRING

    @pytest.mark.parametrize("joined", [True, False])
    def test_what_it_gives_up_next_is_the_next_room(self, joined):
        core = core_with(share(of=2), share(index=1, of=2))
        core.open(7, 0.0)
        core.handle("d0", Abort(7, 1, "the first"), 1.0)
        core.close(7, 1.0)
        if joined:
            core.handle("d0", Abort(7, 2, "the second"), 2.0)
        else:
            core.withdrawn(Abort(7, 1, "the second"), 2.0, rank=0)
        core.open(7, 3.0)
        assert core.status(7) is Status.FAILED
        assert "the second" in core.reason(7)

    def test_a_room_that_was_withdrawn_before_it_was_opened_is_over_for_who_withdrew_it(self):
        core = core_with(share(of=2), share(index=1, of=2))
        core.handle("d0", Abort(7, 1, "gave up"), 0.0)
        core.open(7, 1.0)
        assert core.status(7) is Status.FAILED
        core.close(7, 1.0)
        assert core.handle("d0", offer(epoch=2), 2.0) == []
        core.open(7, 2.0)
        assert core.status(7) is Status.TRANSFERRING

    def test_late_news_of_a_room_that_has_ended_is_not_about_the_next(self):
        core = core_with()
        core.open(7, 0.0)
        core.abort(7, "the client went away", 1.0)
        core.close(7, 1.0)
        core.withdrawn(Abort(7, 1, "another version"), 2.0, rank=0)
        core.open(7, 3.0)
        assert core.status(7) is Status.WAITING


def test_rooms_go_on_after_the_epochs_of_lost_offers():
    from kvbaton.protocol.epochs import MAX_GAPS

    core = core_with()
    last = MAX_GAPS + 10
    for epoch in range(2, last):
        core.handle("d0", Abort(1000, epoch, "gave up"), 0.0)
    assert core.table_sizes()["epochs"] <= MAX_GAPS
    core.open(7, 0.0)
    core.handle("d0", offer(epoch=last), 0.0)
    assert core.status(7) is Status.TRANSFERRING
