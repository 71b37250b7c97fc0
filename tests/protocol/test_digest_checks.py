"""The decode core while digests are compared: a part counts when they are right, and rows stay until then."""

import pytest

from kvbaton.errors import DigestMismatch, RoomError
from kvbaton.protocol import (
    Abort,
    AbortAck,
    CheckDigests,
    Deadlines,
    DecodeCore,
    Deliver,
    Done,
    FencePeer,
    Offer,
    RoomChanged,
    Rows,
    RowsReleased,
    Send,
    Status,
    rows_to_bytes,
)
from kvbaton.protocol.failures import Failure

ROWS = {"kv": Rows(rows_to_bytes([3, 4]))}
WRONG = Failure(DigestMismatch, "component kv: 1, not 2")


def core_with(**options):
    core = DecodeCore(Deadlines(offer_wait=30, transfer=20, drain=5), **options)
    for part in range(2):
        core.peer_joined(f"p{part}", part, (0, 1))
    core.open(7, ("p0", "p1"), 0.0)
    actions = core.offer(7, ROWS, 32, 0.0, digest=True)
    assert Send("p0", Offer(7, 1, 32, ROWS, 0, -1, True)) in actions
    return core


def done(core, part):
    """The check that follows a Done, of which nothing else follows."""
    message = Done(7, 1, part, 2, {"kv": 5}, digests={"kv": bytes(8)})
    (check,) = core.handle(f"p{part}", message, 1.0)
    assert check == CheckDigests(f"p{part}", 7, 1, message)
    return check


def test_a_part_counts_when_it_is_right():
    core = core_with()
    first, second = done(core, 0), done(core, 1)
    assert core.status(7) is Status.TRANSFERRING
    assert core.checked(second, None, 2.0) == [Deliver(7, 1, second.done)]
    assert core.checked(first, None, 3.0) == [
        Deliver(7, 0, first.done),
        RoomChanged(7, Status.SUCCESS),
        RowsReleased(7),
    ]
    assert core.close(7, 4.0) == []
    assert core.table_sizes() == {"peers": 2, "rooms": 0, "timers": 0, "rooms_of_peers": 0}


def test_a_part_that_is_wrong_fails_the_room_and_every_peer_hears_of_it():
    core = core_with()
    actions = core.checked(done(core, 1), WRONG, 2.0)
    reason = "part 1: component kv: 1, not 2"
    abort = Abort(7, 1, reason, "DigestMismatch", offered=True)
    assert actions == [
        RoomChanged(7, Status.FAILED, reason, DigestMismatch),
        Send("p0", abort),
        Send("p1", abort),
    ]
    assert not core.rows_released(7)
    assert core.handle("p0", AbortAck(7, 1, 0, drained=True), 3.0) == [RowsReleased(7)]
    assert Failure.named("DigestMismatch", "").error is DigestMismatch


@pytest.mark.parametrize("result", [None, WRONG])
def test_rows_stay_until_they_are_not_read_any_more(result):
    core = core_with()
    first = done(core, 0)
    core.abort(7, "enough", 2.0)
    assert core.handle("p1", AbortAck(7, 1, 1, drained=True), 2.0) == []
    core.close(7, 3.0)
    with pytest.raises(RoomError, match="in use"):
        core.open(7, ("p0", "p1"), 3.0)
    assert [action for action in core.tick(100.0) if isinstance(action, FencePeer)] == []
    assert core.checked(first, result, 100.0) == [RowsReleased(7)]
    assert core.table_sizes() == {"peers": 2, "rooms": 0, "timers": 0, "rooms_of_peers": 0}


def test_a_peer_that_is_lost_after_its_done_is_not_missed():
    core = core_with()
    first, second = done(core, 0), done(core, 1)
    assert core.peer_lost("p0", "it ended", 2.0) == []
    assert not core.may_write("p0")
    core.checked(first, None, 3.0)
    core.checked(second, None, 3.0)
    assert core.status(7) is Status.SUCCESS
    assert core.table_sizes()["peers"] == 1


def test_a_result_counts_once():
    core = core_with()
    first = done(core, 0)
    core.checked(first, None, 2.0)
    assert core.checked(first, None, 2.0) == core.checked(first, WRONG, 2.0) == []
    assert core.handle("p0", first.done, 3.0) == []
    assert core.unexpected == {"result of an unknown check": 2, "repeated Done": 1}
    assert core.checked(CheckDigests("p0", 8, 1, first.done), None, 2.0) == []
    assert core.checked(CheckDigests("p9", 7, 1, first.done), None, 2.0) == []


def test_what_was_refused_at_sight_is_not_looked_at_closer():
    core = core_with(inspect=lambda room, done: "aux data are missing")
    actions = core.handle("p0", Done(7, 1, 0), 1.0)
    assert actions[0] == RoomChanged(7, Status.FAILED, "part 0: aux data are missing")
    assert not [action for action in actions if isinstance(action, CheckDigests)]


def test_the_deadline_names_what_is_being_compared():
    core = core_with()
    core.checked(done(core, 0), None, 1.0)
    check = done(core, 1)
    core.tick(100.0)
    assert core.reason(7) == "no progress for 20 s; still missing: part 1"
    assert not core.rows_released(7)
    assert core.checked(check, None, 101.0) == [RowsReleased(7)]
