"""Connections that break, and peers that are silent: rooms fail in time, and rows come back behind a fence."""

import dataclasses
import uuid

import pytest
from rank_world import FAST, World, succeeded, wait, wait_released
from room_pairs import KV, Gate, SlowRegistry, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors
from kvbaton.transport.loopback import LoopbackTransport


class TestConnections:
    def test_the_data_connection_breaks_and_the_control_connection_stays(self):
        """Rooms in flight fail; the next one finds a new connection by itself."""
        world = World("tcp")
        try:
            source, destination = pair(world)
            hand_over(source, destination)
            receiver = destination.manager._transports["tcp"]._receiver
            for connection in list(receiver._connections):
                connection.cut_off()
            wait(lambda: receiver.connections == 0)
            sender, refused = start(source, destination, 1)
            sender.finish({"kv": [0, 1]}, (0, 8))
            failed(sender)
            failed(refused)
            wait_released(sender, refused)
            sender.close()
            refused.close()
            hand_over(source, destination, 2)
            world.assert_empty()
            assert source.manager._control.faults == destination.manager._control.faults == 0
        finally:
            world.close()

    @pytest.mark.parametrize("transport", ["loopback", "tcp"])
    @pytest.mark.parametrize("in_flight", [False, True])
    def test_the_control_connection_breaks_and_both_sides_live(self, transport, in_flight):
        """A network that was away for a while: a writer that was fenced may come back."""
        world = World(transport)
        try:
            source, destination = pair(world)
            hand_over(source, destination)
            rooms = start(source, destination, 1) if in_flight else ()
            for room in rooms:
                wait(lambda room=room: room.poll() is kb.Status.TRANSFERRING)
            control = destination.manager._control
            control.post(lambda: control._lost(next(iter(control._dialled)), "the network was away"))
            for room in rooms:
                failed(room)
            wait_released(*rooms)
            for room in rooms:
                room.close()
            for room in (2, 3):
                hand_over(source, destination, room)
            world.assert_empty()
            destination.check_rest()
        finally:
            world.close()

    def test_a_newer_connection_of_an_instance_that_was_fenced_is_not_used_any_more(self, world):
        """The fence of the older one holds for both: the next room must not find that out by its first write."""
        source, destination = pair(world)
        hand_over(source, destination)
        rooms = start(source, destination, 1)
        wait(lambda: rooms[1].poll() is kb.Status.TRANSFERRING)
        sources, control = destination.manager.side._sources, destination.manager._control
        (older,) = sources._source_of_peer
        control.post(lambda: sources._retire(sources._source_of_peer[older]))
        receiver, sender = destination.manager.receiver(2), source.manager.sender(2)
        receiver.offer({"kv": [6, 7]}, 8)
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        destination.check("kv", [6, 7], (0, 8))
        assert len(sources._source_of_peer) == 2
        control.post(lambda: sources.cut_off(older, "it does not confirm"))
        for room in rooms:
            failed(room)
        wait_released(*rooms)
        for room in (*rooms, sender, receiver):
            room.close()
        hand_over(source, destination, 3)
        world.assert_empty()
        destination.check_rest()


class TestDeadlines:
    def options(self, **limits):
        return {"settings": dataclasses.replace(FAST, deadlines=kb.Deadlines(**limits))}

    def test_nobody_offers(self, world):
        source, _ = pair(world, **self.options(offer_wait=0.1))
        sender = source.manager.sender(0)
        failed(sender, "0.1 s", error=errors.DeadlineExceeded)
        wait_released(sender)

    def test_the_engine_never_offers(self, world):
        _, destination = pair(world, **self.options(offer_wait=0.1))
        receiver = destination.manager.receiver(0)
        failed(receiver, "did not offer", "0.1 s", error=errors.DeadlineExceeded)
        wait_released(receiver)

    def test_nobody_finishes(self, world):
        source, destination = pair(world, **self.options(transfer=0.2))
        sender, receiver = start(source, destination)
        failed(sender, "0.2 s", error=errors.DeadlineExceeded)
        failed(receiver, "0.2 s", error=errors.DeadlineExceeded)
        wait_released(sender, receiver)

    def test_nobody_opens_the_room_at_prefill(self, world):
        _, destination = pair(world, **self.options(parked_seconds=0.2))
        receiver = destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5]}, 8)
        failed(receiver, "did not open room 0", error=errors.DeadlineExceeded)
        wait_released(receiver)

    def test_a_source_that_does_not_answer(self, world):
        """Something listens and is no prefill rank: the handshake's deadline ends it."""
        registry = SlowRegistry()
        settings = dataclasses.replace(FAST, handshake_seconds=0.2)
        (destination,) = world.decode(KV.layout(), registry=registry, settings=settings)
        receiver = destination.manager.receiver(0)
        failed(receiver, "0.2 s", "the registry", error=errors.DeadlineExceeded)
        registry.answer.set()
        wait_released(receiver)

    def test_a_sender_that_does_not_confirm_is_fenced(self, world):
        """Its writes are cut off: only then do the rows come back."""
        settings = dataclasses.replace(FAST, deadlines=kb.Deadlines(drain=0.2))
        gate = Gate()
        transport = LoopbackTransport(uuid.uuid4().hex, fail=gate)
        (source,) = world.prefill(KV.layout(), transports=[transport])
        (destination,) = world.decode(KV.layout(), settings=settings)
        source.fill("kv", [0, 1], (0, 8))
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        gate.wait_entered()
        receiver.abort()
        wait_released(receiver)
        gate.open()
        wait_released(sender)
        sender.close()
        receiver.close()
        destination.check_rest()
        world.assert_empty()
