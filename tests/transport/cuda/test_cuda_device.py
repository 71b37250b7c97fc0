"""The cuda transport, and packed device memory, on a real GPU."""

import os
import signal
import time

import device
import numpy as np
import pytest
from device import TorchMemory, needs_device
from peer_process import ROW, content, eventually, receive, started

from kvbaton.errors import TransportUnavailable
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.cuda.transport import CudaTransport
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport
from kvbaton.transport.tcp import TcpTransport

pytestmark = [pytest.mark.gpu, needs_device]

MIB = 1 << 20


def replace_tcp(old, instance):
    port = old.port
    old.close()
    return TcpTransport(instance, bind=f"127.0.0.1:{port}")


def memory_fabric(instance):
    options = {"executor": "packed", "slabs": "16", "staging_slabs": "4", "slab_bytes": "1MiB"}
    return FabricTransport(instance, MemoryFabric(instance), options=options)


def on_device(nbytes, shared):
    return TorchMemory(nbytes)


SUITES = {
    "cuda": Conformance(CudaTransport, memory=on_device),
    "tcp": Conformance(TcpTransport, memory=on_device, replace=replace_tcp),
    "memory": Conformance(memory_fabric, memory=on_device),
}


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("transport", SUITES)
def test_promise_is_kept_for_device_memory(transport, check):
    try:
        SUITES[transport].run(check)
    except NotApplicable as missing:
        pytest.skip(f"{transport}: {missing}")


@pytest.fixture
def transport():
    transport = CudaTransport("here")
    yield transport
    transport.close()


def test_content_arrives_in_memory_of_another_process(transport):
    values = np.random.default_rng(1).integers(0, CANARY, 4 * MIB, dtype=np.uint8)
    source = TorchMemory(4 * MIB)
    source.fill(values)
    transport.register([source.region])
    order = np.random.default_rng(2).permutation(1024)
    with started(device.destination, 8 * MIB) as (_, connection):
        peer = transport.connect(receive(connection))
        transport.write(peer, [rows(4096, order, order[::-1], stride=8192)], 1)
        ended = []
        assert eventually(lambda: ended.extend(transport.poll()) or ended)
        assert [tuple(completion) for completion in ended] == [(1, "")]
        found = content(connection).reshape(1024, 8192)
        transport.disconnect(peer)
    np.testing.assert_array_equal(found[order[::-1], :4096], values.reshape(1024, 4096)[order])
    assert (found[:, 4096:] == CANARY).all()


def test_a_killed_destination_harms_neither_tickets_nor_the_device(transport):
    source = TorchMemory(256 * MIB)
    transport.register([source.region])
    everything = np.arange(256)
    with started(device.destination, 256 * MIB) as (process, connection):
        descriptor = receive(connection)
        peer = transport.connect(descriptor)
        for ticket in range(400):
            transport.write(peer, [rows(MIB, everything, everything)], ticket)
        ended = {}

        def collect():
            ended.update(dict(transport.poll()))
            return ended

        assert eventually(collect)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: len(collect()) == 400)
        assert eventually(lambda: peer.enter())
        transport.write(peer, [rows(MIB, [0], [0])], 1000)
        assert eventually(lambda: 1000 in collect())
        assert "has ended" in ended[1000]
        with pytest.raises(TransportUnavailable):
            transport.connect(descriptor)
        transport.disconnect(peer)
    # The device still works, for the next peer too.
    source.fill(5)
    with started(device.destination, MIB) as (_, connection):
        peer = transport.connect(receive(connection))
        transport.write(peer, [rows(MIB, [0], [0])], 2000)
        assert eventually(lambda: 2000 in collect())
        assert not ended[2000]
        assert (content(connection) == 5).all()
        transport.disconnect(peer)


def test_a_killed_writer_is_fenced_and_nothing_lands_afterwards(transport):
    memory = TorchMemory(256 * MIB)
    memory.fill(CANARY)
    transport.register([memory.region])
    with started(device.writer, 256 * MIB, transport.describe()) as (process, connection):
        transport.admit(receive(connection))
        connection.send("go")
        assert eventually(lambda: memory.read()[-1] not in (CANARY, 0)), "nothing was written"
        assert transport.fence("writer") is False
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: transport.fence("writer"))
        seen = memory.read()
        time.sleep(0.5)
        np.testing.assert_array_equal(memory.read(), seen)


def test_when_the_work_of_a_killed_writer_ends(transport, capsys):
    """How long after the end of its process memory still changes; a measurement, for the time that a fence waits."""
    memory = TorchMemory(256 * MIB)
    memory.fill(CANARY)
    transport.register([memory.region])
    late = []
    for _ in range(5):
        with started(device.writer, 256 * MIB, transport.describe()) as (process, connection):
            transport.admit(receive(connection))
            connection.send("go")
            assert eventually(lambda: memory.read()[-1] not in (CANARY, 0))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            ended = time.monotonic()
            before, last = memory.tensor.clone(), 0.0
            while time.monotonic() - ended < 0.5:
                now = memory.tensor.clone()
                if not bool((now == before).all()):
                    last = time.monotonic() - ended
                before = now
            late.append(last)
        memory.fill(CANARY)
    with capsys.disabled():
        print(f"\nlast change after the end of the writer's process, seconds: {late}")
    assert max(late) < 0.5


def test_memory_of_expandable_segments(transport, monkeypatch):
    # Before the variable is set, which is read with the first allocation of a process.
    memory = TorchMemory(64 << 10)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    memory.fill(CANARY)
    transport.register([memory.region])
    with started(device.expandable) as (_, connection):
        descriptor = receive(connection)
        with pytest.raises(TransportUnavailable, match="expandable_segments:False"):
            transport.connect(descriptor)
        connection.send(transport.describe())
        # It can be read from.
        assert receive(connection) == ""
        assert (memory.read() == 7).all()


def test_peers_that_come_and_die_leave_nothing(transport):
    source = TorchMemory(ROW)
    transport.register([source.region])
    counts = []
    for number in range(4):
        with started(device.destination, ROW) as (process, connection):
            peer = transport.connect(receive(connection))
            transport.write(peer, [rows(ROW, [0], [0])], number)
            assert eventually(transport.poll)
            process.kill()
            process.join()
            transport.disconnect(peer)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[3] == counts[1]


@pytest.mark.skipif(device.count() < 2, reason="needs two GPUs that reach each other")
@pytest.mark.parametrize("visible", ["0,1", "1,0"])
def test_content_arrives_on_another_gpu(monkeypatch, visible):
    """The other process counts the devices as ``visible`` says; its memory is always on the second one."""
    values = np.random.default_rng(1).integers(0, CANARY, 4 * MIB, dtype=np.uint8)
    source = TorchMemory(4 * MIB)
    source.fill(values)
    transport = CudaTransport("here")
    transport.register([source.region])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    order = np.random.default_rng(2).permutation(1024)
    with started(device.destination, 8 * MIB, device=visible.split(",").index("1")) as (_, connection):
        peer = transport.connect(receive(connection))
        for ticket in range(20):
            transport.write(peer, [rows(4096, order, order[::-1], stride=8192)], ticket)
        ended = []
        assert eventually(lambda: ended.extend(transport.poll()) or len(ended) == 20)
        assert not any(completion.error for completion in ended)
        found = content(connection).reshape(1024, 8192)
        transport.disconnect(peer)
    transport.close()
    np.testing.assert_array_equal(found[order[::-1], :4096], values.reshape(1024, 4096)[order])
    assert (found[:, 4096:] == CANARY).all()


@pytest.mark.skipif(device.count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_hidden_is_named(monkeypatch):
    source = TorchMemory(MIB, 1)
    transport = CudaTransport("here")
    transport.register([source.region])
    descriptor = transport.describe()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with started(device.blind, descriptor) as (_, connection):
        assert "CUDA_VISIBLE_DEVICES" in receive(connection)
    transport.close()
