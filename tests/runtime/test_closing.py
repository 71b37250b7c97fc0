"""Managers that close, and registries that go away, while rooms need them."""

import dataclasses
import threading

import pytest
from rank_world import FAST, wait, wait_over, wait_released
from room_pairs import KV, SlowRegistry, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors


class TestClosing:
    def test_prefill_with_rooms_that_wait(self, any_world):
        source, destination = pair(any_world)
        hand_over(source, destination)
        sender, receiver = start(source, destination)
        source.manager.close()
        failed(sender, "shut down", error=errors.TransferAborted)
        wait_over(receiver)
        assert receiver.poll() is kb.Status.FAILED
        assert receiver.reason
        with pytest.raises(errors.RoomError, match="closed"):
            source.manager.sender(1)

    def test_prefill_and_the_rows_come_back(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
        source.manager.close()
        failed(receiver)
        wait_released(receiver, sender)
        receiver.close()
        wait(lambda: not destination.manager.side._sources._current, "the end of the connection to be seen")
        failed(destination.manager.receiver(1), "default")

    def test_decode_with_rooms_that_wait(self, any_world):
        source, destination = pair(any_world)
        sender, receiver = start(source, destination)
        wait(lambda: sender.poll() is kb.Status.TRANSFERRING)
        destination.manager.close()
        failed(receiver, "shut down", error=errors.TransferAborted)
        failed(sender)
        wait_released(sender)
        (other,) = any_world.decode(KV.layout())
        hand_over(source, other, 1)

    def test_decode_during_the_look_up(self, world):
        """A room whose source is still looked up ends too, and none begins any more."""
        registry = SlowRegistry()
        (destination,) = world.decode(KV.layout(), registry=registry)
        receiver = destination.manager.receiver(0)
        assert registry.asked.wait(20)
        closer = threading.Thread(target=destination.manager.close)
        closer.start()
        failed(receiver, "shut down")
        with pytest.raises(errors.RoomError, match="room 1: the manager is closed"):
            destination.manager.side.open_room(1, "late", registry, 0)
        registry.answer.set()
        closer.join(20)
        assert not closer.is_alive()
        wait_released(receiver)

    def test_twice_and_without_any_use(self, any_world):
        source, destination = pair(any_world)
        for rank in (source, destination, source, destination):
            rank.manager.close()
        for rank in (source, destination):
            assert not rank.manager._control._thread.is_alive()
            rank.manager._control.wake()
            rank.manager._control.post(lambda: None)

    def test_the_registry_goes_away_for_a_while(self, world):
        registry = FlakyRegistry()
        settings = dataclasses.replace(FAST, registry_heartbeat_seconds=0.02)
        (source,) = world.prefill(KV.layout(), registry=registry, settings=settings)
        source.fill("kv", [0, 1], (0, 8))
        (destination,) = world.decode(KV.layout(), registry=registry)
        registry.down = True
        failed(destination.manager.receiver(0), "is down")
        registry.down = False
        registry.forget()
        wait(lambda: source.manager.instance in registry.known(), "the rank to register again")
        hand_over(source, destination, 1)

    def test_a_replaced_rank_does_not_come_back(self, world):
        registry = kb.MemoryRegistry()
        settings = dataclasses.replace(FAST, registry_heartbeat_seconds=0.02)
        (old,) = world.prefill(KV.layout(), registry=registry, settings=settings)
        (new,) = world.prefill(KV.layout(), registry=registry, settings=settings)
        wait(lambda: old.manager._membership.replaced, "the old rank to notice")
        assert [rank.instance for rank in registry.topology().ranks] == [new.manager.instance]
        new.manager.close()
        wait(lambda: registry.heartbeat(old.manager.instance), "the old rank to take its place again")


class FlakyRegistry(kb.MemoryRegistry):
    down = False

    def _check(self):
        if self.down:
            raise errors.RegistryError("the registry is down")

    def heartbeat(self, instance):
        self._check()
        return super().heartbeat(instance)

    def topology(self, deployment="default", dp_rank=None):
        self._check()
        return super().topology(deployment, dp_rank)

    def known(self):
        return list(self._table._instances)

    def forget(self):
        for instance in self.known():
            self.remove(instance)
