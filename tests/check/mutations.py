"""Deliberate bugs, each of which breaks a promise of the protocol or of the manager: the simulation must see them."""

from contextlib import contextmanager
from unittest import mock

import msgspec

from kvbaton.plan import Transfer
from kvbaton.protocol import AbortAck, Done, Status
from kvbaton.protocol.decode_core import DecodeCore
from kvbaton.protocol.decode_room import DecodeRoom
from kvbaton.protocol.parking import Parking
from kvbaton.protocol.prefill_core import PrefillCore
from kvbaton.runtime import decode as decode_side
from kvbaton.runtime.announcer import Announcer
from kvbaton.runtime.decode import DecodeSide
from kvbaton.runtime.destinations import Destinations
from kvbaton.runtime.fencing import LostPeers
from kvbaton.runtime.membership import Membership
from kvbaton.runtime.returning import Returning
from kvbaton.runtime.side import Side
from kvbaton.runtime.sources import Sources
from kvbaton.runtime.table import RoomTable
from kvbaton.runtime.writes import Writes

MUTATIONS = {}


def mutation(owner, name):
    """Register a function that gets the method ``name`` of ``owner`` and returns what takes its place."""

    def register(make):
        @contextmanager
        def applied():
            with mock.patch.object(owner, name, make(getattr(owner, name))):
                yield

        MUTATIONS[make.__name__] = applied
        return make

    return register


# Decode side.


@mutation(DecodeRoom, "unquiet")
def rows_are_freed_on_abort_without_waiting(original):
    return lambda self: []


@mutation(DecodeCore, "_on_ack")
def an_ack_without_drained_counts(original):
    def on_ack(self, room, link, ack):
        return original(self, room, link, msgspec.structs.replace(ack, drained=True))

    return on_ack


@mutation(DecodeCore, "handle")
def epochs_are_ignored_at_decode(original):
    def handle(self, peer, message, now):
        room = self._rooms.get(getattr(message, "room", None))
        link = room.links.get(peer) if room else None
        if link is not None and isinstance(message, (Done, AbortAck)):
            message = msgspec.structs.replace(message, epoch=link.epoch)
        return original(self, peer, message, now)

    return handle


@mutation(DecodeCore, "_on_done")
def parts_are_counted_without_identity(original):
    def on_done(self, room, link, done, now):
        if not room.status.terminal:
            link.done = False
        return original(self, room, link, done, now)

    return on_done


@mutation(DecodeCore, "_on_done")
def the_first_done_is_enough(original):
    def on_done(self, room, link, done, now):
        if not room.status.terminal:
            room.remaining = 1
        return original(self, room, link, done, now)

    return on_done


@mutation(DecodeCore, "peer_lost")
def rooms_of_a_lost_peer_go_on(original):
    def peer_lost(self, peer, reason, now):
        if peer in self._peers:
            self._peers[peer].lost = True
        return []

    return peer_lost


@mutation(DecodeCore, "_fail")
def a_terminal_state_is_overwritten(original):
    def fail(self, room, failure, now):
        if room.status is Status.SUCCESS:
            room.status = Status.TRANSFERRING
        return original(self, room, failure, now)

    return fail


@mutation(DecodeCore, "tick")
def decode_deadlines_never_come(original):
    return lambda self, now: []


@mutation(LostPeers, "_is_fenced")
def the_fence_is_dropped(original):
    return staticmethod(lambda lost: True)


@mutation(Sources, "_retire")
def the_source_of_a_replaced_instance_is_used_again(original):
    return lambda self, source: None


@mutation(Sources, "_tell_rooms")
def a_failed_source_tells_nobody(original):
    return lambda self, source: None


@mutation(Sources, "_hang_up_if_idle")
def connections_of_retired_sources_stay(original):
    return lambda self, source: None


@mutation(DecodeSide, "_deliver")
def aux_data_are_thrown_away(original):
    return lambda self, action: None


@mutation(decode_side, "compare")
def digests_are_ignored(original):
    return lambda found, done: None


# Both sides.


@mutation(RoomTable, "quiet")
def a_manager_closes_under_writes(original):
    return lambda self: True


@mutation(Side, "fail_all")
def rooms_go_on_when_their_manager_closes(original):
    return lambda self, reason: None


# Prefill side.


@mutation(PrefillCore, "_release_if_quiet")
def source_rows_are_freed_under_a_write(original):
    def release(self, room):
        before, room.outstanding = room.outstanding, 0
        try:
            return original(self, room)
        finally:
            room.outstanding = before

    return release


@mutation(PrefillCore, "_settle")
def an_abort_is_confirmed_under_a_write(original):
    def settle(self, room, destination):
        before, destination.outstanding = destination.outstanding, 0
        try:
            return original(self, room, destination)
        finally:
            destination.outstanding = before

    return settle


@mutation(PrefillCore, "_advance")
def done_is_sent_before_the_writes_end(original):
    def advance(self, room, destination):
        before, destination.outstanding = destination.outstanding, 0
        try:
            return original(self, room, destination)
        finally:
            destination.outstanding = before

    return advance


@mutation(Parking, "expired")
def parked_offers_never_expire(original):
    return lambda self, now: []


@mutation(Parking, "drop_peer")
def parked_offers_of_a_lost_peer_stay(original):
    return lambda self, peer: None


@mutation(Destinations, "give_up_if_dead")
def a_dead_data_connection_is_kept(original):
    return lambda self, peer, error: None


@mutation(Destinations, "_disconnect")
def nobody_disconnects(original):
    return lambda self, destination: None


@mutation(Destinations, "on_malformed")
def another_version_is_not_answered(original):
    return lambda self, peer, error: None


@mutation(Writes, "start")
def a_write_misses_its_last_unit(original):
    def start(self, action, destination, *others):
        def cut(each):
            return [Transfer(one.boxes, one.source_units[:-1], one.destination_units[:-1]) for one in each]

        plan = destination.plan
        bind = plan.bind
        with mock.patch.object(plan, "bind", lambda *given: cut(bind(*given))):
            return original(self, action, destination, *others)

    return start


# Registry, tables.


@mutation(Announcer, "start_over")
def rooms_are_not_announced_again(original):
    return lambda self: None


@mutation(Returning, "failed")
def nobody_waits_for_ranks_that_return(original):
    return lambda self, key, error, now, give_up: False


@mutation(Membership, "_register_again")
def a_rank_does_not_return_to_a_restarted_registry(original):
    return lambda self: None


@mutation(RoomTable, "remove_if_over")
def a_number_is_free_before_its_rows(original):
    def remove_if_over(self, entry):
        if entry.room.closed and self._entries.get(entry.room.room) is entry:
            del self._entries[entry.room.room]

    return remove_if_over
