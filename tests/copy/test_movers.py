"""PackedBytes streams from and to memory of any kind; the device is a fake."""

import numpy as np
import pytest

import kvbaton.cuda
from kvbaton.copy import gather
from kvbaton.copy.movers import STAGE_BYTES, Movers, PackedBytes, device_mover
from kvbaton.cuda.fake import FakeDriver, FakeMachine
from kvbaton.errors import RowsError, TransportError
from kvbaton.memory import Region

ROW = 4096
SHAPE = np.array([(1, 1, ROW)])
SIDE = np.array([(0, 0, ROW, 1, 0, 0, 0)])


@pytest.fixture
def machine():
    machine = FakeMachine()
    with kvbaton.cuda.use(FakeDriver(machine)):
        yield machine
        device_mover(0).close()
    assert machine.misuses == []


def device_region(machine, content):
    base = machine.allocate(len(content))
    machine.array(base)[:] = content
    return Region(base, len(content), "cuda")


@pytest.mark.parametrize(("begin", "nbytes"), [(0, 2 * STAGE_BYTES), (5, 2 * STAGE_BYTES - 8), (STAGE_BYTES + 1, 17)])
def test_a_stream_is_the_same_from_a_device_as_from_the_host(machine, begin, nbytes):
    content = np.random.default_rng(1).integers(0, 256, 2 * STAGE_BYTES, dtype=np.uint8)
    region = device_region(machine, content)
    units = np.random.default_rng(2).permutation(len(content) // ROW)
    movers, bases = Movers([region]), np.array([region.address])
    wanted, found = bytearray(nbytes), bytearray(nbytes)
    gather(SHAPE, SIDE, units, np.array([content.ctypes.data]), wanted, begin=begin)
    movers.gather(SHAPE, SIDE, units, bases, PackedBytes.of(found), begin=begin)
    assert found == wanted
    # And back, into other memory, of which no other byte changes.
    target = device_region(machine, np.full(len(content), 0xEE, np.uint8))
    movers.scatter(SHAPE, SIDE, units, np.array([target.address]), PackedBytes.of(found), begin=begin)
    packed = np.full(len(content), 0xEE, np.uint8)
    packed[begin : begin + nbytes] = np.frombuffer(wanted, np.uint8)
    expected = np.empty_like(packed).reshape(-1, ROW)
    expected[units] = packed.reshape(-1, ROW)
    np.testing.assert_array_equal(machine.array(target.address), expected.reshape(-1))


def test_equal_tables_are_the_same_objects_to_the_kernels(machine, monkeypatch):
    region = device_region(machine, np.arange(2 * ROW, dtype=np.int64).astype(np.uint8))
    movers, seen = Movers([region]), []
    kernels = kvbaton.cuda.driver().kernels
    real = kernels.gather
    monkeypatch.setattr(
        kernels, "gather", lambda shape, side, *rest: seen.append((shape, side)) or real(shape, side, *rest)
    )
    for _ in range(2):
        movers.gather(
            SHAPE.copy(), SIDE.copy(), np.array([1]), np.array([region.address]), PackedBytes.of(bytearray(ROW))
        )
    (first, second) = seen
    assert first[0] is second[0]
    assert first[1] is second[1]


def test_memory_that_nothing_packs_is_named_when_it_is_used(machine):
    host = np.arange(ROW, dtype=np.int64).astype(np.uint8)
    regions = [Region.of(host), device_region(machine, host), Region(4096, 64, "unheard-of")]
    movers = Movers(regions)
    assert movers.movable.tolist() == [True, True, False]
    assert "unheard-of" in movers.reasons[2]
    assert movers.on_host(SIDE)
    in_region = [SIDE + np.array([number, 0, 0, 0, 0, 0, 0]) for number in range(3)]
    assert not movers.on_host(in_region[1])
    with pytest.raises(RowsError, match="region 2 cannot be packed"):
        movers.of(in_region[2])
    with pytest.raises(RowsError, match="several kinds of memory"):
        movers.of(np.concatenate(in_region[:2]))


def test_without_a_driver_device_memory_cannot_be_packed(monkeypatch):
    def missing():
        raise TransportError("there is no CUDA driver here")

    monkeypatch.setattr(kvbaton.cuda, "driver", missing)
    with pytest.raises(TransportError, match="no CUDA driver"):
        device_mover(0)


def test_a_device_that_fails_is_told_to_the_caller(machine):
    region = device_region(machine, np.zeros(ROW, np.uint8))
    movers = Movers([region])
    machine.failure = "an uncorrectable error"
    with pytest.raises(TransportError, match="uncorrectable"):
        movers.gather(SHAPE, SIDE, np.array([0]), np.array([region.address]), PackedBytes.of(bytearray(ROW)))
    machine.failure = ""
