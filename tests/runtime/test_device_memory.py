"""Rooms whose rows are a device's: mapped, or packed by what carries bytes only. The device is a fake."""

import pytest
from rank_world import FAST, Model, Rank, in_region, succeeded, wait_released

import kvbaton as kb
import kvbaton.cuda
from kvbaton.copy.movers import device_mover
from kvbaton.cuda.fake import FakeDriver, FakeMachine

MODEL = Model(("kv", "conv", "aux"))
AUX_BY_TRANSPORT = kb.Settings(
    heartbeat_seconds=0.2, peer_timeout_seconds=1.0, connect_seconds=0.5, handshake_seconds=5.0, aux="fabric"
)


class DeviceMemory:
    """Memory of the fake device that looks as `SharedMemory` does."""

    def __init__(self, machine, nbytes):
        self.machine = machine
        self.address = machine.allocate(nbytes)
        self.array = machine.array(self.address)
        self.array[:] = 0xA5
        self.host = machine.at(self.address).memory
        self.nbytes = nbytes

    def close(self):
        del self.array
        self.machine.free(self.address)


class DeviceRank(Rank):
    """A rank on the device; the components ``on_host`` lie in a second region, which is host memory."""

    machine = None
    on_host = ()

    def start(self, role, registry, **options):
        host_only = set(MODEL.parts) == set(self.on_host)
        if not host_only:
            self.memory.close()
            self.memory = DeviceMemory(self.machine, self.memory.nbytes)
        layout = self.layout
        for name in () if host_only else self.on_host:
            layout = in_region(layout, name, 1)
        memory = self.memory
        regions = (
            [kb.Region.of(memory)]
            if host_only
            # The same bytes: each component is used in its own region alone.
            else [kb.Region(memory.address, memory.nbytes, "cuda"), kb.Region.of(memory.host)]
        )
        self.manager = kb.Manager(layout, regions, role=role, registry=registry, **{"settings": FAST, **options})
        return self


@pytest.fixture
def start():
    """Makes a prefill and a decode rank, each with some components on the host."""
    machine, registry, made = FakeMachine(), kb.MemoryRegistry(), []

    def make(prefill_on_host=("aux",), decode_on_host=("aux",), **options):
        for role, on_host in (("prefill", prefill_on_host), ("decode", decode_on_host)):
            rank = DeviceRank(MODEL.layout())
            rank.machine, rank.on_host = machine, on_host
            made.append(rank.start(role, registry, **options))
        return made

    with kvbaton.cuda.use(FakeDriver(machine)):
        yield make
        for rank in made:
            rank.close()
        device_mover(0).close()
    assert machine.misuses == []
    assert machine.mapped == 0


def hand_over(source, destination):
    source.fill("kv", [0, 1], (0, 8))
    source.fill("conv", [1])
    source.fill("aux", [6])
    sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
    receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=3)
    sender.send({"kv": [0]}, (0, 4))
    sender.finish({"kv": [1], "conv": [1]}, (4, 8), aux=6)
    succeeded(sender, receiver)
    wait_released(sender, receiver)
    destination.check("kv", [4, 5], (0, 8))
    destination.check("conv", [2])
    destination.check("aux", [3])
    destination.check_rest()
    (peer,) = destination.manager.peers
    return peer


def test_auto_maps_device_memory_and_sends_aux_data_beside_it(start):
    source, destination = start(transports="auto", settings=AUX_BY_TRANSPORT)
    assert source.manager.transports[0] == "cuda"
    assert "shm transport reaches only host memory" in source.manager.left_out["shm"]
    peer = hand_over(source, destination)
    assert (peer.transport, peer.aux) == ("cuda", "control")
    assert "cuda: the peer's memory is addressed directly" in peer.reason
    assert "it cannot read region 1 of this rank (component aux)" in peer.reason


@pytest.mark.parametrize("transport", ["cuda", "tcp", "memory"])
@pytest.mark.parametrize("aux", [FAST, AUX_BY_TRANSPORT])
def test_everything_on_the_device(start, transport, aux):
    source, destination = start((), (), transports=[transport], settings=aux)
    peer = hand_over(source, destination)
    assert (peer.transport, peer.aux) == (transport, aux.aux)


ELSEWHERE = {
    "the destination is host memory": (("aux",), MODEL.parts, ""),
    "the source is host memory": (MODEL.parts, ("aux",), ""),
    "a component of the source is host memory": (
        ("aux", "conv"),
        ("aux",),
        "cuda: it cannot read region 1 of this rank (component conv)",
    ),
    "a component of the destination is host memory": (
        ("aux",),
        ("aux", "conv"),
        "cuda: it cannot write into region 1 of the decode rank (component conv)",
    ),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_what_cannot_be_mapped_is_packed(start, where):
    prefill_on_host, decode_on_host, reason = ELSEWHERE[where]
    source, destination = start(prefill_on_host, decode_on_host, transports=["cuda", "tcp"])
    peer = hand_over(source, destination)
    assert peer.transport == "tcp"
    assert reason in peer.reason
