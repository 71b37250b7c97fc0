"""Deliberate bugs in the real cores, each of which the search must find, by the shortest way."""

import functools
import re

import msgspec
import pytest

from kvbaton.check.search import Bounds, World, replay, search, shortest
from kvbaton.check.search.words import describe
from kvbaton.protocol import AbortAck, DecodeCore, PrefillCore, RoomChanged, RowsReleased, Send, Status
from kvbaton.protocol.decode_room import DecodeRoom
from kvbaton.protocol.epochs import SeenEpochs
from kvbaton.protocol.prefill_peer import PrefillPeer

ONE_PART = Bounds(prefills=1)
TWO_PARTS = Bounds(prefills=2, prompt=True)
LIVES = Bounds(prefills=1, rooms=(7, 7), prompt=True, repeats=1)
NO_ABORTS = Bounds(prefills=1, prompt=True, aborts=0, faults=1)
DEATH = Bounds(prefills=1, prompt=True, faults=1, fences=1)


def free_on_abort_without_drain(patch):
    patch.setattr(DecodeRoom, "unquiet", lambda self: [])


def ignore_epoch(patch):
    """A receiver believes a message of any life of the room number."""
    real = DecodeCore.handle

    def handle(self, peer, message, now):
        room = self._rooms.get(getattr(message, "room", None))
        if room is not None and peer in room.links:
            message = msgspec.structs.replace(message, epoch=room.links[peer].epoch)
        return real(self, peer, message, now)

    patch.setattr(DecodeCore, "handle", handle)


def count_parts_without_identity(patch):
    """A repeated Done counts once more."""
    real = DecodeCore._on_done

    def on_done(self, room, link, done, now):
        if not room.status.terminal:
            link.done = False
        return real(self, room, link, done, now)

    patch.setattr(DecodeCore, "_on_done", on_done)


def overwrite_terminal_state(patch):
    """An abort fails a room that has succeeded."""
    real = PrefillCore._fail

    def fail(self, room, failure, heard_by=""):
        if room.status is Status.SUCCESS:
            room.status = Status.FAILED
            return [RoomChanged(room.number, room.status, failure.reason)]
        return real(self, room, failure, heard_by)

    patch.setattr(PrefillCore, "_fail", fail)


def confirm_drained_under_a_write(patch):
    real = PrefillCore._on_abort

    def on_abort(self, peer, state, abort, now):
        actions = real(self, peer, state, abort, now)
        return [
            Send(action.peer, AbortAck(abort.room, abort.epoch, state.share.part, drained=True))
            if isinstance(action, Send) and isinstance(action.message, AbortAck)
            else action
            for action in actions
        ]

    patch.setattr(PrefillCore, "_on_abort", on_abort)


def late_offer_starts_a_write_after_abort(patch):
    patch.setattr(PrefillPeer, "was_aborted_early", lambda self, epoch: False)


def a_repeated_offer_counts(patch):
    patch.setattr(SeenEpochs, "add", lambda self, epoch: True)


def drop_the_fence(patch):
    """A lost peer counts as one that writes no more."""
    real = DecodeCore.peer_lost

    def peer_lost(self, peer, reason, now):
        state = self._peers.get(peer)
        rooms = set() if state is None else set(state.rooms)
        for room in rooms:
            room.links[peer].drained = True
        actions = real(self, peer, reason, now)
        for room in sorted(rooms, key=lambda room: room.number):
            actions += self._release_if_quiet(room)
        return actions

    patch.setattr(DecodeCore, "peer_lost", peer_lost)


def done_before_the_last_write(patch):
    """A part is through as soon as it is finished, whatever is under way."""
    real = PrefillCore._advance

    def advance(self, room, destination):
        outstanding, destination.outstanding = destination.outstanding, 0
        actions = real(self, room, destination)
        destination.outstanding = outstanding
        return actions

    patch.setattr(PrefillCore, "_advance", advance)


def succeed_with_the_first_part(patch):
    real = DecodeCore._on_done

    def on_done(self, room, link, done, now):
        room.remaining = min(room.remaining, 1)
        return real(self, room, link, done, now)

    patch.setattr(DecodeCore, "_on_done", on_done)


def forget_to_confirm(patch):
    """The confirmation that was put off until the last write has ended is never sent."""
    patch.setattr(PrefillCore, "_settle", lambda self, room, destination: self._release_if_quiet(room))


def release_the_senders_rows_under_a_write(patch):
    def release(self, room):
        if room.released or not room.status.terminal:
            return []
        room.released = True
        self._forget_if_over(room)
        return [RowsReleased(room.number)]

    patch.setattr(PrefillCore, "_release_if_quiet", release)


def never_let_a_room_time_out(patch):
    real = PrefillCore.open

    def open_room(self, room, now):
        actions = real(self, room, now)
        self._timers.cancel(self._rooms[room])
        return actions

    patch.setattr(PrefillCore, "open", open_room)


def forget_no_room(patch):
    patch.setattr(DecodeCore, "_forget_if_over", lambda self, room: None)


MUTATIONS = [
    (free_on_abort_without_drain, ONE_PART, "given back"),
    (ignore_epoch, LIVES, "given back|succeeded"),
    (count_parts_without_identity, Bounds(prompt=True, deadlines="idle", repeats=1), "delivered|succeeded"),
    (overwrite_terminal_state, ONE_PART, "was in SUCCESS"),
    (confirm_drained_under_a_write, ONE_PART, "given back while a write"),
    (late_offer_starts_a_write_after_abort, ONE_PART, "given back while a write"),
    (a_repeated_offer_counts, LIVES, "given back while a write"),
    (drop_the_fence, DEATH, "given back"),
    (done_before_the_last_write, ONE_PART, "succeeded with"),
    (succeed_with_the_first_part, TWO_PARTS, "succeeded with"),
    (forget_to_confirm, ONE_PART, "never came back"),
    (release_the_senders_rows_under_a_write, ONE_PART, "released while they are read"),
    (never_let_a_room_time_out, NO_ABORTS, "has not ended"),
    (forget_no_room, ONE_PART, "tables are not empty"),
]


@functools.cache
def is_kept(bounds):
    """Whether the cores as they are keep every promise in such a world."""
    return search(World(bounds)).trace is None


@pytest.mark.parametrize(
    ("mutation", "bounds", "problem"), MUTATIONS, ids=[mutation[0].__name__ for mutation in MUTATIONS]
)
def test_the_search_finds(mutation, bounds, problem, monkeypatch):
    assert is_kept(bounds)
    mutation(monkeypatch)
    found = search(World(bounds))
    assert found.trace is not None, "the search looked at every state and found nothing"
    world = World(bounds)
    trace = shortest(world)
    assert trace is not None
    assert re.search(problem, trace.problem)
    print(f"\n{mutation.__name__}: {len(trace.choices)} events, then: {trace.problem}")
    for step in replay(world, trace.choices):
        print(f"  {describe(step.label, bounds)}")
    assert len(trace.choices) <= len(found.trace.choices)
