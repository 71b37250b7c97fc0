import pytest

from kvbaton.errors import (
    DeadlineExceeded,
    HandshakeError,
    PeerLost,
    RoomError,
    RowsError,
    TransferAborted,
    TransferFailed,
)
from kvbaton.protocol import (
    Abort,
    AbortAck,
    Deadlines,
    DecodeCore,
    Deliver,
    Done,
    FencePeer,
    Offer,
    Ping,
    Pong,
    RoomChanged,
    Rows,
    RowsReleased,
    Send,
    Status,
    rows_to_bytes,
)

LIMITS = Deadlines(offer_wait=30, transfer=20, drain=5)
ROWS = {"kv": Rows(rows_to_bytes([3, 4]))}


def core_with(parts=(0, 1), of=2, **options):
    core = DecodeCore(LIMITS, **options)
    for part in range(of):
        core.peer_joined(f"p{part}", part, parts)
    return core


def offered(core, room=7, peers=("p0", "p1"), now=0.0):
    core.open(room, peers, now)
    return core.offer(room, ROWS, 32, now)


def test_one_room_from_open_to_success():
    core = core_with()
    assert core.open(7, ("p0", "p1"), 0.0) == []
    assert core.status(7) is Status.WAITING
    assert core.offer(7, ROWS, 32, 1.0, prefix=4, aux_row=9) == [
        RoomChanged(7, Status.TRANSFERRING),
        Send("p0", Offer(7, 1, 32, ROWS, 4, 9)),
        Send("p1", Offer(7, 1, 32, ROWS, 4, 9)),
    ]
    assert not core.rows_released(7)
    second = Done(7, 1, 1, 2, {"kv": 5}, b"aux")
    assert core.handle("p1", second, 2.0) == [Deliver(7, 1, second)]
    first = Done(7, 1, 0)
    assert core.handle("p0", first, 3.0) == [Deliver(7, 0, first), RoomChanged(7, Status.SUCCESS), RowsReleased(7)]
    assert core.rows_released(7)
    assert core.reason(7) == ""
    assert core.close(7, 4.0) == []
    assert core.table_sizes() == {"peers": 2, "rooms": 0, "timers": 0, "rooms_of_peers": 0}


def test_parts_that_send_nothing_are_told_but_not_waited_for():
    core = core_with(parts=(1,))
    assert [action.peer for action in offered(core) if isinstance(action, Send)] == ["p0", "p1"]
    assert core.handle("p0", Done(7, 1, 0), 1.0) == []
    assert core.unexpected == {"Done of an unexpected part": 1}
    core.handle("p1", Done(7, 1, 1), 1.0)
    assert core.status(7) is Status.SUCCESS


@pytest.mark.parametrize(
    ("peer", "message", "kind"),
    [
        ("p0", Done(7, 2, 0), "stale Done"),
        ("p0", Done(7, 1, 1), "Done of an unexpected part"),
        ("p0", Done(7, 1, 9), "Done of an unexpected part"),
        ("p0", Done(8, 1, 0), "Done for an unknown room"),
        ("p0", Abort(7, 2), "stale Abort"),
        ("p0", Abort(8, 1), "Abort for an unknown room"),
        ("p0", AbortAck(7, 2, 0, True), "stale AbortAck"),
        ("p0", AbortAck(7, 1, 1, True), "AbortAck of an unexpected part"),
        ("p0", Offer(7, 1, 1, {}), "Offer"),
        ("p2", Done(7, 1, 2), "Done for an unknown room"),
        ("p9", Done(7, 1, 0), "Done of an unknown peer"),
    ],
)
def test_messages_that_do_not_fit_are_counted_and_ignored(peer, message, kind):
    core = core_with(of=3)
    offered(core)
    assert core.handle(peer, message, 1.0) == []
    assert core.unexpected == {kind: 1}
    assert core.status(7) is Status.TRANSFERRING
    for part in (0, 1):
        core.handle(f"p{part}", Done(7, 1, part), 2.0)
    assert core.status(7) is Status.SUCCESS


@pytest.mark.parametrize("message", [Done(7, 1, 0), Abort(7, 1), AbortAck(7, 1, 0, True)])
def test_nothing_comes_for_a_room_before_its_offer(message):
    core = core_with()
    core.open(7, ("p0", "p1"), 0.0)
    assert core.handle("p0", message, 0.0) == []
    assert core.status(7) is Status.WAITING
    assert sum(core.unexpected.values()) == 1


def test_a_repeated_done_is_delivered_once():
    core = core_with()
    offered(core)
    assert core.handle("p0", Done(7, 1, 0), 1.0) != []
    assert core.handle("p0", Done(7, 1, 0), 1.0) == []
    assert core.unexpected == {"repeated Done": 1}
    assert core.status(7) is Status.TRANSFERRING


def test_an_abort_of_one_part_is_told_to_the_others_and_rows_wait_for_all():
    core = core_with(parts=(0, 1, 2), of=3)
    offered(core, peers=("p0", "p1", "p2"))
    core.handle("p2", Done(7, 1, 2), 1.0)
    reason = "part 0: out of pages"
    assert core.handle("p0", Abort(7, 1, "out of pages", "TransferAborted"), 2.0) == [
        RoomChanged(7, Status.FAILED, reason, TransferAborted),
        Send("p0", Abort(7, 1, reason, "TransferAborted", offered=True)),
        Send("p1", Abort(7, 1, reason, "TransferAborted", offered=True)),
        Send("p2", Abort(7, 1, reason, "TransferAborted", offered=True)),
    ]
    assert core.handle("p1", AbortAck(7, 1, 1, drained=False), 3.0) == []
    assert core.handle("p0", AbortAck(7, 1, 0, drained=True), 3.0) == []
    assert not core.rows_released(7)
    assert core.handle("p1", AbortAck(7, 1, 1, drained=True), 4.0) == [RowsReleased(7)]
    assert core.handle("p1", AbortAck(7, 1, 1, drained=True), 4.0) == []
    assert core.reason(7) == reason


def test_a_done_that_comes_after_the_failure_also_ends_its_writes():
    core = core_with()
    offered(core)
    core.abort(7, "enough", 1.0)
    assert core.handle("p0", Done(7, 1, 0), 2.0) == []
    assert core.handle("p1", AbortAck(7, 1, 1, drained=True), 2.0) == [RowsReleased(7)]
    assert core.status(7) is Status.FAILED


def test_an_unknown_name_of_an_error_is_a_failed_transfer():
    core = core_with()
    offered(core)
    assert core.handle("p0", Abort(7, 1, "?", "SystemExit"), 1.0)[0].error is TransferFailed


def test_rows_are_never_released_by_time_but_by_a_fence():
    core = core_with()
    offered(core)
    core.abort(7, "enough", 1.0)
    core.handle("p0", AbortAck(7, 1, 0, drained=True), 2.0)
    assert core.next_deadline() == 6.0
    (fence,) = core.tick(6.0)
    assert isinstance(fence, FencePeer)
    assert fence.peer == "p1"
    assert "part 1 did not confirm within 5 s" in fence.reason
    assert core.next_deadline() is None
    for later in (100.0, 1e6):
        assert core.tick(later) == []
        assert not core.rows_released(7)
    assert core.peer_lost("p1", "cut off", 1e6) == []
    assert not core.rows_released(7)
    assert core.peer_fenced("p1", 1e6) == [RowsReleased(7)]
    core.close(7, 1e6)
    assert core.table_sizes() == {"peers": 1, "rooms": 0, "timers": 0, "rooms_of_peers": 0}


def test_a_silent_peer_is_cut_off_once_for_all_of_its_rooms():
    core = core_with()
    for room in (7, 8):
        offered(core, room)
        core.abort(room, "enough", 1.0)
    assert [action.peer for action in core.tick(6.0)] == ["p0", "p1"]


def test_a_room_that_was_not_offered_fails_without_holding_rows():
    core = core_with()
    core.open(7, ("p0", "p1"), 0.0)
    actions = core.abort(7, "enough", 1.0)
    assert actions == [
        RoomChanged(7, Status.FAILED, "enough", TransferAborted),
        Send("p0", Abort(7, 1, "enough", "TransferAborted", offered=False)),
        Send("p1", Abort(7, 1, "enough", "TransferAborted", offered=False)),
        RowsReleased(7),
    ]
    assert core.offer(7, ROWS, 32, 2.0) == []
    assert core.rows_released(7)


def test_a_lost_peer_fails_the_rooms_that_need_it_at_once():
    core = core_with(parts=(0, 1), of=3)
    everyone = ("p0", "p1", "p2")
    for room in (7, 8, 9):
        offered(core, room, everyone)
    core.handle("p1", Done(8, 2, 1), 1.0)
    core.open(10, everyone, 1.0)
    actions = core.peer_lost("p1", "connection reset", 2.0)
    changed = {action.room: action for action in actions if isinstance(action, RoomChanged)}
    # Room 8 has its part already.
    assert sorted(changed) == [7, 9, 10]
    assert changed[7].error is PeerLost
    assert changed[7].reason == "part 1 was lost: connection reset"
    assert [action for action in actions if isinstance(action, RowsReleased)] == [RowsReleased(10)]
    assert "p1" not in {action.peer for action in actions if isinstance(action, Send)}
    assert core.handle("p1", AbortAck(7, 1, 1, drained=True), 2.0) == []
    core.handle("p0", Done(8, 2, 0), 3.0)
    assert core.status(8) is Status.SUCCESS
    core.handle("p0", AbortAck(7, 1, 0, drained=True), 3.0)
    assert not core.rows_released(7)
    assert RowsReleased(7) in core.peer_fenced("p1", 4.0)
    assert core.peer_fenced("p1", 4.0) == []
    # A peer that sends nothing is not missed.
    assert core.peer_lost("p2", "gone", 5.0) == []


def test_a_room_with_an_absent_peer_fails_at_once():
    core = core_with()
    core.peer_lost("p1", "gone", 0.0)
    changed, released = core.open(7, ("p0", "p1"), 1.0)
    assert (changed.status, changed.error) == (Status.FAILED, PeerLost)
    assert released == RowsReleased(7)
    assert core.offer(7, ROWS, 32, 1.0) == []
    core.close(7, 2.0)
    assert core.table_sizes() == {"peers": 1, "rooms": 0, "timers": 0, "rooms_of_peers": 0}


def test_deadlines_name_what_is_waited_for():
    core = core_with()
    core.open(7, ("p0", "p1"), 0.0)
    assert core.next_deadline() == 30.0
    assert core.tick(29.0) == []
    changed = core.tick(30.0)[0]
    assert changed.error is DeadlineExceeded
    assert "did not offer its rows within 30 s" in changed.reason
    offered(core, 8, now=100.0)
    assert core.next_deadline() == 120.0
    core.handle("p0", Done(8, 2, 0), 115.0)
    assert core.tick(120.0) == []
    assert "still missing: part 1" in core.tick(135.0)[0].reason
    assert core.next_deadline() == 140.0


def test_content_that_does_not_fit_fails_the_room():
    core = core_with(inspect=lambda room, done: f"aux of {len(done.aux)} bytes, 8 expected" if done.aux else "")
    offered(core)
    core.handle("p1", Done(7, 1, 1), 1.0)
    changed = core.handle("p0", Done(7, 1, 0, aux=b"short"), 1.0)[0]
    assert changed == RoomChanged(7, Status.FAILED, "part 0: aux of 5 bytes, 8 expected")
    # Both parts have ended all the same.
    assert core.rows_released(7)


def test_an_inspection_that_breaks_fails_the_room_and_nothing_else():
    core = core_with(inspect=lambda room, done: str(1 // 0))
    offered(core)
    assert "ZeroDivisionError" in core.handle("p0", Done(7, 1, 0), 1.0)[0].reason


def test_misuse_by_the_engine_is_named():
    core = core_with()
    with pytest.raises(RoomError, match="7 is not open"):
        core.offer(7, ROWS, 32, 0.0)
    core.open(7, ("p0", "p1"), 0.0)
    with pytest.raises(RoomError, match="7 is in use"):
        core.open(7, ("p0", "p1"), 0.0)
    for rows, tokens, prefix in (({"kv": Rows(bytes(9))}, 32, 0), ({"kv": Rows(b"\xff" * 8)}, 32, 0), (ROWS, 32, 33)):
        with pytest.raises(RowsError, match="receiver"):
            core.offer(7, rows, tokens, 0.0, prefix=prefix)
    core.offer(7, ROWS, 32, 0.0)
    with pytest.raises(RoomError, match="7 was offered already"):
        core.offer(7, ROWS, 32, 0.0)


@pytest.mark.parametrize(
    ("answers", "peers", "text"),
    [
        ([(0, (0, 1)), (1, (0, 1))], ("p0",), r"\[0, 1\] send, its peers are parts \[0\]"),
        ([(0, (0,)), (1, (0, 1))], ("p0", "p1"), "do not agree"),
        ([(0, (0,)), (0, (0,))], ("p0", "p1"), r"parts \[0, 0\]"),
        ([], (), "parts"),
    ],
)
def test_peers_that_are_not_one_grid(answers, peers, text):
    core = DecodeCore(LIMITS)
    for number, (part, parts) in enumerate(answers):
        core.peer_joined(f"p{number}", part, parts)
    with pytest.raises(RoomError, match=text):
        core.open(7, peers, 0.0)
    assert core.table_sizes()["rooms"] == 0


def test_a_closed_room_still_drains_and_its_number_is_taken_until_then():
    core = core_with()
    offered(core)
    core.close(7, 1.0)
    assert core.status(7) is Status.FAILED
    assert not core.rows_released(7)
    with pytest.raises(RoomError, match="rows are not released"):
        core.open(7, ("p0", "p1"), 1.0)
    with pytest.raises(RoomError, match="not open"):
        core.offer(7, ROWS, 32, 1.0)
    core.handle("p0", AbortAck(7, 1, 0, drained=True), 2.0)
    assert core.handle("p1", AbortAck(7, 1, 1, drained=True), 2.0) == [RowsReleased(7)]
    core.open(7, ("p0", "p1"), 3.0)
    # An answer to the first life does not touch the second.
    core.offer(7, ROWS, 32, 3.0)
    assert core.handle("p0", Done(7, 1, 0), 3.0) == []
    assert core.unexpected == {"stale Done": 1}


def test_unknown_rooms_and_peers_never_raise():
    core = core_with()
    assert core.status(99) is Status.FAILED
    assert "99 is not open" in core.reason(99)
    assert core.rows_released(99)
    assert core.abort(99, "?", 0.0) == core.close(99, 0.0) == []
    assert core.peer_lost("p9", "?", 0.0) == core.peer_fenced("p9", 0.0) == []
    assert core.handle("p0", Ping(3), 0.0) == [Send("p0", Pong(3))]
    assert core.handle("p0", Pong(3), 0.0) == []


def test_a_second_handshake_on_one_connection_must_agree():
    core = core_with()
    assert core.peer_joined("p0", 0, (0, 1)) == []
    with pytest.raises(HandshakeError, match="part 1"):
        core.peer_joined("p0", 1, (0, 1))


def test_ten_replaced_peers_leave_nothing_behind():
    core = DecodeCore(LIMITS)
    for number in range(10):
        peer = f"out:{number}"
        core.peer_joined(peer, 0, (0,))
        core.open(1, (peer,), 0.0)
        core.offer(1, ROWS, 32, 0.0)
        core.peer_lost(peer, "replaced", 1.0)
        assert core.status(1) is Status.FAILED
        assert core.peer_fenced(peer, 2.0) == [RowsReleased(1)]
        core.close(1, 2.0)
        assert not any(core.table_sizes().values())
