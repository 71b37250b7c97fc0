"""The GPU's kernels: any boxes, alignments, ranges and casts, beside the oracle and the CPU's kernel, with canaries.

They run on the first GPU, or under ``TRITON_INTERPRET=1`` in Triton's interpreter on host memory.
"""

import os

import cast_oracle
import copy_oracle as oracle
import number_reference as reference
import numpy as np
import pytest
from cast_oracle import CANARY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbaton import copy
from kvbaton.check.examples import run_batch
from kvbaton.errors import ConfigurationError, RowsError
from kvbaton.plan.boxes import CONVERT, QUANTISE, SCALE, Boxes, Cast, Transfer

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="Triton is not installed: make setup-gpu")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
EXAMPLES = 10 if INTERPRETED else 200
TINY = {"move_bytes": 256, "move_items": 16, "elements": 64}
"""Tiles so small that a few units fill several of them."""

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

from kvbaton.copy.gpu import Copier  # noqa: E402
from kvbaton.copy.gpu.configuration import WHOLE  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
# Almost every example of casts is compiled anew on a GPU.
few_examples = settings(deadline=None, max_examples=min(EXAMPLES, 20), suppress_health_check=[HealthCheck.too_slow])
examples = settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=["as it is", "tiny tiles"])
def copier(request):
    return Copier(configuration=WHOLE._replace(**TINY) if request.param == "tiny tiles" else None)


@pytest.fixture(scope="module")
def wide():
    """An interpreter's time is that of the tiles, whatever they hold."""
    return Copier(
        configuration=WHOLE._replace(elements=1 << 16, move_items=1 << 14, move_bytes=1 << 16) if INTERPRETED else None
    )


class Regions:
    """Regions on the device, as the host filled them."""

    def __init__(self, arrays):
        self.tensors = [torch.from_numpy(array.copy()).to(DEVICE) for array in arrays]
        self.bases = np.array([tensor.data_ptr() for tensor in self.tensors], np.int64)

    def back(self):
        return [tensor.cpu().numpy() for tensor in self.tensors]


def cut_of(total, cut, length):
    begin = int(cut * total)
    return begin, begin + int(length * (total - begin))


@examples
@given(case=oracle.transfers(), cut=st.sampled_from([0, 0, 0.3]), length=st.sampled_from([1, 1, 0.6]))
def test_rows_to_rows_writes_exactly_the_range(copier, case, cut, length):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    begin, end = cut_of(transfer.nbytes, cut, length)
    sources, expected = cast_oracle.memory(source_lengths, 1), cast_oracle.memory(destination_lengths)
    here, there = Regions(sources), Regions(expected)
    stream = oracle.packed(boxes.shape, boxes.source, source_units, sources)
    oracle.unpack(stream[begin:end], begin, boxes.shape, boxes.destination, destination_units, expected)
    copier.copy_boxes(transfer, here.bases, there.bases, begin=begin, end=end)
    for found, wanted in zip((*there.back(), *here.back()), (*expected, *sources), strict=True):
        np.testing.assert_array_equal(found, wanted)


@examples
@given(case=oracle.transfers(), slab=st.integers(1, 200), skew=st.integers(0, 16))
def test_slabs_are_packed_and_unpacked_whatever_they_cut(copier, case, slab, skew):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    slab = max(slab, transfer.nbytes // 3)
    sources, expected = cast_oracle.memory(source_lengths, 2), cast_oracle.memory(destination_lengths)
    here, there = Regions(sources), Regions(expected)
    stream = oracle.packed(boxes.shape, boxes.source, source_units, sources)
    oracle.unpack(stream, 0, boxes.shape, boxes.destination, destination_units, expected)
    for begin in range(0, len(stream), slab):
        size = min(slab, len(stream) - begin)
        buffer = torch.full((skew + size + 16,), CANARY, dtype=torch.uint8, device=DEVICE)
        packed = buffer.data_ptr() + skew
        copier.gather(boxes.shape, boxes.source, source_units, here.bases, packed, size, begin=begin)
        canary = bytes([CANARY])
        found = buffer.cpu().numpy().tobytes()
        assert found == canary * skew + stream[begin : begin + size] + canary * 16
        copier.scatter(boxes.shape, boxes.destination, destination_units, there.bases, packed, size, begin=begin)
    for found, wanted in zip(there.back(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@few_examples
@given(
    case=cast_oracle.cast_transfers(),
    cut=st.sampled_from([0, 0, 0.4]),
    length=st.sampled_from([1, 1, 0.5]),
    seed=st.integers(0, 1000),
)
def test_casts_give_the_same_bits(copier, case, cut, length, seed):
    transfer, source_lengths, destination_lengths = case
    boxes, source_units, destination_units = transfer
    begin, end = cut_of(transfer.nbytes, cut, length)
    sources, expected = cast_oracle.memory(source_lengths, seed), cast_oracle.memory(destination_lengths)
    here, there, packed = Regions(sources), Regions(expected), Regions([np.full(end - begin, CANARY, np.uint8)])
    stream = cast_oracle.packed(transfer, sources)
    oracle.unpack(stream[begin:end], begin, boxes.shape, boxes.destination, destination_units, expected)
    copier.copy_boxes(transfer, here.bases, there.bases, begin=begin, end=end)
    for found, wanted in zip((*there.back(), *here.back()), (*expected, *sources), strict=True):
        np.testing.assert_array_equal(found, wanted)
    to = int(packed.bases[0])
    copier.gather(boxes.shape, boxes.source, source_units, here.bases, to, end - begin, begin=begin, cast=boxes.cast)
    assert packed.back()[0].tobytes() == stream[begin:end]


def every_code(dtype):
    """All there are of the dtypes of one and two bytes; many float32, among them those next to every rounding."""
    if dtype == "float8_e4m3fn":
        return np.arange(256).astype(np.uint8)
    if dtype != "float32":
        return np.arange(65536).astype(np.uint16).view(np.uint8)
    near = [np.arange(65536).astype(np.uint32) << 16 | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    spread = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([*near, spread]).view(np.uint8)


@pytest.mark.parametrize("destination", reference.DTYPES)
@pytest.mark.parametrize("source", reference.DTYPES)
def test_every_number_is_cast_as_the_cpu_does(wide, source, destination):
    values = every_code(source)
    elements, read, written = 64, reference.ITEMSIZE[source], reference.ITEMSIZE[destination]
    values = values[: len(values) // (elements * read) * (elements * read)]
    rows = len(values) // (elements * read)
    dtypes = reference.NUMBER[source], reference.NUMBER[destination]
    from_side, none = [0, 0, elements * read, 1, 0, 0, 0], [-1, 0, 0, 1, 0, 0, 0]
    stride = 2 * elements * written + 4
    boxes = Boxes(
        np.array([(1, 1, elements * written), (1, 1, elements * written), (1, 1, 4)]),
        np.array([from_side] * 3),
        np.array([(0, at, stride, 1, 0, 0, 0) for at in (0, elements * written, 2 * elements * written)]),
        Cast(
            np.array([(operation, *dtypes, elements) for operation in (CONVERT, QUANTISE, SCALE)]),
            np.ones(3, np.float32),
            np.array([none] * 3),
        ),
    )
    units = np.arange(rows)
    transfer = Transfer(boxes, units, units)
    expected = np.full(rows * stride + 1, CANARY, np.uint8)
    here, there = Regions([values]), Regions([expected])
    copy.copy_boxes(transfer, oracle.bases([values]), oracle.bases([expected]))
    wide.copy_boxes(transfer, here.bases, there.bases)
    np.testing.assert_array_equal(there.back()[0], expected)


@pytest.mark.parametrize("run", [1, 6, 40, 128, 2048, 70_000])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_many_boxes_of_many_rows(wide, run, count):
    """More boxes than are searched at a time (on a GPU), of two widths, with parts of rows."""
    if INTERPRETED and run * count > 100_000:
        pytest.skip("too much for an interpreter")
    rows, stride = 2 * count, 2 * run + 16
    boxes = 5 if INTERPRETED else max(3, min(200, (64 << 20) // (rows * stride)))
    random = np.random.default_rng(run)
    shape = np.array([(1, 1 + number % 2, run) for number in range(boxes)])
    sides = [
        np.array([(0, at * rows * stride + skew * (at % 3), stride, parts, run, 0, run) for at in range(boxes)])
        for skew, parts in ((0, 1), (4, 1))
    ]
    units = [random.permutation(rows)[:count].astype(np.int64) for _ in sides]
    transfer = Transfer(Boxes(shape, *sides), *units)
    source = random.integers(0, CANARY, boxes * rows * stride + 16, dtype=np.uint8)
    expected = np.full(len(source), CANARY, np.uint8)
    here, there = Regions([source]), Regions([expected])
    copy.copy_boxes(transfer, oracle.bases([source]), oracle.bases([expected]))
    wide.copy_boxes(transfer, here.bases, there.bases)
    np.testing.assert_array_equal(there.back()[0], expected)


def rows_of(nbytes, source, destination):
    side = np.array([[0, 0, nbytes, 1, 0, 0, 0]])
    return Transfer(Boxes(np.array([[1, 1, nbytes]]), side, side.copy()), np.array(source), np.array(destination))


def test_what_makes_no_sense_is_refused_and_moves_nothing(copier):
    here, there = Regions([np.zeros(64, np.uint8)]), Regions([np.full(64, CANARY, np.uint8)])
    for units, error in (([0, 1], ValueError), ([-1], ValueError), ([0.0], TypeError)):
        with pytest.raises(error):
            copier.copy_boxes(rows_of(8, units, [0]), here.bases, there.bases)
    for begin, end in ((-1, 8), (0, 9), (5, 4)):
        with pytest.raises(ValueError, match="not in a stream of 8 bytes"):
            copier.copy_boxes(rows_of(8, [0], [0]), here.bases, there.bases, begin=begin, end=end)
    with pytest.raises(ValueError, match="a box names region"):
        copier.copy_boxes(rows_of(8, [0], [0]), here.bases[:0], there.bases)
    split = rows_of(8, [1 << 31], [0])
    split.boxes.source[0, 3] = 2
    with pytest.raises(RowsError, match=f"unit {1 << 31} is more than"):
        copier.copy_boxes(split, here.bases, there.bases)
    with pytest.raises(ConfigurationError, match="multiprocessors is 0"):
        Copier(multiprocessors=0)
    copier.copy_boxes(rows_of(8, [0, 1], [0, 1]), here.bases, there.bases, begin=3, end=3)
    assert (there.back()[0] == CANARY).all()


def test_a_limit_of_multiprocessors_moves_the_same():
    limited = Copier(multiprocessors=1)
    source = np.random.default_rng(4).integers(0, CANARY, 64 * 1024, dtype=np.uint8)
    here, there = Regions([source]), Regions([np.full(len(source), CANARY, np.uint8)])
    order = np.random.default_rng(5).permutation(256)
    limited.copy_boxes(rows_of(256, order, order), here.bases, there.bases)
    np.testing.assert_array_equal(there.back()[0], source)


def test_the_oracle_of_layouts_agrees():
    outcome = run_batch(11, 3 if INTERPRETED else 50, "cuda")
    assert outcome.failure is None, outcome.failure.text()
    assert outcome.pairs > 0


@pytest.mark.skipif(INTERPRETED, reason="an interpreter has no streams")
def test_copies_are_in_the_order_of_their_stream():
    """Each copies what the one before it wrote; the first waits for an event of another stream."""
    copier, first, second = Copier(), torch.cuda.Stream(), torch.cuda.Stream()
    nbytes, rows, many = 4096, 1024, 50
    pools = [torch.zeros(nbytes * rows, dtype=torch.uint8, device="cuda") for _ in range(2)]
    bases = [np.array([pool.data_ptr()], np.int64) for pool in pools]
    ready = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        pools[0].fill_(7)
        ready.record()
    second.wait_event(ready)
    random = np.random.default_rng(6)
    for number in range(many):
        orders = random.permutation(rows), random.permutation(rows)
        copier.copy_boxes(rows_of(nbytes, *orders), bases[number % 2], bases[1 - number % 2], stream=second)
    done = torch.cuda.Event()
    with torch.cuda.stream(second):
        done.record()
    done.synchronize()
    for pool in pools:
        assert bool((pool == 7).all())
