"""What the cuda transport asks of devices, allocations and processes; over a fake device."""

import os
import signal
import time

import cuda_process
import msgspec
import numpy as np
import pytest
from fake_memory import DeviceMemory
from peer_process import ROW, content, eventually, receive, started

from kvbaton.cuda.fake import FakeDriver, FakeMachine
from kvbaton.errors import RowsError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.cuda import transport as module
from kvbaton.transport.cuda.descriptor import CudaDescriptor
from kvbaton.transport.cuda.transport import CudaTransport

MIB = 1 << 20


@pytest.fixture
def machine():
    machine = FakeMachine(devices=2)
    yield machine
    assert machine.misuses == []


@pytest.fixture
def ends(machine):
    """Makes transports; each sees the devices that it is told."""
    made = []

    def make(name, visible=None):
        made.append(CudaTransport(name, driver=FakeDriver(machine, visible)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def memory_of(machine, nbytes, device=0, **options):
    memory = DeviceMemory(machine, nbytes, device, **options)
    memory.fill(CANARY)
    return memory


def finished(transport):
    ended = []
    assert eventually(lambda: ended.extend(transport.poll()) or ended)
    return ended[0]


def test_an_allocation_is_opened_once_for_all_of_its_regions(machine, ends):
    writer, target = ends("writer"), ends("target")
    source, memory = memory_of(machine, 64), memory_of(machine, 4096)
    source.fill(7)
    parts = [Region(memory.base + at, 64, "cuda") for at in (128, 0, 1024)]
    writer.register([source.region])
    target.register(parts)
    peer = writer.connect(target.describe())
    assert writer._driver.opens == 1
    writer.write(peer, [rows(64, [0], [0], region=2)], 1)
    assert not finished(writer).error
    found = memory.read()
    assert (found[1024:1088] == 7).all()
    assert (np.delete(found, np.s_[1024:1088]) == CANARY).all()
    writer.disconnect(peer)
    assert writer._driver.opened == 0


def test_a_region_that_cannot_be_exported_says_what_to_change(machine, ends, caplog):
    writer, target = ends("writer"), ends("target")
    closed, shared = memory_of(machine, 64, exportable=False), memory_of(machine, 64)
    # It can be read from all the same.
    writer.register([closed.region])
    target.register([closed.region])
    assert "peers cannot write into region 0" in caplog.text
    with pytest.raises(TransportUnavailable, match=r"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
        writer.connect(target.describe())
    mixed = ends("mixed")
    mixed.register([closed.region, shared.region])
    peer = writer.connect(mixed.describe())
    assert [peer.reaches(region) for region in (0, 1)] == [False, True]
    writer.write(peer, [rows(64, [0], [0], region=1)], 1)
    assert not finished(writer).error


def test_host_memory_beside_that_of_a_device_is_neither_read_nor_written(machine, ends):
    writer, target = ends("writer"), ends("target")
    source, memory = memory_of(machine, 64), memory_of(machine, 64)
    host = Region.of(np.zeros(64, np.uint8))
    writer.register([host, source.region])
    target.register([memory.region, host])
    assert [writer.reads(region) for region in (0, 1)] == [False, True]
    peer = writer.connect(target.describe())
    assert [peer.reaches(region) for region in (0, 1)] == [True, False]
    with pytest.raises(RowsError):
        writer.write(peer, [rows(64, [0], [0])], 1)


@pytest.mark.parametrize("kinds", ["host only", "two devices", "another device"])
def test_memory_that_is_not_on_one_device_is_refused(machine, ends, kinds):
    transport = ends("transport")
    memory, other = memory_of(machine, 64, 0), memory_of(machine, 64, 1)
    regions = {
        "host only": [Region.of(np.zeros(64, np.uint8))],
        "two devices": [memory.region, other.region],
        "another device": [memory.region._replace(device=1)],
    }
    with pytest.raises(TransportUnavailable):
        transport.register(regions[kinds])


def test_devices_are_told_by_uuid_whatever_their_numbers_are(machine, ends):
    """Each side calls its own device 0, and the other one's 1."""
    writer, target = ends("writer", visible=(0, 1)), ends("target", visible=(1, 0))
    source, memory = memory_of(machine, 64, 0), memory_of(machine, 64, 1)
    source.fill(9)
    writer.register([source.region])
    target.register([memory.region._replace(device=0)])
    peer = writer.connect(target.describe())
    writer.write(peer, [rows(64, [0], [0])], 1)
    assert not finished(writer).error
    assert (memory.read() == 9).all()


def test_a_device_that_is_not_seen_or_not_linked_is_refused(ends):
    apart = FakeMachine(devices=2, links=())
    source, memory = memory_of(apart, 64, 0), memory_of(apart, 64, 1)
    target = CudaTransport("target", driver=FakeDriver(apart))
    target.register([memory.region])
    blind = CudaTransport("blind", driver=FakeDriver(apart, visible=(0,)))
    unlinked = CudaTransport("unlinked", driver=FakeDriver(apart))
    for writer, message in ((blind, "CUDA_VISIBLE_DEVICES"), (unlinked, "cannot address the memory of device 1")):
        writer.register([source.region])
        with pytest.raises(TransportUnavailable, match=message):
            writer.connect(target.describe())
        writer.close()
    target.close()


OTHERS = {
    "another host": ({"boot": "another"}, "another host"),
    "another pid namespace": ({"namespace": "pid:[1]"}, "pid namespace"),
    "a later process of the same pid": ({"start": 1}, "has ended"),
    "no process": ({"pid": 2**22 + 5}, "has ended"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_device_memory_that_cannot_be_the_peers_is_refused(machine, ends, other):
    writer, target = ends("writer"), ends("target")
    writer.register([memory_of(machine, 64).region])
    target.register([memory_of(machine, 64).region])
    fields, message = OTHERS[other]
    described = msgspec.msgpack.decode(target.describe(), type=CudaDescriptor)
    process = msgspec.structs.replace(described.process, **fields)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportUnavailable, match=message):
        writer.connect(msgspec.msgpack.encode(msgspec.structs.replace(described, process=process)))
    assert len(os.listdir("/proc/self/fd")) == before
    assert writer._driver.opened == 0


def test_a_region_that_ends_behind_its_allocation_is_refused(machine, ends):
    writer, target = ends("writer"), ends("target")
    memory = memory_of(machine, 64)
    writer.register([memory_of(machine, 64).region])
    with pytest.raises(TransportUnavailable, match="allocation"):
        ends("wrong").register([Region(memory.base + 8, 64, "cuda")])
    target.register([memory.region])
    described = msgspec.msgpack.decode(target.describe(), type=CudaDescriptor)
    (region,) = described.regions
    for change in ({"offset": 1}, {"allocation": 1}):
        wrong = msgspec.structs.replace(described, regions=(msgspec.structs.replace(region, **change),))
        with pytest.raises(TransportError):
            writer.connect(msgspec.msgpack.encode(wrong))
    (shared,) = described.allocations
    larger = msgspec.structs.replace(described, allocations=(msgspec.structs.replace(shared, nbytes=128),))
    with pytest.raises(TransportUnavailable, match="128"):
        writer.connect(msgspec.msgpack.encode(larger))
    assert writer._driver.opened == 0


def test_a_device_that_fails_ends_every_ticket_with_its_words(machine, ends):
    writer, target = ends("writer"), ends("target")
    writer.register([memory_of(machine, 64).region])
    target.register([memory_of(machine, 64).region])
    peer = writer.connect(target.describe())
    machine.delay = 0.05
    writer.write(peer, [rows(64, [0], [0])], 1)
    machine.failure = "an uncorrectable error"
    writer.write(peer, [rows(64, [0], [0])], 2)
    ended = {}
    assert eventually(lambda: ended.update(dict(writer.poll())) or len(ended) == 2)
    assert all("an uncorrectable error" in error for error in ended.values())


def test_a_device_that_cannot_copy_is_refused_before_anything_depends_on_it(machine, ends, monkeypatch):
    memory = memory_of(machine, 64)
    broken = ends("broken")
    monkeypatch.setattr(broken._driver.kernels, "copy_boxes", lambda *_: None)
    with pytest.raises(TransportUnavailable, match="device 0 cannot copy: what came is not what was sent"):
        broken.register([memory.region])
    absent = ends("absent")
    absent._driver.kernels = None
    with pytest.raises(TransportUnavailable, match="device 0 cannot copy: AttributeError"):
        absent.register([memory.region])


def test_a_disconnect_waits_for_what_the_device_has_begun(machine, ends):
    writer, target = ends("writer"), ends("target")
    memory = memory_of(machine, 64)
    writer.register([memory_of(machine, 64).region])
    target.register([memory.region])
    peer = writer.connect(target.describe())
    machine.delay = 0.05
    for ticket in range(4):
        writer.write(peer, [rows(64, [0], [0])], ticket)
    writer.disconnect(peer)
    ended = dict(writer.poll())
    assert len(ended) == 4
    assert any("disconnected" in error for error in ended.values())
    # That nothing was under way when the memory was closed is what the fixture checks.


def test_content_arrives_in_device_memory_of_another_process(machine, ends):
    writer = ends("writer")
    source = memory_of(machine, 4 * MIB)
    values = np.random.default_rng(1).integers(0, CANARY, 4 * MIB, dtype=np.uint8)
    source.fill(values)
    writer.register([source.region])
    order = np.random.default_rng(2).permutation(1024)
    with started(cuda_process.destination, 8 * MIB) as (process, connection):
        descriptor = receive(connection)
        peer = writer.connect(descriptor)
        writer.write(peer, [rows(4096, order, order[::-1], stride=8192)], 1)
        assert finished(writer) == (1, "")
        found = content(connection).reshape(1024, 8192)
        np.testing.assert_array_equal(found[order[::-1], :4096], values.reshape(1024, 4096)[order])
        assert (found[:, 4096:] == CANARY).all()
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: peer.enter())
        writer.write(peer, [rows(4096, [0], [0])], 2)
        assert "has ended" in finished(writer).error
        with pytest.raises(TransportUnavailable):
            writer.connect(descriptor)
        writer.disconnect(peer)
    assert writer._driver.opened == 0


@pytest.mark.parametrize("settle", [0.0, 3600.0])
def test_a_writer_is_fenced_by_its_death_and_the_end_of_its_work(machine, monkeypatch, settle):
    monkeypatch.setattr(module, "SETTLE_SECONDS", settle)
    target = CudaTransport("target", driver=FakeDriver(machine))
    memory = memory_of(machine, 8 * ROW)
    target.register([memory.region])
    with started(cuda_process.writer, 8 * ROW, target.describe()) as (process, connection):
        target.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.read()[-1] not in (CANARY, 0)), "nothing was written"
        assert target.fence("writer") is False
        os.kill(process.pid, signal.SIGKILL)
        if settle:
            process.join()
            time.sleep(0.05)
            assert target.fence("writer") is False
        else:
            assert eventually(lambda: target.fence("writer"))
            seen = memory.read()
            time.sleep(0.1)
            np.testing.assert_array_equal(memory.read(), seen)
            assert target.fence("writer") is True
    target.close()
