"""The mori fabric on a fake of the library (`fake_mori`), which has the traps that its reference documents.

What passes here is the adapter's own conduct. The library itself is met in `test_mori`.
"""

import gc
import os
import socket
import sys
from pathlib import Path

import fake_mori
import numpy as np
import pytest
from fabric_ends import let_go

from kvbaton.errors import AddressError, ConfigurationError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.fabric.base import Writes
from kvbaton.transport.fabric.mori import adapter as mori_module
from kvbaton.transport.fabric.mori import guards as mori_guards
from kvbaton.transport.fabric.mori import peer as mori_peer
from kvbaton.transport.fabric.mori.adapter import MoriFabric
from kvbaton.transport.fabric.transport import FabricTransport

CANARY = 0xEE
NBYTES = 1 << 16


@pytest.fixture
def world(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MORI_")]:
        monkeypatch.delenv(name)
    world = fake_mori.install(monkeypatch)
    yield world
    gc.collect()
    assert world.violations == []


class Ends:
    """A writer and a destination over the fake; the source is random, the destination canaries."""

    def __init__(self, options=None, there=None):
        self.fabrics = []
        self.writer = self.make("writer", options)
        self.destination = self.make("destination", options if there is None else there)
        self.source = np.random.default_rng(1).integers(0, CANARY, NBYTES, dtype=np.uint8)
        self.target = np.full(NBYTES, CANARY, dtype=np.uint8)
        self.writer.register([Region.of(self.source)])
        self.destination.register([Region.of(self.target)])

    def make(self, instance, options=None, **where):
        fabric = MoriFabric(instance, options, **where)
        self.fabrics.append(fabric)
        return fabric

    def engine(self, fabric):
        return fabric._engine.engine

    def connect(self):
        return self.writer.connect(self.destination.describe(), "destination")

    def end(self, handles=1):
        ended = []
        for _ in range(10_000):
            ended += self.writer.poll()
            if len(ended) >= handles:
                return ended
            self.writer.wait(1e-4)
        raise AssertionError(f"{len(ended)} of {handles} handles ended")

    def close(self):
        for fabric in self.fabrics:
            fabric.close()


@pytest.fixture
def ends(world):
    ends = Ends({"qp_per_transfer": "3"})
    yield ends
    ends.close()


def connect(ends, world):
    """Connect, also while nothing moves otherwise."""
    held, world.hold = world.hold, False
    peer = ends.connect()
    world.hold = held
    return peer


def pairs_of(world, peer):
    """The queue pairs to a peer; a fabric has some to itself, too."""
    return [pair for pair in world.pairs if pair.alias == peer.route.key]


def scattered(count=100, nbytes=100, seed=2):
    random = np.random.default_rng(seed)
    rows = NBYTES // count
    return Writes(0, 0, random.permutation(count) * rows, random.permutation(count) * rows, np.full(count, nbytes))


def applied(writes, source):
    target = np.full(NBYTES, CANARY, dtype=np.uint8)
    for local, remote, length in zip(writes.local_offsets, writes.remote_offsets, writes.lengths, strict=True):
        target[remote : remote + length] = source[local : local + length]
    return target


def test_scattered_writes_land_and_nothing_else(ends):
    writes = scattered()
    ends.writer.post(ends.connect(), writes, 5)
    assert ends.end() == [(5, "")]
    np.testing.assert_array_equal(ends.target, applied(writes, ends.source))
    assert ends.writer.poll() == []


def test_many_handles_end_once_each(ends):
    peer = ends.connect()
    for handle in range(ends.writer.limits.posts):
        ends.writer.post(peer, scattered(seed=handle), handle)
    ended = ends.end(ends.writer.limits.posts)
    assert sorted(ended) == [(handle, "") for handle in range(ends.writer.limits.posts)]


def test_limits_keep_the_send_queues_from_filling(ends, world):
    limits, pairs = ends.writer.limits, 3
    peer = ends.connect()
    world.hold = True
    count = limits.writes
    one = Writes(0, 0, np.zeros(count, np.int64), np.zeros(count, np.int64), np.ones(count, np.int64))
    for handle in range(limits.posts):
        ends.writer.post(peer, one, handle)
    assert max(len(pair.queue) for pair in world.pairs) <= fake_mori.DEPTH
    assert sum(len(pair.queue) for pair in world.pairs) > 0.9 * pairs * fake_mori.DEPTH
    world.hold = False
    assert all(not error for _, error in ends.end(limits.posts))


def test_empty_writes_end_well(ends):
    none, zero = np.zeros(0, np.int64), np.zeros(3, np.int64)
    peer = ends.connect()
    ends.writer.post(peer, Writes(0, 0, none, none, none), 1)
    ends.writer.post(peer, Writes(0, 0, zero, zero, zero), 2)
    assert ends.end(2) == [(1, ""), (2, "")]
    assert (ends.target == CANARY).all()


@pytest.mark.parametrize(
    ("local", "remote", "lengths"),
    [
        ([0], [NBYTES - 9], [10]),
        ([NBYTES - 9], [0], [10]),
        ([-1], [0], [1]),
        ([0], [-1], [1]),
        ([0], [0], [-1]),
        ([2**63 - 1], [0], [1]),
        ([0, 1], [0], [1]),
        ([0], [0], [1, 1]),
    ],
)
def test_writes_outside_or_ragged_are_refused(ends, local, remote, lengths):
    peer = ends.connect()
    columns = [np.array(column, dtype=np.int64) for column in (local, remote, lengths)]
    with pytest.raises(TransportError):
        ends.writer.post(peer, Writes(0, 0, *columns), 1)
    ends.writer.post(peer, scattered(), 2)
    assert ends.end() == [(2, "")]


def test_batches_stay_below_what_one_message_may_have():
    random = np.random.default_rng(3)
    limit = mori_module.BATCH_BYTES
    for lengths in (np.full(40, limit), random.integers(1, limit, 200), np.array([1]), np.array([limit, 1, limit])):
        batches = list(mori_module._batches(lengths))
        assert [begin for begin, _ in batches[1:]] == [end for _, end in batches[:-1]]
        assert (batches[0][0], batches[-1][1]) == (0, len(lengths))
        assert all(begin < end and lengths[begin:end].sum() <= 2 * limit for begin, end in batches)


def test_a_handle_cut_into_batches_ends_when_all_are_over(ends, world, monkeypatch):
    monkeypatch.setattr(mori_module, "BATCH_BYTES", 150)
    world.hold = True
    writes = scattered()
    ends.writer.post(connect(ends, world), writes, 1)
    assert ends.writer.poll() == []
    world.hold = False
    assert ends.end() == [(1, "")]
    np.testing.assert_array_equal(ends.target, applied(writes, ends.source))


def test_an_error_is_reported_only_when_no_queue_pair_works_on_it(ends, world):
    peer = connect(ends, world)
    world.stall = 1
    ends.writer.post(peer, scattered(), 1)
    pairs_of(world, peer)[0].dead = True
    for _ in range(20):
        assert ends.writer.poll() == []
    assert not peer.alive
    world.stall = None
    ((handle, error),) = ends.end()
    assert handle == 1
    assert "destination" in error
    assert not any(pair.queue for pair in world.pairs)


def test_statuses_outlive_their_peer(ends, world):
    peer = connect(ends, world)
    world.hold = True
    ends.writer.post(peer, scattered(), 1)
    assert ends.writer.disconnect(peer) is False
    assert ends.writer.poll() == [], "the library may still read, but the handle was reported"
    del peer
    gc.collect()
    world.hold = False
    world.progress()
    assert ends.writer.poll() == [(1, "")]
    assert ends.writer.poll() == []


def test_a_peer_is_let_go_of_when_what_is_under_way_is_over(ends, world):
    peer = connect(ends, world)
    world.hold = True
    writes = scattered()
    ends.writer.post(peer, writes, 1)
    assert ends.writer.disconnect(peer) is False
    world.hold = False
    assert let_go(ends.writer, peer)
    assert ends.writer.poll() == [(1, "")]
    np.testing.assert_array_equal(ends.target, applied(writes, ends.source))
    with pytest.raises(TransportError, match="disconnected"):
        ends.writer.post(peer, writes, 2)


def test_a_peer_that_died_fails_its_handles_and_no_others(ends, world):
    other = ends.make("other", {"qp_per_transfer": "3"})
    there = np.full(NBYTES, CANARY, dtype=np.uint8)
    other.register([Region.of(there)])
    peer, neighbour = ends.connect(), ends.writer.connect(other.describe(), "other")
    ends.engine(ends.destination).killed = True
    ends.writer.post(peer, scattered(), 1)
    ends.writer.post(neighbour, scattered(), 2)
    ended = dict(ends.end(2))
    assert "PEER_UNREACHABLE" in ended[1]
    assert ended[2] == ""
    assert (peer.alive, neighbour.alive) == (False, True)
    with pytest.raises(TransportError, match="destination"):
        ends.writer.post(peer, scattered(), 3)
    with pytest.raises(TransportUnavailable, match="refused"):
        ends.connect()
    assert let_go(ends.writer, peer)


def test_a_failure_that_the_library_reports_is_noticed_without_a_write(ends):
    peer = ends.connect()
    failure = fake_mori.types.SimpleNamespace(
        remote_engine_key=peer.route.key, reason=fake_mori.PeerFailureReason.PEER_UNREACHABLE, detail="gone"
    )
    ends.engine(ends.writer).failures.append(failure)
    assert ends.writer.poll() == []
    assert not peer.alive


def test_versions_without_peer_failures_work(ends, monkeypatch):
    monkeypatch.delattr(fake_mori.IOEngine, "pop_peer_failure")
    peer = ends.connect()
    ends.engine(ends.destination).killed = True
    ends.writer.post(peer, scattered(), 1)
    ((_, error),) = ends.end()
    assert error
    assert not peer.alive


def test_a_peer_whose_connection_broke_is_connected_to_again(ends, world):
    peer = ends.connect()
    for pair in world.pairs:
        pair.dead = True
    ends.writer.post(peer, scattered(), 1)
    ((_, error),) = ends.end()
    assert error
    again = ends.connect()
    writes = scattered(seed=4)
    ends.writer.post(again, writes, 2)
    assert ends.end() == [(2, "")]
    np.testing.assert_array_equal(ends.target, applied(writes, ends.source))
    assert (peer.alive, again.alive) == (False, True)


@pytest.mark.parametrize("tells", [True, False])
def test_a_connection_that_broke_unnoticed_is_found_by_connect(ends, world, monkeypatch, tells):
    """One queue pair is enough, also with versions whose sessions are always alive."""
    if not tells:
        monkeypatch.setattr(fake_mori.IOEngineSession, "alive", lambda session: True)
    first = ends.connect()
    pairs_of(world, first)[1].dead = True
    second = ends.connect()
    assert second.route is not first.route
    assert (first.alive, second.alive) == (False, True)


def test_connections_to_one_engine_share_its_queue_pairs(ends, world):
    first, second = ends.connect(), ends.connect()
    assert len(pairs_of(world, second)) == 3
    assert first.route is second.route
    assert let_go(ends.writer, first)
    ends.writer.post(second, scattered(), 1)
    assert ends.end() == [(1, "")]


def test_a_process_that_comes_again_at_its_address_is_another_peer(ends, world):
    old = ends.destination.describe()
    port = ends.engine(ends.destination).config.port
    peer = ends.connect()
    ends.destination.close()
    again = ends.make("destination", {"qp_per_transfer": "3", "port": str(port)})
    ends.target[:] = CANARY
    again.register([Region.of(ends.target)])
    with pytest.raises(TransportUnavailable):
        ends.writer.connect(old, "destination")
    assert (ends.target == CANARY).all()
    ends.destination = again
    fresh = ends.connect()
    writes = scattered()
    ends.writer.post(fresh, writes, 1)
    assert ends.end() == [(1, "")]
    np.testing.assert_array_equal(ends.target, applied(writes, ends.source))
    assert not peer.alive or let_go(ends.writer, peer)


def test_memory_that_the_peer_gave_up_fails_the_write(ends):
    peer = ends.connect()
    engine = ends.engine(ends.destination)
    engine.deregister_memory(engine.memories[1])
    ends.writer.post(peer, scattered(), 1)
    ((_, error),) = ends.end()
    assert error
    assert (ends.target == CANARY).all()
    engine.deregister_memory = lambda memory: None


def test_regions_that_share_an_address_share_a_registration(ends):
    fabric = ends.make("third", {"qp_per_transfer": "3"})
    memory = np.full(NBYTES, CANARY, dtype=np.uint8)
    fabric.register([Region.of(memory[:100]), Region.of(memory), Region.of(np.zeros(0, np.uint8))])
    assert len(ends.engine(fabric).memories) == 2
    peer = ends.writer.connect(fabric.describe(), "third")
    ends.writer.post(peer, Writes(0, 1, *(np.array([n], np.int64) for n in (0, 1000, 50))), 1)
    ends.writer.post(peer, Writes(0, 0, *(np.array([n], np.int64) for n in (0, 0, 100))), 2)
    assert dict(ends.end(2)) == {1: "", 2: ""}
    np.testing.assert_array_equal(memory[1000:1050], ends.source[:50])
    for region, length in ((0, 101), (2, 1)):
        with pytest.raises(TransportError, match="outside"):
            ends.writer.post(peer, Writes(0, region, *(np.array([n], np.int64) for n in (0, 0, length))), 3)


def test_only_connect_talks_to_the_peer(world):
    """Every pair of regions can be written to while the peer's control thread hangs, and all memory is pinned."""
    ends = Ends()
    memories = [np.full(64, CANARY, np.uint8) for _ in range(5)]
    sources = [np.full(64, number, np.uint8) for number in range(4)]
    writer, destination = ends.make("w"), ends.make("d")
    writer.register([Region.of(source) for source in sources])
    destination.register([Region.of(memory) for memory in memories])
    assert len(ends.engine(writer).keys) == 1 + len(sources)
    assert len(ends.engine(destination).keys) == 1 + len(memories)
    peer = writer.connect(destination.describe(), "d")
    ends.engine(destination).hung = True
    ends.writer = writer
    offset, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    for local in range(4):
        for remote in range(5):
            writer.post(peer, Writes(local, remote, offset + local, offset + local, one), 10 * local + remote)
    assert all(not error for _, error in ends.end(20))
    assert all(memory[:4].tolist() == [0, 1, 2, 3] for memory in memories)
    ends.close()


def test_a_peer_that_hangs_is_named(ends):
    ends.engine(ends.destination).hung = True
    with pytest.raises(TransportUnavailable, match="destination"):
        ends.connect()


def test_a_peer_that_does_not_answer_is_refused(ends, world, monkeypatch):
    monkeypatch.setattr(mori_peer, "CONNECT_SECONDS", 0.01)
    world.hold = True
    with pytest.raises(TransportUnavailable, match="did not answer"):
        ends.connect()
    world.hold = False
    gc.collect()
    world.progress()


def test_another_process_at_the_address_is_found_by_its_token(ends):
    described = mori_peer.Descriptor.decode(ends.destination.describe(), "destination")
    forged = mori_peer.msgspec.structs.replace(described, token=b"0" * 16)
    with pytest.raises(TransportUnavailable, match="another process"):
        ends.writer.connect(forged.encode(), "destination")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {"engine": b"nonsense"},
        lambda d: {"engine": fake_mori.EngineDesc(["k", "n", "h", "localhost", 9, 1]).pack()},
        lambda d: {"memories": (b"\x93\x01\x02\x03",)},
        lambda d: {"memories": ()},
        lambda d: {"regions": (mori_peer.Place(-1, 10),)},
        lambda d: {"regions": (mori_peer.Place(1, NBYTES + 1),)},
    ],
)
def test_descriptors_that_make_no_sense_are_refused(ends, change):
    described = mori_peer.Descriptor.decode(ends.destination.describe(), "destination")
    with pytest.raises(TransportError):
        ends.writer.connect(mori_peer.msgspec.structs.replace(described, **change(described)).encode(), "d")


@pytest.mark.parametrize("descriptor", [b"", b"nonsense", b"\x78\x9c\x03\x00\x00\x00\x00\x01", b"\x00" * 4096])
def test_other_bytes_are_no_descriptor(ends, descriptor):
    with pytest.raises(TransportError):
        ends.writer.connect(descriptor, "d")


def test_a_descriptor_of_many_regions_is_small(ends):
    fabric = ends.make("many")
    memory = [np.zeros(64, np.uint8) for _ in range(1000)]
    fabric.register([Region.of(part) for part in memory])
    assert len(fabric.describe()) <= 48 << 10
    assert len(mori_peer.Descriptor.decode(fabric.describe(), "many").regions) == 1000


def test_notifications_must_agree(ends):
    described = mori_peer.Descriptor.decode(ends.destination.describe(), "destination")
    with pytest.raises(TransportUnavailable, match="notifications"):
        ends.writer.connect(mori_peer.msgspec.structs.replace(described, notifications=True).encode(), "destination")
    rdma = ends.engine(ends.writer).backends[fake_mori.BackendType.RDMA]
    assert rdma.enable_notification is False


def test_keys_never_repeat(ends):
    keys = {ends.engine(ends.make("again")).key for _ in range(3)}
    assert len(keys) == 3
    assert all(key.startswith("again/") for key in keys)


def test_close_ends_what_is_under_way(world, monkeypatch):
    monkeypatch.setattr(mori_module, "DISCONNECT_SECONDS", 0.05)
    ends = Ends()
    peer = connect(ends, world)
    world.hold = True
    ends.writer.post(peer, scattered(), 1)
    ends.close()
    ((handle, error),) = ends.writer.poll()
    assert handle == 1
    assert error
    ends.close()
    assert not peer.alive
    world.hold = False
    world.progress()


def test_xgmi_carries_gpu_memory_only(world):
    ends = Ends({"backends": "xgmi,rdma"})
    writer, destination = ends.make("w", {"backends": "xgmi"}), ends.make("d", {"backends": "xgmi"})
    assert writer.memory_kinds == {"cuda"}
    assert writer.cross_host is False
    with pytest.raises(TransportUnavailable, match="host memory"):
        writer.register([Region.of(ends.source)])
    gpu = [
        Region.of(memory)._replace(kind="cuda", device=number)
        for number, memory in enumerate([ends.source, ends.target])
    ]
    writer.register(gpu[:1])
    destination.register(gpu[1:])
    peer = writer.connect(destination.describe(), "d")
    writes = scattered()
    writer.post(peer, writes, 1)
    assert writer.poll() == [(1, "")]
    np.testing.assert_array_equal(ends.target, applied(writes, ends.source))
    with pytest.raises(TransportUnavailable, match="xgmi"):
        writer.connect(ends.make("r").describe(), "r")
    ends.close()


def test_host_and_gpu_memory_meet_over_rdma(world):
    ends = Ends()
    writer, destination = ends.make("w"), ends.make("d")
    assert writer.memory_kinds == {"host", "cuda"}
    writer.register([Region.of(ends.source)])
    destination.register([Region.of(ends.target)._replace(kind="cuda", device=1)])
    ends.writer = writer
    writer.post(writer.connect(destination.describe(), "d"), scattered(), 1)
    assert ends.end() == [(1, "")]
    np.testing.assert_array_equal(ends.target, applied(scattered(), ends.source))
    ends.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "mlx5_0"}, "no option device; it has backends"),
        ({"backends": "tcp"}, "backends"),
        ({"backends": ""}, "backends"),
        ({"poll_cq_mode": "busy"}, "polling or event"),
        ({"qp_per_transfer": "0"}, "1 to 64"),
        ({"qp_per_transfer": "-1"}, "1 to 64"),
        ({"num_worker_threads": "many"}, "1 to 64"),
        ({"port": "1"}, "port"),
        ({"port": "70000"}, "port"),
    ],
)
def test_options_are_checked(world, options, match):
    with pytest.raises(ConfigurationError, match=match):
        MoriFabric("one", options)


def test_options_reach_the_library(world, monkeypatch):
    monkeypatch.setenv("MORI_RDMA_DEVICES", "before")
    fabric = MoriFabric(
        "one", {"qp_per_transfer": "4", "num_worker_threads": "2", "poll_cq_mode": "event", "devices": "x"}
    )
    engine = fabric._engine.engine
    rdma = engine.backends[fake_mori.BackendType.RDMA]
    assert (rdma.qp_per_transfer, rdma.num_worker_threads, rdma.poll_cq_mode) == (4, 2, fake_mori.PollCqMode.EVENT)
    assert engine.devices == "x"
    assert os.environ["MORI_RDMA_DEVICES"] == "before"
    fabric.close()


def test_the_environment_has_the_last_word_on_queue_pairs(world, monkeypatch):
    monkeypatch.setenv("MORI_IO_QP_PER_TRANSFER", "2")
    monkeypatch.setenv("MORI_IO_QP_MAX_SEND_WR", "1024")
    monkeypatch.setenv("MORI_IO_ENABLE_CHUNKING", "on")
    monkeypatch.setenv("MORI_IO_MAX_CHUNKS", "7")
    fabric = MoriFabric("one", {"qp_per_transfer": "5"})
    assert fabric.limits.writes == (1024 - 16) // 16 * 2 // 7
    fabric.close()
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "Yes")
    with pytest.raises(ConfigurationError, match="MORI_IO_ENABLE_NOTIFICATION"):
        MoriFabric("one")
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "0")
    monkeypatch.setenv("MORI_IO_QP_TIMEOUT", "0")
    with pytest.raises(ConfigurationError, match="for ever"):
        MoriFabric("one")


@pytest.mark.parametrize("bind", ["::1", "[::1]:7000", "0.0.0.0", "*", "no-such-host.invalid", "192.0.2.1"])
def test_addresses_that_the_library_cannot_bind_are_refused(world, bind):
    with pytest.raises(AddressError):
        MoriFabric("one", bind=bind)


def test_names_and_wildcards_become_dotted_addresses(world):
    for where in ({"bind": "localhost"}, {"bind": "0.0.0.0", "advertise": "127.0.0.1"}, {"bind": "127.0.0.1:7000"}):
        fabric = MoriFabric("one", **where)
        assert fabric._engine.engine.config.host == "127.0.0.1"
        fabric.close()
    with pytest.raises(ConfigurationError, match="advertise"):
        MoriFabric("one", bind="127.0.0.1", advertise="127.0.0.2")


def test_a_port_that_is_taken_is_refused(world):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(AddressError, match="free port"):
            MoriFabric("one", {"port": str(taken.getsockname()[1])})
        free = taken.getsockname()[1]
    fabric = MoriFabric("one", {"port": str(free)})
    assert fabric._engine.engine.config.port == free
    fabric.close()


def test_a_machine_without_the_library_a_gpu_or_a_device_says_so(world, monkeypatch):
    world.gpus = 0
    with pytest.raises(TransportUnavailable, match="AMD GPU"):
        MoriFabric("one")
    with pytest.raises(TransportUnavailable, match="AMD GPUs"):
        MoriFabric("one", {"backends": "xgmi"})
    world.gpus = 1
    with pytest.raises(TransportUnavailable, match="no active RDMA device"):
        MoriFabric("one", {"devices": "none"})
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(TransportUnavailable, match="pip install"):
        MoriFabric("one")


def test_rocm_smi_that_cannot_be_loaded_is_named(world, monkeypatch):
    def missing(path):
        raise OSError(path)

    monkeypatch.setattr(mori_guards.ctypes, "CDLL", missing)
    with pytest.raises(TransportUnavailable, match="librocm_smi64"):
        MoriFabric("one")


def test_memory_that_cannot_be_pinned_is_refused(ends, monkeypatch):
    fabric = ends.make("third")
    for region in (Region(0, 10), Region(4096, 10), Region(ends.source.ctypes.data, 1 << 40)):
        with pytest.raises(TransportUnavailable, match="region 0"):
            fabric.register([region])
    read_only = Path("/proc/self/maps").read_text().splitlines()
    address = next(int(line.split("-")[0], 16) for line in read_only if line.split()[1].startswith("r--"))
    with pytest.raises(TransportUnavailable, match="writable"):
        fabric.register([Region(address, 100)])


def test_the_limit_of_locked_memory_is_looked_at(world, monkeypatch):
    status = "CapEff:\t0000000000000000\nVmPin:\t     100 kB\n"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: status if path.name == "status" else read(path))
    monkeypatch.setattr(mori_guards.resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    small, large = np.zeros(1 << 19, np.uint8), np.zeros(1 << 20, np.uint8)
    mori_guards.require_pinnable([Region.of(small)])
    with pytest.raises(TransportUnavailable, match="ulimit -l"):
        mori_guards.require_pinnable([Region.of(large)])
    with pytest.raises(TransportUnavailable, match="ulimit -l"):
        mori_guards.require_pinnable([Region.of(small)], copies=2)
    status = "CapEff:\t0000000000004000\nVmPin:\t     100 kB\n"
    mori_guards.require_pinnable([Region.of(large)])


def test_devices_that_hang_or_end_the_library_are_refused(tmp_path):
    bus = tmp_path / "devices" / "pci0000:00" / "0000:00:01.0"
    for folder in (bus / "infiniband" / "mlx5_0", bus / "infiniband_verbs" / "uverbs7", tmp_path / "virtual" / "rxe0"):
        folder.mkdir(parents=True)
    (bus / "infiniband" / "mlx5_0" / "device").symlink_to(bus)
    root = tmp_path / "class"
    root.mkdir()
    (root / "mlx5_0").symlink_to(bus / "infiniband" / "mlx5_0")
    (root / "rxe0").symlink_to(tmp_path / "virtual" / "rxe0")
    with pytest.raises(TransportUnavailable, match=r"rxe0.*\^rxe0"):
        mori_guards.rdma_devices("rxe0", root)
    with pytest.raises(TransportUnavailable, match="mlx5_0 may not be opened"):
        mori_guards.rdma_devices("^rxe0", root)
    (bus / "infiniband_verbs" / "uverbs7").rmdir()
    assert mori_guards.rdma_devices("^rxe0", root) == ["mlx5_0"]
    assert mori_guards.rdma_devices(" mlx5_0 ,", root) == ["mlx5_0"]
    assert mori_guards.devices_present(root) == ["mlx5_0", "rxe0"]
    assert mori_guards.rdma_devices("", tmp_path / "nothing") == []


def test_threads_that_post_need_one_device(world, monkeypatch):
    monkeypatch.setattr(mori_guards, "rdma_devices", lambda selection: ["mlx5_0", "mlx5_1"])
    with pytest.raises(ConfigurationError, match="mlx5_0, mlx5_1"):
        MoriFabric("one", {"num_worker_threads": "2"})
    monkeypatch.setenv("MORI_IO_RDMA_NIC_IDX", "0")
    MoriFabric("one", {"num_worker_threads": "2"}).close()


@pytest.mark.parametrize("executor", ["packed", "direct", "auto"])
@pytest.mark.parametrize("check", Conformance.names())
def test_promise_is_kept_over_the_fake(world, check, executor):
    def make(instance):
        return FabricTransport(instance, MoriFabric(instance, {"qp_per_transfer": "2"}), options={"executor": executor})

    try:
        Conformance(make).run(check)
    except NotApplicable as missing:
        pytest.skip(f"mori, {executor}: {missing}")
