"""``transports="auto"``: the best that both have is taken and explained; the next one is tried at handshake only."""

import itertools
import logging
import uuid

import numpy as np
import pytest
from rank_world import FAST, Model, Rank, in_region, succeeded, wait
from room_pairs import failed, hand_over, pair, start

import kvbaton as kb
from kvbaton.errors import ConfigurationError, TransportError, TransportUnavailable
from kvbaton.transport import loopback
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.loopback import Hub, LoopbackTransport

KV = Model(("kv",))


class Fake(LoopbackTransport):
    """A loopback transport of any name, that can be told to fail at one of the steps of a handshake."""

    def __init__(self, name, instance, hub, **failing):
        super().__init__(instance, hub=hub)
        self.name = name
        self.failing = failing

    def _step(self, step):
        if step in self.failing:
            raise self.failing[step]

    def describe(self):
        self._step("describe")
        return super().describe()

    def connect(self, descriptor):
        self._step("connect")
        return super().connect(descriptor)

    def admit(self, descriptor):
        self._step("admit")
        super().admit(descriptor)


class Unshared(Rank):
    """A rank whose memory no other process can map."""

    def start(self, role, registry, **options):
        self.plain = np.full(self.memory.nbytes, self.memory.array[0], np.uint8)
        region = kb.Region.of(self.plain)
        self.manager = kb.Manager(self.layout, [region], role=role, registry=registry, settings=FAST, **options)
        return self


@pytest.fixture
def hubs():
    numbered = itertools.count()
    made = {}

    def make(side, *fakes):
        """Transports of one rank; each is a name and what fails."""
        instance = f"{side}-{next(numbered)}-{uuid.uuid4().hex}"
        return [Fake(name, instance, made.setdefault(name, Hub()), **failing) for name, failing in fakes]

    return make


def both(world, hubs, prefill, decode):
    (source,) = world.prefill(KV.layout(), transports=hubs("prefill", *prefill.items()))
    (destination,) = world.decode(KV.layout(), transports=hubs("decode", *decode.items()))
    source.fill("kv", [0, 1], (0, 8))
    return source, destination


def test_every_transport_between_processes_is_offered_and_the_mapped_one_taken(world, caplog):
    caplog.set_level(logging.INFO, "kvbaton")
    source, destination = pair(world, transports="auto")
    assert source.manager.transports == destination.manager.transports
    assert source.manager.transports[0] == "shm"
    assert "tcp" in source.manager.transports
    assert "loopback" not in source.manager.transports
    assert source.manager.peers == destination.manager.peers == ()
    hand_over(source, destination)
    (there,), (here,) = source.manager.peers, destination.manager.peers
    assert (there.instance, there.transport) == (destination.manager.instance, "shm")
    assert (here.instance, here.transport) == (source.manager.instance, "shm")
    assert here.coords == source.layout.coords
    assert there.reason == here.reason
    assert there.reason.startswith("shm: the peer's memory is addressed directly; both have shm, tcp")
    said = [record.message for record in caplog.records if "is reached by shm" in record.message]
    assert len(said) == 1
    assert there.reason in said[0]


def test_a_peer_that_left_is_no_peer_any_more(world):
    source, destination = pair(world, transports="auto")
    hand_over(source, destination)
    destination.close()
    wait(lambda: source.manager.peers == (), "the decode rank to leave")


def test_memory_that_cannot_be_mapped_is_reached_by_sockets_and_it_is_said_why(world, caplog):
    caplog.set_level(logging.INFO, "kvbaton")
    (source,) = world.prefill(KV.layout(), transports="auto")
    source.fill("kv", [0, 1], (0, 8))
    destination = Unshared(KV.layout())
    world.ranks.append(destination)
    destination.start("decode", world.registry, transports="auto")
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    succeeded(sender, receiver)
    destination.memory.array[:] = destination.plain
    destination.check("kv", [4, 5], (0, 8))
    destination.check_rest()
    (peer,) = source.manager.peers
    assert peer.transport == "tcp"
    assert "tried before, shm: none of the 1 regions" in peer.reason
    assert [record.levelname for record in caplog.records if "is reached by tcp" in record.message] == ["INFO"]


def test_one_region_that_cannot_be_mapped_is_found_before_a_byte_moves(world):
    """The other region can: the connection works, and only writes into the first would fail."""
    (source,) = world.prefill(Model(("kv", "conv")).layout(), transports="auto")
    layout = in_region(Model(("kv", "conv")).layout(), "conv", 1)
    shared, plain = kb.SharedMemory(source.memory.nbytes), np.zeros(source.memory.nbytes, np.uint8)
    regions = [kb.Region.of(shared), kb.Region.of(plain)]
    with kb.Manager(
        layout, regions, role="decode", registry=world.registry, transports="auto", settings=FAST
    ) as manager:
        source.fill("kv", [0, 1], (0, 8))
        source.fill("conv", [2])
        sender, receiver = source.manager.sender(1), manager.receiver(1)
        receiver.offer({"kv": [0, 1], "conv": [2]}, 8)
        sender.finish({"kv": [0, 1], "conv": [2]}, (0, 8))
        succeeded(sender, receiver)
        (peer,) = source.manager.peers
        assert peer.transport == "tcp"
        assert "tried before, shm: it cannot write into region 1 of the decode rank (component conv)" in peer.reason
        source.fill("conv", [2])
        for tensor in layout.component("conv").tensors:
            at = slice(tensor.offset + 2 * tensor.row_stride, tensor.offset + 3 * tensor.row_stride)
            np.testing.assert_array_equal(plain[at], source.memory.array[at])


@pytest.mark.parametrize(("cross_host", "level"), [(False, "INFO"), (True, "WARNING")])
def test_what_fails_to_connect_is_passed_over(world, hubs, caplog, monkeypatch, cross_host, level):
    """Transports of one host may fail; of another one it is a warning."""
    caplog.set_level(logging.INFO, "kvbaton")
    monkeypatch.setattr(Fake, "capabilities", LoopbackTransport.capabilities._replace(cross_host=cross_host))
    gone = TransportUnavailable("the switch is off")
    source, destination = both(world, hubs, {"a": {"connect": gone}, "b": {}}, {"a": {}, "b": {}})
    hand_over(source, destination)
    assert [record.levelname for record in caplog.records if "is reached by b" in record.message] == [level]
    (peer,) = destination.manager.peers
    assert peer.transport == "b"
    assert "both have a, b; tried before, a: the switch is off" in peer.reason


def test_where_all_fail_the_error_has_the_reason_of_each(world, hubs):
    prefill = {"a": {"connect": TransportUnavailable("no cable")}, "b": {"connect": TransportError("no port")}}
    source, destination = both(world, hubs, prefill, {"a": {}, "b": {}})
    sender, receiver = start(source, destination)
    failed(receiver, "cannot reach decode rank", "a: no cable", "b: no port")
    sender.abort()


def test_what_the_decode_side_cannot_admit_is_given_up_for_the_next(world, hubs):
    late = TransportUnavailable("that process cannot be watched")
    source, destination = both(
        world, hubs, {"a": {}, "b": {}, "c": {}}, {"a": {"admit": late}, "b": {"admit": late}, "c": {}}
    )
    hand_over(source, destination)
    (peer,) = destination.manager.peers
    assert peer.transport == "c"
    assert "a failed here: that process cannot be watched; b failed here" in peer.reason
    wait(lambda: [each.transport for each in source.manager.peers] == ["c"], "the others to be forgotten")
    world.assert_no_faults()


def test_where_none_can_be_admitted_the_error_has_the_reason_of_each(world, hubs):
    prefill = {"a": {}, "b": {}}
    decode = {"a": {"admit": TransportError("a is shut")}, "b": {"admit": TransportError("b is shut")}}
    source, destination = both(world, hubs, prefill, decode)
    sender, receiver = start(source, destination)
    failed(receiver, "a: a is shut", "b: b is shut")
    sender.abort()


def test_what_cannot_describe_itself_is_not_offered(world, hubs):
    full = TransportError("too many regions")
    source, destination = both(world, hubs, {"a": {}, "b": {}}, {"a": {"describe": full}, "b": {}})
    hand_over(source, destination)
    assert destination.manager.peers[0].transport == "b"


def test_where_nothing_can_describe_itself_the_error_says_why(world, hubs):
    source, destination = both(world, hubs, {"a": {}}, {"a": {"describe": TransportError("too many regions")}})
    sender, receiver = start(source, destination)
    failed(receiver, "a: too many regions")
    sender.abort()


def test_auto_is_passed_alone(world):
    with pytest.raises(ConfigurationError, match="'auto' is every transport; pass it alone"):
        world.prefill(KV.layout(), transports=["auto", "tcp"])
    (source,) = world.prefill(KV.layout(), transports=["auto"])
    assert "tcp" in source.manager.transports


def test_auto_without_any_transport_says_why_each_is_missing(monkeypatch):
    def none(name, **options):
        raise TransportUnavailable(f"this machine has no {name}")

    monkeypatch.setattr("kvbaton.runtime.transports.create", none)
    rank = Rank(KV.layout())
    with pytest.raises(TransportUnavailable, match="shm: this machine has no shm; tcp: this machine has no tcp"):
        rank.start("decode", None, transports="auto")
    rank.close()


def test_auto_where_only_this_process_can_be_reached_is_an_error(monkeypatch):
    def only_loopback(name, *, instance, **options):
        if name == loopback.LoopbackTransport.name:
            return LoopbackTransport(instance)
        raise TransportUnavailable(f"this machine has no {name}")

    monkeypatch.setattr("kvbaton.runtime.transports.create", only_loopback)
    rank = Rank(KV.layout())
    with pytest.raises(TransportUnavailable, match="no transport between processes can be used here: shm: this"):
        rank.start("decode", None, transports="auto")
    rank.close()


def test_what_is_missing_can_be_asked_for(world, monkeypatch):
    from kvbaton.transport import create

    def without_shm(name, **options):
        if name == "shm":
            raise TransportUnavailable("this kernel has no memfd_create")
        return create(name, **options)

    monkeypatch.setattr("kvbaton.runtime.transports.create", without_shm)
    source, destination = pair(world, transports="auto")
    assert source.manager.left_out["shm"] == "this kernel has no memfd_create"
    assert "shm" not in source.manager.transports
    hand_over(source, destination)
    assert "not here, shm: this kernel has no memfd_create" in source.manager.peers[0].reason


@pytest.mark.parametrize("hardware", [True, False])
def test_a_fabric_takes_part_where_network_cards_carry_its_bytes(world, monkeypatch, hardware):
    """The fabric between threads stands in for one that a vendor's library makes."""
    monkeypatch.setattr("kvbaton.runtime.transports.NAMES", ("loopback", "tcp", "memory"))
    monkeypatch.setattr(MemoryFabric, "hardware", hardware)
    source, destination = pair(world, transports="auto")
    hand_over(source, destination)
    (peer,) = destination.manager.peers
    if hardware:
        assert source.manager.transports == ("memory", "tcp")
        assert peer.reason.startswith("memory: network cards carry the bytes; both have memory, tcp")
    else:
        assert source.manager.transports == ("tcp",)
        assert "no network card carries its bytes here, as with tcp" in source.manager.left_out["memory"]
        assert peer.transport == "tcp"
