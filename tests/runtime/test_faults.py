"""Requests that go wrong: each fails with a reason, alone, and its rows come back when nothing can write them."""

import dataclasses
import random
import threading
import uuid

import pytest
from rank_world import FAST, Model, World, succeeded, wait, wait_over, wait_released

import kvbaton as kb
from kvbaton import errors
from kvbaton.registry import Registration
from kvbaton.transport.loopback import LoopbackTransport

KV = Model(("kv",))
FULL = Model(("kv", "conv", "aux"))


def pair(world, model=KV, **options):
    (source,) = world.prefill(model.layout(), **options)
    (destination,) = world.decode(model.layout(), **options)
    source.fill("kv", [0, 1], (0, 8))
    return source, destination


def start(source, destination, room=0, tokens=8):
    sender, receiver = source.manager.sender(room), destination.manager.receiver(room)
    receiver.offer({"kv": [4, 5]}, tokens)
    return sender, receiver


def hand_over(source, destination, room=0):
    sender, receiver = start(source, destination, room)
    sender.finish({"kv": [0, 1]}, (0, 8))
    succeeded(sender, receiver)
    wait_released(sender, receiver)
    destination.check("kv", [4, 5], (0, 8))
    sender.close()
    receiver.close()


def failed(room, *words, error=errors.TransferFailed):
    wait_over(room)
    assert room.poll() is kb.Status.FAILED
    assert not [word for word in words if word not in room.reason], room.reason
    with pytest.raises(error):
        room.raise_for_failure()


class TestAborts:
    def test_after_success_and_twice(self, any_world):
        """D07: success is final, on both sides, and the next life of the number starts clean."""
        source, destination = pair(any_world)
        sender, receiver = start(source, destination, 41)
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        for _ in range(2):
            sender.abort()
            receiver.abort()
        destination.manager.receiver(99).abort()
        source.manager.sender(98).abort()
        hand_over(source, destination, 42)
        assert (sender.poll(), receiver.poll()) == (kb.Status.SUCCESS, kb.Status.SUCCESS)
        assert (sender.reason, receiver.reason) == ("", "")
        sender.close()
        receiver.close()
        hand_over(source, destination, 41)

    def test_of_a_room_that_the_other_side_never_saw(self, any_world):
        source, destination = pair(any_world)
        hand_over(source, destination)
        receiver = destination.manager.receiver(99)
        receiver.offer({"kv": [4, 5]}, 8)
        receiver.abort("not wanted any more")
        failed(receiver, "not wanted any more", error=errors.TransferAborted)
        wait_released(receiver)
        receiver.close()
        any_world.assert_empty()
        destination.check_rest()

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_before_the_data(self, any_world, side):
        source, destination = pair(any_world)
        sender, receiver = start(source, destination)
        (sender if side == "prefill" else receiver).abort("stop here")
        failed(sender, "stop here", error=errors.TransferAborted)
        failed(receiver, "stop here", error=errors.TransferAborted)
        wait_released(sender, receiver)
        sender.finish({"kv": [0, 1]}, (0, 8))
        sender.close()
        receiver.close()
        any_world.assert_empty()
        destination.check_rest()
        hand_over(source, destination)

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_in_flight(self, world, side):
        """D08: failed at once, released only when the write is over; the gate stands for a write of six seconds."""
        source, destination, gate = gated(world)
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        gate.wait_entered()
        (sender if side == "prefill" else receiver).abort("too slow")
        failed(sender, "too slow")
        failed(receiver, "too slow")
        # Two rounds on the control connection have passed by now; the rows are still in use.
        other = start(source, destination, 1)
        other[1].abort()
        wait_released(*other)
        assert not receiver.rows_released
        assert not sender.rows_released
        destination.check_rest()
        gate.open()
        wait_released(sender, receiver)
        assert receiver.poll() is kb.Status.FAILED
        for room in (sender, receiver, *other):
            room.close()
        world.assert_empty()

    def test_a_number_is_in_use_until_its_last_write(self, world):
        source, destination, gate = gated(world)
        sender, receiver = start(source, destination, 3)
        sender.finish({"kv": [0, 1]}, (0, 8))
        gate.wait_entered()
        sender.close()
        receiver.close()
        failed(receiver)
        with pytest.raises(errors.RoomError, match="room 3 is in use"):
            source.manager.sender(3)
        with pytest.raises(errors.RoomError, match="room 3 is in use"):
            destination.manager.receiver(3)
        gate.open()
        wait_released(sender, receiver)
        wait(lambda: not source.manager.side._rooms and not destination.manager.side._rooms)
        world.assert_empty()


class Gate:
    """Holds writes of a loopback transport between their start and their copy."""

    def __init__(self):
        self._entered, self._open = threading.Event(), threading.Event()

    def __call__(self, ticket):
        self._entered.set()
        self._open.wait(30)
        return ""

    def wait_entered(self):
        assert self._entered.wait(20)

    def open(self):
        self._open.set()


def gated(world):
    gate = Gate()
    transport = LoopbackTransport(uuid.uuid4().hex, fail=gate)
    (source,) = world.prefill(KV.layout(), transports=[transport])
    (destination,) = world.decode(KV.layout())
    source.fill("kv", [0, 1], (0, 8))
    return source, destination, gate


class TestRoomsInUse:
    def test_d09(self, any_world):
        source, destination = pair(any_world)
        sender, receiver = start(source, destination, 7)
        with pytest.raises(errors.RoomError, match="room 7 is in use"):
            source.manager.sender(7)
        with pytest.raises(errors.RoomError, match="room 7 is in use"):
            destination.manager.receiver(7)
        sender.finish({"kv": [0, 1]}, (0, 8))
        succeeded(sender, receiver)
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        assert (sender.poll(), receiver.poll()) == (kb.Status.SUCCESS, kb.Status.SUCCESS)
        hand_over(source, destination, 7)
        assert sender.poll() is kb.Status.SUCCESS

    @pytest.mark.parametrize("seed", range(4))
    def test_any_order_of_calls(self, world, seed):
        """D09's property run at the managers: nothing but RoomError, and nothing is kept."""
        draw = random.Random(seed)
        source, destination = pair(world)
        rooms = []
        for _ in range(250):
            call = draw.choice(("sender", "receiver", "offer", "finish", "abort", "close", "poll"))
            made = source.manager.sender if call == "sender" else destination.manager.receiver
            try:
                if call in ("sender", "receiver"):
                    rooms.append(made(draw.randrange(3)))
                elif rooms:
                    room = draw.choice(rooms[-6:])
                    if call == "offer" and isinstance(room, kb.Receiver):
                        room.offer({"kv": [4, 5]}, 8)
                    elif call == "finish" and isinstance(room, kb.Sender):
                        room.finish({"kv": [0, 1]}, (0, 8))
                    elif call in ("abort", "close", "poll"):
                        getattr(room, call)()
            except errors.RoomError:
                pass
        for room in rooms:
            room.close()
        wait_released(*rooms)
        wait_over(*rooms)
        world.assert_empty()
        assert source.manager._control.faults == destination.manager._control.faults == 0
        # Another number: an abort of an earlier life may still be on its way, and says nothing of which life it means.
        hand_over(source, destination, 9)

    def test_used_against_its_life_cycle(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        with pytest.raises(errors.RoomError, match="offered already"):
            receiver.offer({"kv": [4, 5]}, 8)
        sender.finish({"kv": [0, 1]}, (0, 8))
        with pytest.raises(errors.RoomError, match="finished"):
            sender.send({"kv": [0]}, (0, 4))
        succeeded(sender, receiver)
        sender.close()
        receiver.close()
        with pytest.raises(errors.RoomError, match="closed"):
            sender.finish()
        with pytest.raises(errors.RoomError, match="closed"):
            receiver.offer({"kv": [4, 5]}, 8)


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
        """D11: found before any byte moves; the reason names what differs and both values."""
        here, there, words = REFUSALS[name]
        (source,) = world.prefill(here.layout())
        (destination,) = world.decode(there.layout())
        receiver = destination.manager.receiver(0)
        failed(receiver, *words)
        wait_released(receiver)
        receiver.close()
        destination.check_rest()
        world.assert_empty()
        assert not source.manager.side._rooms

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
        failed(destination.manager.receiver(0), "stale")

    def test_one_of_two_ranks_refuses(self, world):
        """The other one's connection is closed again, and a later room finds both in order."""
        first, second = world.prefill(*(KV.layout(rank, 2) for rank in range(2)))
        good = Registration(second.manager.instance, second.manager.endpoint, second.layout, "")
        bad = Registration(second.manager.instance, second.manager.endpoint, KV.layout(1, 2, rows=12), "")
        world.registry.register(bad)
        (destination,) = world.decode(KV.layout())
        receiver = destination.manager.receiver(0)
        failed(receiver, "stale")
        receiver.close()
        for rank in (first, second, destination):
            wait(lambda rank=rank: rank.manager.side.core.table_sizes()["peers"] == 0, "peers to go")
        wait(lambda: not destination.manager.side._source_of_peer and not destination.manager._control._dialled)
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

    def test_an_instance_that_was_replaced(self, world):
        """D15: the registry still names the old instance at an address where a new one answers."""
        (source,) = world.prefill(KV.layout())
        (destination,) = world.decode(KV.layout())
        good = Registration(source.manager.instance, source.manager.endpoint, KV.layout(), "")
        world.registry.register(dataclasses_replace(good, instance="of-old"))
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
        world.ranks.clear()


def dataclasses_replace(registration, **changes):
    import msgspec

    return msgspec.structs.replace(registration, **changes)


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
        wait(lambda: not destination.manager.side._sources, "the end of the connection to be seen")
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
        """A room whose source is still looked up ends too; so does one that begins while the manager closes."""
        registry = SlowRegistry()
        (destination,) = world.decode(KV.layout(), registry=registry)
        receiver = destination.manager.receiver(0)
        assert registry.asked.wait(20)
        closer = threading.Thread(target=destination.manager.close)
        closer.start()
        failed(receiver, "shut down")
        late = destination.manager.side.open_room(1, "late", registry, 0)
        failed(late, "shut down")
        registry.answer.set()
        closer.join(20)
        assert not closer.is_alive()
        wait_released(receiver, late)

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
        wait(lambda: old.manager._replaced, "the old rank to notice")
        assert [rank.instance for rank in registry.topology().ranks] == [new.manager.instance]
        new.manager.close()
        wait(lambda: registry.heartbeat(old.manager.instance), "the old rank to take its place again")


class SlowRegistry(kb.MemoryRegistry):
    def __init__(self):
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()

    def topology(self, deployment="default"):
        self.asked.set()
        self.answer.wait(20)
        return super().topology(deployment)


class FlakyRegistry(kb.MemoryRegistry):
    down = False

    def _check(self):
        if self.down:
            raise errors.RegistryError("the registry is down")

    def heartbeat(self, instance):
        self._check()
        return super().heartbeat(instance)

    def topology(self, deployment="default"):
        self._check()
        return super().topology(deployment)

    def known(self):
        return list(self._table._instances)

    def forget(self):
        for instance in self.known():
            self.remove(instance)


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


BAD_OFFERS = {
    "too few pages": ({"kv": [4]}, 8, 0, None, "1 rows given for tokens 0..8"),
    "too many pages": ({"kv": [4, 5, 6]}, 8, 0, None, "3 rows given"),
    "not registered": ({"kv": [4, 99]}, 8, 0, None, "row 99 is outside the 16"),
    "negative": ({"kv": [4, -1]}, 8, 0, None, "row -1"),
    "unknown component": ({"xy": [4]}, 8, 0, None, "component xy is not registered"),
    "fractions": ({"kv": [4.0, 5.0]}, 8, 0, None, "integers"),
    "ragged": ({"kv": [[4], [5, 6]]}, 8, 0, None, "flat list"),
    "prefix": ({"kv": []}, 8, 9, None, "prefix of 9"),
    "aux slot": ({"kv": [4, 5]}, 8, 0, 77, "row 77"),
    "start": ({"kv": kb.Pages([4, 5], 3)}, 8, 0, None, "multiple"),
}


class TestWrongRows:
    @pytest.mark.parametrize("name", BAD_OFFERS)
    def test_an_offer_raises_and_may_be_made_again(self, world, name):
        rows, tokens, prefix, aux, words = BAD_OFFERS[name]
        source, destination = pair(world, FULL)
        source.fill("conv", [1])
        source.fill("aux", [1])
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        with pytest.raises(errors.RowsError, match=words):
            receiver.offer(rows, tokens, prefix, aux)
        with pytest.raises(errors.RowsError):
            sender.send(rows if rows != {"kv": []} else {"kv": [1]}, (0, tokens)) if aux is None else sender.finish(
                {"kv": [0, 1]}, (0, 8), aux=aux
            )
        receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=2)
        sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=1)
        succeeded(sender, receiver)
        destination.check("kv", [4, 5], (0, 8))
        destination.check("conv", [2])
        destination.check("aux", [2])
        destination.check_rest()

    def test_a_chunk_that_was_refused_does_not_count(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        with pytest.raises(errors.RowsError, match=r"1 rows given for tokens 0\.\.400"):
            sender.send({"kv": [0]}, (0, 400))
        with pytest.raises(errors.RowsError, match="no range"):
            sender.send({"kv": [0]}, (8, 4))
        sender.send({"kv": [0, 1]}, (0, 8))
        sender.finish()
        succeeded(sender, receiver)

    def test_an_aux_slot_without_aux_component(self, world):
        source, destination = pair(world)
        with pytest.raises(errors.RowsError, match="no component of kind aux"):
            destination.manager.receiver(0).offer({"kv": [4, 5]}, 8, aux=0)
        with pytest.raises(errors.RowsError, match="no component of kind aux"):
            source.manager.sender(0).finish({"kv": [0, 1]}, (0, 8), aux=0)

    def test_state_belongs_to_finish(self, world):
        source, _ = pair(world, FULL)
        with pytest.raises(errors.RowsError, match="conv"):
            source.manager.sender(0).send({"kv": [0], "conv": [1]}, (0, 4))

    def test_rows_in_the_middle_that_are_missing(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        sender.send({"kv": [0]}, (0, 3))
        sender.finish({"kv": [1]}, (5, 8))
        failed(sender, "kv", "from 3 on")
        failed(receiver, "kv", "from 3 on")
        wait_released(sender, receiver)

    @pytest.mark.parametrize("first", ["offer", "finish"])
    def test_tokens_differ(self, world, first):
        source, destination = pair(world)
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        calls = [lambda: sender.finish({"kv": [0, 1]}, (0, 7)), lambda: receiver.offer({"kv": [4, 5]}, 8)]
        for call in calls if first == "finish" else reversed(calls):
            call()
        failed(sender, "7 tokens", "8")
        failed(receiver, "7 tokens", "8")
        wait_released(sender, receiver)
        hand_over(source, destination, 1)

    @pytest.mark.parametrize(
        ("sent", "offered"), [({}, {"conv": [1]}), ({"conv": [0]}, {}), ({"conv": [0, 1]}, {"conv": [2]})]
    )
    def test_slots_differ(self, world, sent, offered):
        source, destination = pair(world, Model(("kv", "conv")))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5], **offered}, 8)
        sender.finish({"kv": [0, 1], **sent}, (0, 8))
        failed(sender, "conv")
        failed(receiver, "conv")
        wait_released(sender, receiver)

    def test_aux_at_decode_only(self, world):
        source, destination = pair(world, Model(("kv", "aux")))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5]}, 8, aux=1)
        sender.finish({"kv": [0, 1]}, (0, 8))
        failed(sender, "aux")
        failed(receiver, "aux")

    def test_aux_at_prefill_only_is_not_asked_for(self, world):
        source, destination = pair(world, Model(("kv", "aux")))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        source.fill("aux", [1])
        receiver.offer({"kv": [4, 5]}, 8)
        sender.finish({"kv": [0, 1]}, (0, 8), aux=1)
        succeeded(sender, receiver)
        destination.check("kv", [4, 5], (0, 8))
        destination.check_rest()


class TestErrorsInside:
    """An error where nobody waits for it fails its room, says why, and harms no other."""

    @pytest.mark.parametrize("step", ["open", "submit", "finish", "offer"])
    @pytest.mark.parametrize("error", [errors.RowsError("broken inside"), ZeroDivisionError("broken inside")])
    def test_of_the_prefill_core(self, world, monkeypatch, step, error):
        source, destination = pair(world)
        hand_over(source, destination)
        core = source.manager.side.core
        good = getattr(core, step)
        monkeypatch.setattr(core, step, lambda room, *rest: broken(error) if room == 1 else good(room, *rest))
        sender, receiver = start(source, destination, 1)
        sender.send({"kv": [0]}, (0, 4))
        sender.finish({"kv": [1]}, (4, 8))
        failed(sender, "broken inside")
        receiver.abort()
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        hand_over(source, destination, 2)
        world.assert_empty()

    @pytest.mark.parametrize("step", ["open", "offer"])
    @pytest.mark.parametrize("error", [errors.RowsError("broken inside"), ZeroDivisionError("broken inside")])
    def test_of_the_decode_core(self, world, monkeypatch, step, error):
        source, destination = pair(world)
        core = destination.manager.side.core
        good = getattr(core, step)
        monkeypatch.setattr(core, step, lambda room, *a, **b: broken(error) if room == 1 else good(room, *a, **b))
        sender, receiver = start(source, destination, 1)
        failed(receiver, "broken inside")
        sender.close()
        receiver.close()
        wait_released(sender, receiver)
        hand_over(source, destination, 2)
        world.assert_empty()

    def test_of_a_write(self, world, monkeypatch):
        source, destination = pair(world)
        transport = source.manager._transports["loopback"]
        monkeypatch.setattr(transport, "write", lambda *arguments: broken(ZeroDivisionError("broken inside")))
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        failed(sender, "broken inside")
        failed(receiver, "broken inside")
        wait_released(sender, receiver)
        monkeypatch.undo()
        hand_over(source, destination, 1)

    def test_of_a_ticket(self, world):
        source, destination = pair(world)
        transport = source.manager._transports["loopback"]
        transport.fail = lambda ticket: "the wire broke"
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        failed(sender, "the wire broke")
        failed(receiver, "the wire broke")
        wait_released(sender, receiver)
        assert sender.bytes_by_component == {}
        transport.fail = None
        hand_over(source, destination, 1)

    @pytest.mark.parametrize(("side", "name"), [("source", "_with_aux"), ("destination", "_deliver")])
    def test_of_the_aux_data(self, world, monkeypatch, side, name):
        source, destination = pair(world, Model(("kv", "aux")))
        monkeypatch.setattr(
            {"source": source, "destination": destination}[side].manager.side,
            name,
            lambda *arguments: broken(ZeroDivisionError("broken inside")),
        )
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5]}, 8, aux=1)
        sender.finish({"kv": [0, 1]}, (0, 8), aux=1)
        failed(receiver, "broken inside")
        wait_released(sender, receiver)
        sender.close()
        receiver.close()
        world.assert_empty()

    @pytest.mark.parametrize("side", ["source", "destination"])
    def test_of_a_turn(self, world, monkeypatch, side):
        """Commands and frames go on while timers fail, and close still ends the thread."""
        source, destination = pair(world)
        rank = {"source": source, "destination": destination}[side]
        monkeypatch.setattr(rank.manager.side.core, "tick", lambda now: broken(ZeroDivisionError()))
        wait(lambda: rank.manager._control.faults > 1)
        sender, receiver = start(source, destination)
        sender.finish({"kv": [0, 1]}, (0, 8))
        wait_over(receiver, sender)
        rank.manager.close()
        assert not rank.manager._control._thread.is_alive()


def broken(error):
    raise error
