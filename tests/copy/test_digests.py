"""Digests: both kernels against the formula in whole numbers, and what must not matter, and what must."""

import copy_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import copy
from kvbaton.errors import RowsError
from kvbaton.plan import Half
from kvbaton.plan.boxes import Boxes

M = 2**64


def splitmix(state):
    value = state % M
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % M
    value = (value ^ value >> 27) * 0x94D049BB133111EB % M
    return value ^ value >> 31


NUMBERS = [splitmix(0x9E3779B97F4A7C15 * (index + 1)) for index in range(27)]
FIRST, SECOND = [each | 1 for each in NUMBERS[8:16]], [each & ~1 for each in NUMBERS[16:24]]


def value_of(data):
    data = data + bytes(-len(data) % 64)
    stripes = len(data) // 64
    total = 0
    for index in range(len(data) // 8):
        word = int.from_bytes(data[8 * index : 8 * index + 8], "little") ^ NUMBERS[index % 8]
        term = ((word & 0xFFFFFFFF) + 2**32) * ((word >> 32) + 2**32)
        total += term * (FIRST[index % 8] + (stripes - index // 8) * SECOND[index % 8])
    return total % M


def digest_of(shape, side, units, numbers, regions, stream):
    total = 0
    for unit, number in zip(units, numbers, strict=True):
        offset = 0
        for region, start, run in oracle.pieces(shape, side, [unit]):
            seed = number * (NUMBERS[24] | 1) + stream * (NUMBERS[25] | 1) + offset * (NUMBERS[26] | 1)
            total += splitmix(value_of(regions[region][start : start + run].tobytes()) + seed)
            offset += run
    return total % M


def random_memory(lengths, seed):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length, dtype=np.uint8) for length in lengths]


@settings(deadline=None, max_examples=60)
@given(
    case=oracle.transfers(),
    stream=st.integers(0, 3),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
)
def test_the_formula(kernel, case, stream, numbers):
    (boxes, units, _), lengths, _ = case
    regions, numbers = random_memory(lengths, 1), np.array(numbers[: len(units)], np.int64)
    expected = digest_of(boxes.shape, boxes.source, units, numbers.tolist(), regions, stream)
    tables = (boxes.shape, boxes.source, units, numbers, oracle.bases(regions))
    assert kernel.digest(*tables, stream, 1) == expected


def one_piece(run, offset=0):
    return np.array([[1, 1, run]]), np.array([[0, offset, run, 1, 0, 0, 0]])


ZERO = np.zeros(1, np.int64)


@pytest.mark.parametrize("instructions", ["avx512", "avx2", "plain"])
def test_all_instructions_give_the_same_at_every_length_and_alignment(kernel, instructions):
    if kernel.__name__.endswith("_kernel"):
        try:
            kernel.digest(*one_piece(1), ZERO, ZERO, ZERO + ZERO.ctypes.data, 0, 1, instructions)
        except ValueError:
            pytest.skip(f"this processor has no {instructions}")
    memory = random_memory([70_000], 2)
    bases = oracle.bases(memory)
    for run in (*range(1, 301), 1024, 4095, 65536):
        for offset in (0, 1, 3, 8, 31, 63):
            found = kernel.digest(*one_piece(run, offset), ZERO, ZERO, bases, 0, 1, instructions)
            expected = splitmix(value_of(memory[0][offset : offset + run].tobytes())) if run < 5000 else None
            assert expected in (None, found), (run, offset)
            if expected is None:
                assert found == copy.digest(*one_piece(run, offset), ZERO, ZERO, bases)


def test_what_it_gives_never_changes(kernel):
    """The two sides may be of two releases: another result needs another version of the protocol."""
    data = (np.arange(1000) * 7 % 251).astype(np.uint8)
    shape, side = np.array([[2, 3, 20], [1, 1, 132]]), np.array([[0, 0, 300, 1, 0, 60, 20], [0, 130, 300, 1, 0, 0, 0]])
    units, numbers = np.array([0, 2]), np.array([5, 1 << 40])
    assert kernel.digest(shape, side, units, numbers, oracle.bases([data]), 1, 1) == 13102168960988627987
    assert kernel.digest(shape, side, units[:0], numbers[:0], oracle.bases([data]), 1, 1) == 0
    assert kernel.digest(shape[:0], side[:0], units, numbers, oracle.bases([data]), 1, 1) == 0


@settings(deadline=None, max_examples=60)
@given(case=oracle.transfers(), cut=st.integers(0, 4), order=st.randoms(use_true_random=False))
def test_parts_order_and_packing_do_not_matter(kernel, case, cut, order):
    (boxes, units, _), lengths, _ = case
    regions, numbers = random_memory(lengths, 3), np.arange(10, 10 + len(units))
    bases = oracle.bases(regions)

    def digest(which):
        return kernel.digest(boxes.shape, boxes.source, units[which], numbers[which], bases, 0, 1)

    whole = digest(slice(None))
    assert (digest(slice(0, cut)) + digest(slice(cut, None))) % M == whole
    shuffled = list(range(len(units)))
    order.shuffle(shuffled)
    assert digest(np.array(shuffled)) == whole
    half = Half(boxes, "source", 0, units, numbers)
    packed = oracle.packed(boxes.shape, boxes.source, units, regions)
    assert copy.digest_packed(half, packed) == whole == copy.digest_half(half, bases, np.array(lengths))


def test_threads_do_not_matter(kernel):
    memory = random_memory([9 << 20], 4)
    shape, side = one_piece(4096)
    units = np.random.default_rng(5).permutation(9 << 8)
    found = {
        threads: kernel.digest(shape, side, units, units, oracle.bases(memory), 0, threads) for threads in (1, 2, 7)
    }
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("run", [1, 4, 7, 64, 100, 200])
def test_every_flipped_bit_is_seen(kernel, run):
    memory = random_memory([4 * run], 6)
    shape, side = one_piece(run)
    units, bases = np.arange(4), oracle.bases(memory)
    right = kernel.digest(shape, side, units, units, bases, 0, 1)
    for bit in range(8 * len(memory[0])):
        memory[0][bit // 8] ^= 1 << bit % 8
        assert kernel.digest(shape, side, units, units, bases, 0, 1) != right
        memory[0][bit // 8] ^= 1 << bit % 8
    assert kernel.digest(shape, side, units, units, bases, 0, 1) == right


@settings(deadline=None, max_examples=100)
@given(data=st.binary(min_size=8, max_size=64), word=st.integers(0, 15), change=st.integers(1, 2**32 - 1))
def test_a_change_in_half_a_word_is_seen(kernel, data, word, change):
    memory = [np.frombuffer(data.ljust(64, b"\0"), np.uint8).copy()]
    tables = (*one_piece(64), ZERO, ZERO, oracle.bases(memory), 0, 1)
    right = kernel.digest(*tables)
    memory[0].view("<u4")[word] ^= change
    assert kernel.digest(*tables) != right


def test_places_matter(kernel):
    """Units that are exchanged, moved by one, boxes that are exchanged, stripes and words that are exchanged."""
    memory = random_memory([64 * 64], 7)
    shape, side = one_piece(64)
    units, bases = np.arange(64), oracle.bases(memory)

    def digest():
        return kernel.digest(shape, side, units, units, bases, 0, 1)

    right, rows = digest(), memory[0].reshape(64, 64)
    kept = rows.copy()
    for change in (
        lambda: rows[[3, 9]].copy()[::-1],
        lambda: np.roll(kept, 1, axis=0)[[3, 9]],
    ):
        rows[[3, 9]] = change()
        assert digest() != right
        rows[:] = kept
    rows[:] = np.roll(kept, 1, axis=0)
    assert digest() != right
    rows[:] = kept
    rows[5, :8], rows[5, 8:16] = kept[5, 8:16], kept[5, :8]
    assert digest() != right
    rows[:] = kept
    long = one_piece(4096)
    right = kernel.digest(*long, ZERO, ZERO, bases, 0, 1)
    rows[[3, 9]] = kept[[9, 3]]
    assert kernel.digest(*long, ZERO, ZERO, bases, 0, 1) != right
    rows[:] = kept
    assert kernel.digest(*long, ZERO, ZERO, bases, 1, 1) != right
    assert kernel.digest(*long, ZERO, ZERO + 1, bases, 0, 1) != right


@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": np.zeros(2, np.int64)},
        {"numbers": np.zeros(1)},
        {"units": np.array([-1])},
        {"units": np.zeros(1, np.int32)},
        {"shape": np.array([[1, 0, 8]])},
        {"side": np.array([[1, 0, 8, 1, 0, 0, 0]])},
        {"side": np.array([[0, 0, 8, 0, 0, 0, 0]])},
    ],
)
def test_a_wrong_call_raises(kernel, wrong):
    memory = random_memory([64], 8)
    shape, side = one_piece(8)
    tables = {"shape": shape, "side": side, "units": ZERO, "numbers": ZERO, "bases": oracle.bases(memory)} | wrong
    with pytest.raises((ValueError, TypeError)):
        kernel.digest(*tables.values(), 0, 1)


def test_halves_are_checked_before_they_are_read():
    memory = random_memory([64], 9)
    shape, side = one_piece(8)
    half = Half(Boxes(shape, side, side), "destination", 0, np.array([8]), ZERO)
    with pytest.raises(RowsError, match="byte 72"):
        copy.digest_half(half, oracle.bases(memory), np.array([64]))
    with pytest.raises(RowsError, match="7 bytes are packed where 8"):
        copy.digest_packed(half, bytes(7))
