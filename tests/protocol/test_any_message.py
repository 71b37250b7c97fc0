"""Any message from any peer at any time: the cores never raise, and rooms of others are left alone."""

import contextlib

import hypothesis.strategies as st
from hypothesis import given, settings

from kvbaton.errors import RoomError, RowsError
from kvbaton.layout import PAGED, SLOT
from kvbaton.protocol import (
    Abort,
    AbortAck,
    ComponentNeed,
    Deadlines,
    DecodeCore,
    Done,
    Offer,
    PeerShare,
    Ping,
    Pong,
    PrefillCore,
    Refused,
    Rows,
    RowsReleased,
    StartWrite,
    Status,
    Welcome,
    rows_to_bytes,
)

LIMITS = Deadlines(offer_wait=30, transfer=20, drain=5, parked_offers=2, parked_seconds=10)
small = st.integers(0, 3)
epochs = st.integers(1, 4)
packed = st.sampled_from([b"", bytes(8), bytes(16), bytes(9), b"\xff" * 8])
rows = st.builds(Rows, packed, small)
messages = st.one_of(
    st.builds(
        Offer,
        room=small,
        epoch=epochs,
        tokens=st.sampled_from([0, 16, 2**40]),
        components=st.dictionaries(st.sampled_from(["kv", "gdn", "other"]), rows),
        prefix=st.sampled_from([0, 16, 17]),
        aux_row=st.integers(-1, 1),
    ),
    st.builds(Done, small, epochs, small, small, st.just({}), st.sampled_from([b"", b"aux"])),
    st.builds(
        Abort, small, epochs, st.just("why"), st.sampled_from(["PeerLost", "no such name"]), offered=st.booleans()
    ),
    st.builds(AbortAck, small, epochs, small, st.booleans()),
    st.builds(Ping, small),
    st.builds(Pong, small),
    st.just(Welcome("i", "t", b"", (0,))),
    st.just(Refused("i", "why")),
)
peers = st.sampled_from(["a", "b", "c", "nobody"])


class Watch:
    """Follows the actions of a core and holds it to its word."""

    def __init__(self, core):
        self.core = core
        self.tickets, self.ended = [], {}

    def see(self, actions):
        for action in actions:
            if isinstance(action, StartWrite):
                self.tickets.append(action.ticket)
            elif isinstance(action, RowsReleased):
                assert self.core.rows_released(action.room)
        for room in range(4):
            status = self.core.status(room)
            before = self.ended.get(room)
            assert before in (None, status)
            if status.terminal and room in self.core._rooms and not self.core._rooms[room].closed:
                self.ended[room] = status


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_prefill_core(data):
    core = PrefillCore(LIMITS)
    watch = Watch(core)
    needs = {"kv": ComponentNeed(PAGED), "gdn": ComponentNeed(SLOT)}
    for index, peer in enumerate("abc"):
        core.peer_joined(peer, PeerShare(needs, index % 2, 2, 0, True, True))
    now = 0.0
    for _ in range(data.draw(st.integers(0, 40))):
        now += data.draw(st.sampled_from([0.0, 0.0, 1.0, 11.0]))
        room = data.draw(small)
        step = data.draw(
            st.sampled_from(["message"] * 6 + ["open", "submit", "finish", "written", "close", "tick", "lost"])
        )
        with contextlib.suppress(RoomError, RowsError):
            if step == "open":
                watch.see(core.open(room, now))
            elif step == "submit":
                watch.see(core.submit(room, 1, {"kv": (0, 8)}, now))
            elif step == "finish":
                watch.see(core.finish(room, 2, 16, {"kv": (8, 16)}, {"gdn"}, True, now))
        if step == "message":
            watch.see(core.handle(data.draw(peers), data.draw(messages), now))
        elif step == "written":
            ticket = watch.tickets.pop() if watch.tickets else 99
            watch.see(core.written(ticket, data.draw(st.sampled_from(["", "broken"])), now))
        elif step == "close":
            watch.ended.pop(room, None)
            watch.see(core.close(room, now))
        elif step == "tick":
            watch.see(core.tick(now))
        elif step == "lost":
            watch.see(core.peer_lost(data.draw(peers), "gone", now))
    watch.see(core.tick(now + 1000))
    for room in range(4):
        assert core.status(room).terminal
        watch.ended.pop(room, None)
        watch.see(core.close(room, now))
    for ticket in watch.tickets:
        core.written(ticket, "late", now)
    for peer in "abc":
        core.peer_lost(peer, "gone", now)
    core.tick(now + 2000)
    assert not any(core.table_sizes().values())
    assert core.next_deadline() is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_decode_core(data):
    core = DecodeCore(LIMITS)
    watch = Watch(core)
    for part, peer in enumerate("abc"):
        core.peer_joined(peer, part, (0, 1))
    now = 0.0
    for _ in range(data.draw(st.integers(0, 40))):
        now += data.draw(st.sampled_from([0.0, 0.0, 1.0, 11.0]))
        room = data.draw(small)
        step = data.draw(
            st.sampled_from(["message"] * 6 + ["open", "offer", "abort", "close", "tick", "lost", "fenced"])
        )
        with contextlib.suppress(RoomError, RowsError):
            if step == "open":
                watch.see(core.open(room, "abc", now))
            elif step == "offer":
                watch.see(core.offer(room, {"kv": Rows(data.draw(packed))}, 16, now))
        if step == "message":
            watch.see(core.handle(data.draw(peers), data.draw(messages), now))
        elif step == "abort":
            watch.see(core.abort(room, "asked for", now))
        elif step == "close":
            watch.ended.pop(room, None)
            watch.see(core.close(room, now))
        elif step == "tick":
            watch.see(core.tick(now))
        elif step == "lost":
            watch.see(core.peer_lost(data.draw(peers), "gone", now))
        elif step == "fenced":
            watch.see(core.peer_fenced(data.draw(peers), now))
    watch.see(core.tick(now + 1000))
    for room in range(4):
        assert core.status(room).terminal
        watch.ended.pop(room, None)
        watch.see(core.close(room, now))
    for peer in "abc":
        core.peer_fenced(peer, now)
    assert not any(core.table_sizes().values())
    assert core.next_deadline() is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["c", "nobody"]), messages), max_size=20))
def test_a_room_between_others_succeeds_whatever_strangers_say(noise):
    decode, prefill = DecodeCore(LIMITS), PrefillCore(LIMITS)
    decode.peer_joined("a", 0, (0,))
    decode.peer_joined("c", 1, (1,))
    prefill.peer_joined("a", PeerShare({"kv": ComponentNeed(PAGED)}, 0, 1, 0, True))
    prefill.peer_joined("c", PeerShare({"kv": ComponentNeed(PAGED)}, 0, 1, 0, True))
    decode.open(1, ("a",), 0.0)
    decode.offer(1, {"kv": Rows(rows_to_bytes([5]))}, 16, 0.0)
    prefill.open(1, 0.0)
    prefill.handle("a", Offer(1, 1, 16, {"kv": Rows(rows_to_bytes([5]))}), 0.0)
    for peer, message in noise:
        decode.handle(peer, message, 0.0)
        prefill.handle(peer, message, 0.0)
    (write,) = prefill.finish(1, 1, 16, {"kv": (0, 16)}, (), False, 0.0)
    done = prefill.written(write.ticket, "", 0.0)[0].done
    assert prefill.status(1) is Status.SUCCESS
    decode.handle("a", done, 0.0)
    assert decode.status(1) is Status.SUCCESS
