"""Shared memory: found by descriptor, proven by inode, gone with its owner."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from peer_process import SPAWN, eventually

from kvbaton.errors import TransportUnavailable
from kvbaton.memory import AttachedMemory, Region, SharedMemory


def test_two_mappings_are_the_same_memory():
    memory = SharedMemory(5000)
    attached = AttachedMemory(memory.key)
    assert attached.address != memory.address
    assert not memory.array.any()
    memory.array[4999] = 7
    attached.array[0] = 9
    assert (attached.array[4999], memory.array[0]) == (7, 9)
    memory.close()
    assert attached.array[4999] == 7, "a mapping outlives the owner's"
    attached.close()
    with pytest.raises(TransportUnavailable, match="closed"):
        _ = attached.array


def test_close_twice_and_with_views_held():
    memory = SharedMemory(4096)
    view = memory.array[10:20]
    memory.close()
    memory.close()
    view[:] = 3
    assert view.sum() == 30


def test_memory_that_nobody_holds_gives_its_descriptor_back():
    before = os.listdir("/proc/self/fd")
    SharedMemory(4096).array[0] = 1
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("field", ["inode", "device", "nbytes"])
def test_another_file_behind_the_descriptor_is_refused(field):
    memory = SharedMemory(4096)
    key = memory.key._replace(**{field: getattr(memory.key, field) + 1})
    with pytest.raises(TransportUnavailable, match="not the peer's shared memory"):
        AttachedMemory(key)
    memory.close()


def test_an_unsealed_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        status = os.fstat(file.fileno())
        key = (os.getpid(), file.fileno(), status.st_dev, status.st_ino, 4096)
        with pytest.raises(TransportUnavailable):
            AttachedMemory(SharedMemory(1).key._make(key))


def test_the_owner_cannot_shrink_it_under_a_mapping():
    memory = SharedMemory(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 4096)
    memory.close()


def test_closed_memory_cannot_be_found():
    memory = SharedMemory(4096)
    key = memory.key
    memory.close()
    with pytest.raises(TransportUnavailable):
        AttachedMemory(key)


def hold(connection):
    memory = SharedMemory(1 << 20)
    memory.array[:] = 5
    connection.send(memory.key)
    connection.recv()


def test_nothing_is_left_after_a_kill():
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=hold, args=(there,), daemon=True)
    process.start()
    assert here.poll(30)
    key = here.recv()
    attached = AttachedMemory(key)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (attached.array == 5).all(), "pages stay with those who mapped them"
    attached.close()
    with pytest.raises(TransportUnavailable, match="cannot open"):
        AttachedMemory(key)
    assert eventually(lambda: not [name for name in os.listdir("/dev/shm") if "kvbaton" in name])


def test_a_platform_without_memfd_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TransportUnavailable, match="darwin lacks memfd_create"):
        SharedMemory(4096)


def test_regions_are_made_of_what_holds_bytes():
    memory = SharedMemory(64)
    array = np.zeros((4, 8), dtype=np.float32)
    assert Region.of(memory)[:4] == (memory.address, 64, "host", memory)
    assert Region.of(array)[:4] == (array.ctypes.data, 128, "host", None)
    memory.close()


def test_a_region_of_a_tensor():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert Region.of(tensor)[:4] == (tensor.data_ptr(), 30, "host", None)
    with pytest.raises(ValueError, match="contiguous"):
        Region.of(tensor[:, :2])


@pytest.mark.parametrize(
    ("memory", "error"), [(np.zeros((4, 4))[:, 1], ValueError), (b"bytes", TypeError), (7, TypeError)]
)
def test_what_is_no_region(memory, error):
    with pytest.raises(error):
        Region.of(memory)


def flags(address):
    """The flags of the mapping at that address, as the kernel shows them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:") and inside:
            return line.split()[1:]
        limits = line.split()[0].split("-")
        if len(limits) == 2 and not line.startswith("Vm"):
            inside = int(limits[0], 16) <= address < int(limits[1], 16)
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_both_mappings_ask_for_huge_pages():
    memory = SharedMemory(8 << 20)
    attached = AttachedMemory(memory.key)
    assert "hg" in flags(memory.address)
    assert "hg" in flags(attached.address)
    attached.close()
    memory.close()
