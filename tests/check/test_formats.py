"""The formats of the oracle, against fractions and against numpy where it has them."""

from fractions import Fraction

import numpy as np
import pytest

from kvbaton.check.formats import FORMATS, in_float32, nearest, not_a_number, powers_of_two, value_of

SMALL = [dtype for dtype in FORMATS if dtype != "float32"]


def positive(dtype):
    """All codes without the sign bit, and what they stand for."""
    codes = np.arange(1 << sum(FORMATS[dtype]), dtype=np.uint64)
    return codes, value_of(dtype, codes)


@pytest.mark.parametrize(
    ("dtype", "code", "value"),
    [
        ("float8_e4m3fn", 0x7E, 448.0),
        ("float8_e4m3fn", 0x01, 2.0**-9),
        ("float8_e4m3fn", 0x08, 2.0**-6),
        ("float8_e4m3fn", 0xB8, -1.0),
        ("float16", 0x7BFF, 65504.0),
        ("float16", 0x0001, 2.0**-24),
        ("float16", 0xFC00, -np.inf),
        ("bfloat16", 0x3FC0, 1.5),
        ("bfloat16", 0x0001, 2.0**-133),
        ("bfloat16", 0x7F7F, float.fromhex("0x1.fep127")),
        ("float32", 0xC0490FDB, -float.fromhex("0x1.921fb6p+1")),
        ("float32", 0x00000001, 2.0**-149),
    ],
)
def test_what_a_code_stands_for(dtype, code, value):
    assert value_of(dtype, np.array([code], np.uint64)).tolist() == [value]


def test_halves_are_those_of_numpy():
    codes = np.arange(1 << 16, dtype=np.uint64)
    with np.errstate(invalid="ignore"):
        right = codes.astype(np.uint16).view(np.float16).astype(np.float64)
    assert np.array_equal(value_of("float16", codes), right, equal_nan=True)


@pytest.mark.parametrize("dtype", SMALL)
def test_every_code_is_the_nearest_to_itself(dtype):
    codes, values = positive(dtype)
    numbers = ~np.isnan(values)
    assert np.array_equal(nearest(dtype, values[numbers]), codes[numbers])
    assert set(nearest(dtype, values[~numbers]).tolist()) == {not_a_number(dtype)}


@pytest.mark.parametrize("dtype", SMALL)
def test_the_nearest_is_nearest(dtype):
    _, values = positive(dtype)
    finite = np.flatnonzero(np.isfinite(values))
    chance = np.random.default_rng(1)
    for place in chance.choice(finite[:-1], 200):
        low, high = Fraction(values[place]), Fraction(values[place + 1])
        middle = float((low + high) / 2)
        found = nearest(dtype, np.array([np.nextafter(middle, 0), middle, np.nextafter(middle, np.inf)]))
        even = place + place % 2
        assert found.tolist() == [place, even, place + 1]


def test_what_lies_beyond():
    beyond = np.array([449.0, 1e30, np.inf, np.nan])
    assert nearest("float8_e4m3fn", beyond).tolist() == [0x7E, 0x7E, 0x7F, 0x7F]
    assert nearest("float16", np.array([65519.0, 1e30, np.inf, np.nan])).tolist() == [0x7BFF, 0x7BFF, 0x7C00, 0x7E00]
    assert nearest("bfloat16", np.array([3.4e38, np.inf, np.nan])).tolist() == [0x7F7F, 0x7F80, 0x7FC0]
    assert nearest("float32", np.array([np.inf, np.nan])).tolist() == [0x7F800000, 0x7FC00000]
    assert in_float32(np.array([3.5e38, 2.0**-150, 1 + 2.0**-24])).tolist() == [np.inf, 0.0, 1.0]


def test_powers_of_two():
    values = np.array([0.25, 8.0, 0.0, np.inf, 3.0, 1.7])
    assert powers_of_two(values).tolist() == [True, True, True, True, False, False]
