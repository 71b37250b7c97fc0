"""What the shm transport asks of the peer's process and of its descriptor."""

import os
import threading

import msgspec
import numpy as np
import pytest
from peer_process import SPAWN, eventually

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region, SharedMemory
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.process import ProcessKey, ProcessWatch
from kvbaton.transport.shm import ShmDescriptor, ShmTransport


@pytest.fixture
def ends():
    writer, target = ShmTransport("writer"), ShmTransport("target")
    memory = SharedMemory(4096)
    memory.array[:] = CANARY
    writer.register([Region.of(np.arange(64, dtype=np.uint8))])
    yield writer, target, memory
    writer.close()
    target.close()
    memory.close()


def changed(descriptor, **fields):
    described = msgspec.msgpack.decode(descriptor, type=ShmDescriptor)
    process = {name: fields.pop(name) for name in list(fields) if name in ProcessKey.__struct_fields__}
    return msgspec.msgpack.encode(
        msgspec.structs.replace(described, process=msgspec.structs.replace(described.process, **process), **fields)
    )


def finished(transport):
    ended = []
    assert eventually(lambda: ended.extend(transport.poll()) or ended)
    return ended[0]


def test_regions_that_are_parts_of_one_file(ends):
    writer, target, memory = ends
    parts = [Region(memory.address + at, 64, shared=memory) for at in (128, 0)]
    target.register(parts)
    peer = writer.connect(target.describe())
    writer.write(peer, [rows(64, [0], [0], region=0)], 1)
    assert not finished(writer).error
    np.testing.assert_array_equal(memory.array[128:192], np.arange(64))
    assert (memory.array[:128] == CANARY).all()
    assert (memory.array[192:] == CANARY).all()


def test_a_small_write_is_over_when_write_returns(ends):
    """Several transfers too; without a thread, and with one end."""
    writer, target, memory = ends
    target.register([Region.of(memory)])
    peer = writer.connect(target.describe())
    woken = []
    writer.set_waker(lambda: woken.append(True))
    threads = threading.active_count()
    writer.write(peer, [rows(16, [at], [3 * at], stride=16) for at in range(4)], 1)
    assert (writer.poll(), woken, threading.active_count()) == ([(1, "")], [True], threads)
    expected = np.full((256, 16), CANARY, dtype=np.uint8)
    expected[:12:3] = np.arange(64).reshape(4, 16)
    np.testing.assert_array_equal(memory.array.reshape(256, 16), expected)
    writer.disconnect(peer)
    assert writer.poll() == []


def test_a_plain_region_beside_a_shared_one_is_refused_when_written_to(ends):
    writer, target, memory = ends
    target.register([Region.of(memory), Region.of(np.zeros(64, dtype=np.uint8))])
    peer = writer.connect(target.describe())
    with pytest.raises(TransportError, match="region 1"):
        writer.write(peer, [rows(64, [0], [0], region=1)], 1)
    writer.write(peer, [rows(64, [0], [0])], 2)
    assert not finished(writer).error


OTHERS = {
    "another host": ({"boot": "another"}, "another host"),
    "another pid namespace": ({"namespace": "pid:[1]"}, "pid namespace"),
    "a later process of the same pid": ({"start": 1}, "has ended"),
    "no process": ({"pid": 2**22 + 5}, "has ended"),
    "a pid that is no pid": ({"pid": 2**63}, "has ended"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_memory_that_cannot_be_the_peers_is_refused(ends, other):
    writer, target, memory = ends
    fields, message = OTHERS[other]
    target.register([Region.of(memory)])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportUnavailable, match=message):
        writer.connect(changed(target.describe(), **fields))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_region_that_ends_behind_its_file_is_refused(ends):
    writer, target, memory = ends
    target.register([Region(memory.address + 4000, 97, shared=memory)])
    with pytest.raises(TransportError, match="ends at byte 4097"):
        writer.connect(target.describe())


def wait_for_the_end(connection):
    connection.send(ProcessKey.own())
    connection.recv()


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_process_is_dead_before_it_is_reaped(monkeypatch, pidfd):
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=wait_for_the_end, args=(there,), daemon=True)
    process.start()
    assert here.poll(30)
    watch = ProcessWatch(here.recv())
    assert not watch.dead()
    process.kill()
    assert eventually(watch.dead)
    assert process.pid is not None
    assert os.path.exists(f"/proc/{process.pid}")
    watch.close()
    watch.close()
    assert watch.dead()
    process.join()


def test_own_process_is_alive_and_stays_the_same():
    assert ProcessKey.own() == ProcessKey.own()
    watch = ProcessWatch(ProcessKey.own())
    assert not watch.dead()
    watch.close()


def test_a_fence_is_no_proof_any_more_once_closed(ends):
    writer, target, _ = ends
    target.admit(writer.describe())
    target.close()
    assert not target.fence(writer.instance)
