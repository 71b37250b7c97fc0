"""Every promise of the transport contract where the memory is a device's and the transport carries packed bytes.

The device is a fake: host memory stands for a GPU's.
"""

import contextlib

import numpy as np
import pytest
from fake_memory import DeviceMemory
from peer_process import eventually

import kvbaton.cuda
from kvbaton.copy.movers import KEPT_LANES, device_mover
from kvbaton.cuda.fake import FakeDriver, FakeMachine, on_host
from kvbaton.errors import RowsError, TransportUnavailable
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport.conformance import Conformance, Memory, NotApplicable
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport
from kvbaton.transport.tcp import TcpTransport

HOST = np.zeros(64, np.uint8)


def replace_tcp(old, instance):
    port = old.port
    old.close()
    return TcpTransport(instance, bind=f"127.0.0.1:{port}")


@pytest.fixture
def machine():
    machine = FakeMachine()
    with kvbaton.cuda.use(FakeDriver(machine)):
        mover = device_mover(0)
        # All that it keeps is there from the beginning, so that nothing looks like a leak.
        with contextlib.ExitStack() as lanes:
            for _ in range(KEPT_LANES):
                stream, stage = lanes.enter_context(mover._lane())
                kvbaton.cuda.driver().to_host(HOST.ctypes.data, stage, HOST.nbytes, stream)
        yield machine
        mover.close()
    assert machine.misuses == []
    assert machine.mapped == 0, "memory is left"


class OneWay(Conformance):
    """The sources of each pair are on the device, and all other memory on the host; or the other way round."""

    def __init__(self, make, machine, to_host, **options):
        super().__init__(make, memory=self.make_memory, **options)
        self.machine = machine
        self.to_host = to_host
        self.sources_left = 0

    def pair(self, source_bytes, destination_bytes):
        self.sources_left = len(source_bytes)
        return super().pair(source_bytes, destination_bytes)

    def make_memory(self, nbytes, shared):
        source, self.sources_left = self.sources_left > 0, max(0, self.sources_left - 1)
        return DeviceMemory(self.machine, nbytes) if source is self.to_host else Memory(nbytes, shared=shared)


def suite(kinds, machine, make, **options):
    if kinds == "device to device":
        return Conformance(make, memory=lambda nbytes, shared: DeviceMemory(machine, nbytes), **options)
    return OneWay(make, machine, kinds == "device to host", **options)


CONTENT = (
    "visible_content", "strided_boxes", "every_run_length", "casts", "large_unit", "many_units", "remote_bounds",
    "disconnect", "fence_of_a_writer",
)  # fmt: skip
"""What is enough where one side only is a device's."""
CASES = [
    (kinds, check)
    for kinds, checks in (
        ("device to device", Conformance.names()),
        ("device to host", CONTENT),
        ("host to device", CONTENT),
    )
    for check in checks
]


@pytest.mark.parametrize(("kinds", "check"), CASES)
def test_promise_is_kept_over_tcp(machine, kinds, check):
    try:
        suite(kinds, machine, TcpTransport, replace=replace_tcp).run(check)
    except NotApplicable as missing:
        pytest.skip(f"tcp: {missing}")


@pytest.mark.parametrize(("kinds", "check"), CASES)
def test_promise_is_kept_over_a_fabric_that_reaches_host_memory_only(machine, kinds, check):
    """Its slabs are host memory, whatever the rows are; rows of the host may go without."""
    executor = "packed" if kinds == "device to device" else "auto"
    options = {"executor": executor, "slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
    fabrics = []

    def make(instance):
        fabrics.append(MemoryFabric(instance))
        return FabricTransport(instance, fabrics[-1], options=options)

    try:
        suite(kinds, machine, make).run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
    assert not [misuse for fabric in fabrics for misuse in fabric.misuses]


class DeviceFabric(MemoryFabric):
    """A library that reaches memory of the device too."""

    memory_kinds = frozenset({"host", "cuda"})

    def register(self, regions):
        super().register(regions)
        self._bases = on_host(self._bases)

    def connect(self, descriptor, name):
        peer = super().connect(descriptor, name)
        peer.bases = on_host(peer.bases)
        return peer


DEVICE_SLABS = [
    *(("packed", *case) for case in CASES),
    *(("auto", "device to device", check) for check in CONTENT),
]


@pytest.mark.parametrize(("executor", "kinds", "check"), DEVICE_SLABS)
def test_promise_is_kept_over_a_fabric_whose_slabs_are_on_the_device(machine, executor, kinds, check):
    options = {"executor": executor, "slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB", "slab_memory": "cuda"}
    fabrics = []

    def make(instance):
        fabrics.append(DeviceFabric(instance))
        return FabricTransport(instance, fabrics[-1], options=options)

    try:
        suite(kinds, machine, make).run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
    assert not [misuse for fabric in fabrics for misuse in fabric.misuses]


def test_slabs_on_a_device_that_the_library_does_not_reach_are_refused(machine):
    with pytest.raises(TransportUnavailable, match=r"memory does not reach cuda memory here, .* option slab_memory"):
        FabricTransport("host only", MemoryFabric("host only"), options={"slab_memory": "cuda"})


def test_a_transfer_between_several_kinds_of_memory_is_refused(machine):
    device, host = DeviceMemory(machine, 64), Memory(64, shared=False)
    writer, target = TcpTransport("writer"), TcpTransport("target")
    for transport in (writer, target):
        transport.register([device.region, host.region])
    peer = writer.connect(target.describe())
    target.admit(writer.describe())
    good, bad = (np.array([(at, 0, 64, 1, 0, 0, 0) for at in regions]) for regions in ((0, 0), (0, 1)))
    shape, one = np.array([(1, 1, 8)] * 2), np.zeros(1, np.int64)
    with pytest.raises(RowsError, match="several kinds of memory"):
        writer.write(peer, [Transfer(Boxes(shape, bad, good), one, one)], 1)
    writer.write(peer, [Transfer(Boxes(shape, good, bad), one, one)], 2)
    ended = []
    assert eventually(lambda: ended.extend(writer.poll()) or ended)
    assert "several kinds of memory" in ended[0].error
    writer.close()
    target.close()
    device.close()
