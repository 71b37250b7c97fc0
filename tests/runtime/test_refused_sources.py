"""Sources that cannot be had: the registry, the handshake or the layouts stand against it, and the reason says how."""

import socket
import uuid

import msgspec
import pytest
from rank_world import Model, World, succeeded, wait, wait_released
from room_pairs import FULL, KV, failed, hand_over

import kvbaton as kb
from kvbaton import errors
from kvbaton.registry import Registration

REFUSALS = {
    "dtype": (KV, Model(("kv",), dtype="float16"), ("dtype", "bfloat16", "float16")),
    "head_dim": (KV, Model(("kv",), dim=6), ("dim", "4", "6")),
    "heads": (KV, Model(("kv",), heads=8), ("head", "4", "8")),
    "window": (Model(("window",)), Model(("window",), window=12), ("window", "10", "12")),
    "a missing layer": (Model(("kv",), layers=2), Model(("kv",), layers=3), ("layer 2", "kv")),
    "a missing component": (KV, FULL, ("conv",)),
    "conv channels": (
        Model(("conv",)),
        Model(("conv",), dtype="float32"),
        ("conv", "bfloat16", "float32"),
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSALS)
    def test_layouts_that_differ(self, world, name):
        """D11: found before any byte moves; both sides hear at once what differs, with both values."""
        here, there, words = REFUSALS[name]
        (source,) = world.prefill(here.layout())
        (destination,) = world.decode(there.layout())
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        failed(receiver, *words)
        failed(sender, "did not pass the handshake", *words)
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        destination.check_rest()
        world.assert_empty()
        world.assert_no_faults()
        assert not source.manager.side.rooms.entries()

    def test_models_that_differ(self, world):
        world.prefill(KV.layout(), model="one")
        (destination,) = world.decode(KV.layout(), model="other")
        failed(destination.manager.receiver(0), "'one'", "'other'")

    def test_a_rank_whose_layout_is_not_the_registered_one(self, world):
        """The prefill side has the last word: the registry's picture is stale."""
        (source,) = world.prefill(KV.layout())
        stale = Registration(source.manager.instance, source.manager.endpoint, KV.layout(rows=12), "")
        world.registry.register(stale)
        (destination,) = world.decode(KV.layout())
        sender = source.manager.sender(0)
        failed(destination.manager.receiver(0), "stale")
        failed(sender, "stale")

    def test_one_of_two_ranks_refuses(self, world):
        """The other one's connection is closed again, and a later room finds both in order."""
        first, second = world.prefill(*(KV.layout(rank, 2) for rank in range(2)))
        good = Registration(second.manager.instance, second.manager.endpoint, second.layout, "")
        bad = Registration(second.manager.instance, second.manager.endpoint, KV.layout(1, 2, rows=12), "")
        world.registry.register(bad)
        (destination,) = world.decode(KV.layout())
        senders = [rank.manager.sender(0) for rank in (first, second)]
        receiver = destination.manager.receiver(0)
        failed(receiver, "stale")
        for sender in senders:
            failed(sender, "stale")
            sender.close()
        receiver.close()
        for rank in (first, second, destination):
            wait(lambda rank=rank: rank.manager.side.core.table_sizes()["peers"] == 0, "peers to go")
        wait(
            lambda: not destination.manager.side._sources._source_of_peer and not destination.manager._control._dialled
        )
        world.registry.register(good)
        senders = [rank.manager.sender(1) for rank in (first, second)]
        receiver = destination.manager.receiver(1)
        receiver.offer({"kv": [4]}, 4)
        for rank, sender in zip((first, second), senders, strict=True):
            rank.fill("kv", [2], (0, 4))
            sender.finish({"kv": [2]}, (0, 4))
        succeeded(receiver, *senders)
        destination.check("kv", [4], (0, 4))
        destination.check_rest()

    def test_a_missing_rank(self, world):
        world.prefill(KV.layout(0, 2))
        (destination,) = world.decode(KV.layout())
        failed(destination.manager.receiver(0), "tp1/2")

    def test_nobody_is_registered(self, world):
        (destination,) = world.decode(KV.layout())
        receiver = destination.manager.receiver(0)
        failed(receiver, "default")
        receiver.close()
        (source,) = world.prefill(KV.layout())
        source.fill("kv", [0, 1], (0, 8))
        hand_over(source, destination)

    def test_a_registry_that_is_not_there(self, world):
        (destination,) = world.decode(KV.layout())
        receiver = destination.manager.receiver(0, source="http://127.0.0.1:9")
        failed(receiver, "http://127.0.0.1:9")
        wait_released(receiver)
        with pytest.raises(errors.RegistryError, match=r"127\.0\.0\.1:9"):
            kb.Manager(KV.layout(), [kb.Region.of(destination.memory)], role="prefill", registry="http://127.0.0.1:9")

    def test_nothing_answers_at_the_endpoint(self, world):
        world.registry.register(Registration("gone", "tcp://127.0.0.1:9", KV.layout(), ""))
        (destination,) = world.decode(KV.layout())
        failed(destination.manager.receiver(0), "127.0.0.1:9", error=errors.PeerLost)

    def test_the_name_of_its_host_is_not_known(self, world, monkeypatch):
        def getaddrinfo(host, *others, known=socket.getaddrinfo, **options):
            if host == "nowhere":
                raise socket.gaierror("nobody knows it")
            return known(host, *others, **options)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        world.registry.register(Registration("gone", "tcp://nowhere:9", KV.layout(), ""))
        (destination,) = world.decode(KV.layout())
        failed(destination.manager.receiver(0), "tcp://nowhere:9", "nobody knows it")

    def test_the_name_of_its_host_is_looked_up(self, world):
        (source,) = world.prefill(KV.layout())
        port = source.manager.endpoint.rpartition(":")[2]
        (destination,) = world.decode(KV.layout())
        named = Registration(source.manager.instance, f"tcp://localhost:{port}", KV.layout(), "")
        world.registry.register(named)
        sender, receiver = source.manager.sender(3), destination.manager.receiver(3)
        sender.finish({"kv": [0]}, (0, 4))
        receiver.offer({"kv": [0]}, 4)
        wait_released(receiver)
        assert receiver.poll() is kb.Status.SUCCESS

    def test_every_room_that_waits_is_told_where_one_rank_of_the_source_is_gone(self, world):
        """Also by those ranks that had joined: each room that waits there hears of it, not the first alone."""
        (source,) = world.prefill(KV.layout(0, 2))
        world.registry.register(Registration("gone", "tcp://127.0.0.1:9", KV.layout(1, 2), ""))
        (destination,) = world.decode(KV.layout())
        senders = [source.manager.sender(room) for room in range(4)]
        receivers = [destination.manager.receiver(room) for room in range(4)]
        for room in (*receivers, *senders):
            failed(room, "127.0.0.1:9", error=errors.PeerLost)

    def test_an_instance_that_was_replaced(self, world):
        """D15: the registry still names the old instance at an address where a new one answers."""
        (source,) = world.prefill(KV.layout())
        (destination,) = world.decode(KV.layout())
        good = Registration(source.manager.instance, source.manager.endpoint, KV.layout(), "")
        world.registry.register(msgspec.structs.replace(good, instance="of-old"))
        failed(destination.manager.receiver(0), "of-old", source.manager.instance, error=errors.PeerLost)
        world.registry.register(good)
        source.fill("kv", [0, 1], (0, 8))
        hand_over(source, destination, 1)

    def test_self_connection(self, monkeypatch):
        """D14: a rank that reaches its own instance id says so."""
        monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
        world = World("tcp")
        try:
            world.prefill(KV.layout())
            (destination,) = world.decode(KV.layout())
            failed(destination.manager.receiver(0), "reached itself")
        finally:
            world.close()

    def test_no_transport_in_common(self, world):
        world.prefill(KV.layout(), transports=["tcp"])
        (destination,) = world.decode(KV.layout(), transports=["shm"])
        failed(destination.manager.receiver(0), "tcp", "shm")

    def test_what_cannot_be_said_to_a_peer(self, world):
        with pytest.raises(errors.ConfigurationError, match="600 characters"):
            world.decode(KV.layout(), model="x" * 600)
        with pytest.raises(errors.ConfigurationError, match="index 2 of destinations 2"):
            world.decode(KV.layout(), destination_index=2, destinations=2)
        with pytest.raises(errors.ConfigurationError, match=r"settings is of type dict; pass a kvbaton\.Settings"):
            world.decode(KV.layout(), settings={"cast": True})
        world.ranks.clear()
