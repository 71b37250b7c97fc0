"""Faults that real systems had, as whole runs of a prefill and a decode core over a perfect wire."""

import random
from collections import deque

import msgspec
import pytest

from kvbaton.errors import RoomError
from kvbaton.layout import PAGED, SLOT
from kvbaton.protocol import (
    Abort,
    AbortAck,
    ComponentNeed,
    Deadlines,
    DecodeCore,
    Deliver,
    Done,
    FencePeer,
    PeerShare,
    PrefillCore,
    Rows,
    Send,
    SendDone,
    StartWrite,
    Status,
    decode,
    encode,
    rows_to_bytes,
)

LIMITS = Deadlines(offer_wait=30, transfer=20, drain=5)
STATE = ComponentNeed(SLOT)


class Pair:
    """``sources`` prefill cores and one decode core. Writes end when the test says so."""

    def __init__(self, components, sources=1):
        self.now = 0.0
        self.decode = DecodeCore(LIMITS)
        self.prefills = [PrefillCore(LIMITS) for _ in range(sources)]
        self.writes, self.delivered, self.acks, self.fences = [], [], [], []
        parts = tuple(range(sources)) if components else (0,)
        self.peers = tuple(f"p{part}" for part in range(sources))
        for part, core in enumerate(self.prefills):
            core.peer_joined("d", PeerShare(components, 0, 1, part, part in parts, carries_aux=part == 0))
            self.decode.peer_joined(f"p{part}", part, parts)

    def run(self, part, actions):
        """Carry out actions of prefill core ``part``, or of the decode core if it is None, and all that follows."""
        queue = deque((part, action) for action in actions)
        while queue:
            part, action = queue.popleft()
            if isinstance(action, SendDone):
                action = Send(action.peer, msgspec.structs.replace(action.done, aux=b"aux" if action.aux else b""))
            if isinstance(action, Send):
                (message,) = decode(encode(action.message))
                if part is None:
                    part = int(action.peer[1:])
                    queue.extend((part, more) for more in self.prefills[part].handle("d", message, self.now))
                else:
                    self.acks += [message] if isinstance(message, AbortAck) else []
                    queue.extend((None, more) for more in self.decode.handle(self.peers[part], message, self.now))
            elif isinstance(action, StartWrite):
                self.writes.append((part, action))
            elif isinstance(action, Deliver):
                self.delivered.append((action.part, action.done.aux))
            elif isinstance(action, FencePeer):
                self.fences.append(action.peer)

    def open(self, room=7):
        self.run(None, self.decode.open(room, self.peers, self.now))
        for part, core in enumerate(self.prefills):
            self.run(part, core.open(room, self.now))

    def offer(self, room=7, names=("kv",), tokens=32, **more):
        rows = {name: Rows(rows_to_bytes([1, 2])) for name in names}
        self.run(None, self.decode.offer(room, rows, tokens, self.now, aux_row=0, **more))

    def finish(self, room=7, part=0, tokens=32, slots=()):
        self.run(part, self.prefills[part].finish(room, 1, tokens, {"kv": (0, tokens)}, slots, True, self.now))

    def written(self, index):
        part, write = self.writes[index]
        self.run(part, self.prefills[part].written(write.ticket, "", self.now))

    def statuses(self, room=7):
        return [core.status(room) for core in (*self.prefills, self.decode)]

    def close(self, room=7):
        for part, core in enumerate(self.prefills):
            self.run(part, core.close(room, self.now))
        self.run(None, self.decode.close(room, self.now))

    def nothing_left(self):
        sizes = [core.table_sizes() for core in (*self.prefills, self.decode)]
        return not any(value for size in sizes for name, value in size.items() if name != "peers")


# D05: nothing to send must still complete.


@pytest.mark.parametrize(
    ("components", "offered", "prefix", "writes"),
    [
        pytest.param({"kv": ComponentNeed(PAGED)}, {"kv": [1, 2]}, 0, 1, id="state is None"),
        pytest.param({"kv": ComponentNeed(PAGED)}, {"kv": [1, 2]}, 0, 1, id="state is []"),
        pytest.param(
            {"kv": ComponentNeed(PAGED), "a": STATE, "b": STATE},
            {"kv": [1, 2], "a": [], "b": []},
            0,
            1,
            id="state is [[], []]",
        ),
        # A component without bytes moves nothing, so it is in no share; the receiver offers its rows all the same.
        pytest.param({"kv": ComponentNeed(PAGED)}, {"kv": [1, 2], "empty": [5]}, 0, 1, id="a buffer of length 0"),
        pytest.param({"kv": ComponentNeed(PAGED)}, {"kv": []}, 32, 0, id="0 pages, the whole prompt is there"),
        pytest.param({}, {}, 0, 0, id="nothing in common at all"),
    ],
)
@pytest.mark.parametrize("offer_first", [True, False])
def test_nothing_to_send_still_completes(components, offered, prefix, writes, offer_first):
    pair = Pair(components, sources=2)
    pair.open()
    rows = {name: Rows(rows_to_bytes(each)) for name, each in offered.items()}

    def offer():
        pair.run(None, pair.decode.offer(7, rows, 32, 0.0, prefix=prefix, aux_row=0))

    def finish():
        for part in (0, 1):
            pair.finish(part=part, slots={"a", "b"})

    for step in (offer, finish) if offer_first else (finish, offer):
        step()
    assert len(pair.writes) == 2 * writes
    for part, write in pair.writes:
        assert write.slots == ()
        assert all(first < last for first, last in write.pieces.values())
        pair.run(part, pair.prefills[part].written(write.ticket, "", 1.0))
    assert pair.statuses() == [Status.SUCCESS] * 3
    assert sorted(pair.delivered) == ([(0, b"aux"), (1, b"")] if components else [(0, b"aux")])
    pair.close()
    assert pair.nothing_left()


# D06: several components from several ranks.


def test_success_comes_with_the_seventh_delivery_and_not_before():
    names = ("c0", "c1", "c2")
    pair = Pair(dict.fromkeys(names, ComponentNeed(PAGED)), sources=2)
    pair.open()
    pair.offer(names=names)
    for part, core in enumerate(pair.prefills):
        for number, name in enumerate(names):
            pair.run(part, core.submit(7, number, {name: (0, 32)}, 0.0))
        pair.run(part, core.finish(7, 3, 32, {}, (), True, 0.0))
    by_name = {(part, *write.pieces): index for index, (part, write) in enumerate(pair.writes)}
    assert len(by_name) == 6
    for delivery in ((0, "c1"), (1, "c1"), (0, "c0"), (0, "c1"), (1, "c2"), (0, "c2")):
        pair.written(by_name[delivery])
        assert pair.decode.status(7) is Status.TRANSFERRING
    assert pair.prefills[0].unexpected == {"unknown ticket": 1}
    pair.written(by_name[1, "c0"])
    assert pair.statuses() == [Status.SUCCESS] * 3


def test_parts_of_nobody_do_not_bring_success_nearer():
    pair = Pair({"c0": STATE}, sources=2)
    pair.open()
    pair.offer(names=("c0",))
    for peer, part in ((0, 0), (0, 0), (0, 1), (1, 2), (1, 3)):
        pair.run(None, pair.decode.handle(f"p{peer}", Done(7, 1, part), 1.0))
        assert pair.decode.status(7) is Status.TRANSFERRING
    assert pair.decode.unexpected == {"repeated Done": 1, "Done of an unexpected part": 3}
    pair.run(None, pair.decode.handle("p1", Done(7, 1, 1), 1.0))
    assert pair.decode.status(7) is Status.SUCCESS


# D07: abort after success, and abort twice.


def test_abort_after_success_changes_nothing_and_is_acknowledged_each_time():
    pair = Pair({"kv": ComponentNeed(PAGED)})
    pair.open(41)
    pair.offer(41)
    pair.finish(41)
    pair.written(0)
    for room in (41, 41, 99):
        before = len(pair.acks)
        pair.run(0, pair.prefills[0].handle("d", Abort(room, 1, "late", offered=True), 2.0))
        assert pair.acks[before:] == [AbortAck(room, 1, 0, drained=True)]
        pair.run(None, pair.decode.handle("p0", Abort(room, 1, "late"), 2.0))
        assert pair.statuses(41) == [Status.SUCCESS] * 2
        assert pair.decode.abort(41, "late", 2.0) == pair.prefills[0].abort(41, "late", 2.0) == []
        assert pair.decode.reason(41) == pair.prefills[0].reason(41) == ""
    pair.close(41)
    assert pair.nothing_left()
    pair.open(41)
    assert pair.statuses(41) == [Status.WAITING] * 2
    pair.offer(41)
    pair.finish(41)
    pair.written(1)
    assert pair.statuses(41) == [Status.SUCCESS] * 2
    pair.close(41)
    assert pair.nothing_left()


# D08: abort while the write is still in flight.


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_rows_come_back_only_when_the_write_has_ended(side):
    pair = Pair({"kv": ComponentNeed(PAGED)})
    free = set(range(1, 14)) | set(range(45, 48))
    pair.open()
    pair.offer()
    pair.finish()
    pair.now = 2.5
    if side == "decode":
        pair.run(None, pair.decode.abort(7, "the client left", pair.now))
    else:
        pair.run(0, pair.prefills[0].abort(7, "the client left", pair.now))
    assert pair.statuses() == [Status.FAILED] * 2
    for pair.now in (2.6, 5.0, 5.9):
        free |= set(range(14, 45)) if pair.decode.rows_released(7) else set()
        assert len(free) == 16
        pair.run(None, pair.decode.tick(pair.now))
    pair.now = 6.0
    pair.written(0)
    assert pair.decode.rows_released(7)
    assert pair.prefills[0].rows_released(7)
    assert pair.statuses() == [Status.FAILED] * 2
    pair.close()
    assert pair.nothing_left()


def test_rows_come_back_at_once_when_nothing_was_posted():
    pair = Pair({"kv": ComponentNeed(PAGED)})
    pair.open()
    pair.offer()
    pair.run(None, pair.decode.abort(7, "the client left", 1.0))
    assert pair.decode.rows_released(7)
    assert pair.statuses() == [Status.FAILED] * 2
    assert pair.acks == [AbortAck(7, 1, 0, drained=True)]


def test_a_peer_that_never_confirms_is_cut_off_first():
    pair = Pair({"kv": ComponentNeed(PAGED)})
    pair.open()
    pair.offer()
    pair.finish()
    pair.run(None, pair.decode.abort(7, "the client left", 2.5))
    pair.run(None, pair.decode.tick(1000.0))
    assert pair.fences == ["p0"]
    assert not pair.decode.rows_released(7)
    pair.run(None, pair.decode.peer_lost("p0", "cut off", 1000.0))
    assert not pair.decode.rows_released(7)
    pair.run(None, pair.decode.peer_fenced("p0", 1001.0))
    assert pair.decode.rows_released(7)


# D09: a room that is already in use.


def test_a_second_user_of_a_room_is_rejected_and_the_first_is_untouched():
    pair = Pair({"kv": ComponentNeed(PAGED)})
    pair.open()
    pair.offer()
    for second in (lambda: pair.prefills[0].open(7, 0.0), lambda: pair.decode.open(7, pair.peers, 0.0)):
        with pytest.raises(RoomError, match="room 7 is in use"):
            second()
    pair.finish()
    pair.written(0)
    assert pair.statuses() == [Status.SUCCESS] * 2
    pair.close()
    assert pair.statuses() == [Status.FAILED] * 2
    pair.open()
    assert pair.statuses() == [Status.WAITING] * 2


def test_a_thousand_interleavings_never_raise():
    outcomes = set()
    for seed in range(1000):
        chance = random.Random(seed)
        pair = Pair({"kv": ComponentNeed(PAGED)})
        in_use, finished = set(), set()
        for _ in range(25):
            room = chance.randrange(3)
            step = chance.choice(["create", "finish", "write", "abort", "clear", "poll"])
            if step == "create":
                if room in in_use or not (pair.decode.rows_released(room) and pair.prefills[0].rows_released(room)):
                    with pytest.raises(RoomError):
                        pair.open(room)
                else:
                    in_use.add(room)
                    pair.open(room)
                    pair.offer(room)
            elif step == "finish" and room in in_use:
                if room in finished:
                    with pytest.raises(RoomError, match="finished"):
                        pair.finish(room)
                elif not pair.prefills[0].status(room).terminal:
                    finished.add(room)
                    pair.finish(room)
            elif step == "write" and pair.writes:
                part, write = pair.writes.pop(chance.randrange(len(pair.writes)))
                pair.run(part, pair.prefills[part].written(write.ticket, "", 0.0))
            elif step == "abort":
                pair.run(None, pair.decode.abort(room, "asked for", 0.0))
            elif step == "clear":
                pair.close(room)
                in_use.discard(room)
                finished.discard(room)
            outcomes.update(pair.statuses(room))
        for room in range(3):
            pair.close(room)
        for part, write in pair.writes:
            pair.run(part, pair.prefills[part].written(write.ticket, "", 0.0))
        assert pair.nothing_left(), f"seed {seed}"
    assert outcomes == {Status.TRANSFERRING, Status.SUCCESS, Status.FAILED}


# D15: a peer is replaced.


def test_a_replaced_prefill_rank_serves_the_next_rooms():
    pair = Pair({"kv": ComponentNeed(PAGED)})
    pair.open(1)
    pair.offer(1)
    pair.finish(1)
    pair.written(0)
    assert pair.statuses(1) == [Status.SUCCESS] * 2
    pair.open(2)
    pair.offer(2)
    pair.run(None, pair.decode.peer_lost("p0", "replaced", 1.0))
    pair.run(None, pair.decode.peer_fenced("p0", 1.0))
    assert pair.decode.status(2) is Status.FAILED
    for room in (1, 2):
        pair.run(None, pair.decode.close(room, 1.0))
    assert not any(pair.decode.table_sizes().values())
    # The new instance has a new key, and knows nothing of the old one's rooms.
    pair.peers = ("q0",)
    pair.prefills[0] = PrefillCore(LIMITS)
    pair.prefills[0].peer_joined("d", PeerShare({"kv": ComponentNeed(PAGED)}, 0, 1, 0, True, True))
    pair.decode.peer_joined("q0", 0, (0,))
    pair.open(3)
    pair.offer(3)
    pair.finish(3)
    pair.written(-1)
    assert pair.statuses(3) == [Status.SUCCESS] * 2
