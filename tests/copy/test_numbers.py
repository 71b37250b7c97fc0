"""Every number of every dtype, to every dtype, by both kernels: against the nearest number, torch and stated bounds."""

import number_reference as reference
import numpy as np
import pytest
import torch

from kvbaton.copy import numbers
from kvbaton.plan.boxes import CAST_DTYPES, CAST_ITEMSIZES, CONVERT, Cast

# Half the distance to the next number, over the number (docs/layouts.md).
RELATIVE = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}
# Half the distance between numbers too small for that.
ABSOLUTE = {"float32": 0.0, "bfloat16": 2.0**-134, "float16": 2.0**-25, "float8_e4m3fn": 2.0**-10}


def convert(kernel, stored, source, destination, factor=1.0):
    """Cast one long run of elements."""
    count = len(stored) // reference.ITEMSIZE[source]
    found = np.zeros(count * reference.ITEMSIZE[destination], np.uint8)
    side, unit = np.array([[0, 0, 0, 1, 0, 0, 0]]), np.zeros(1, np.int64)
    how = np.array([[CONVERT, reference.NUMBER[source], reference.NUMBER[destination], count]])
    cast = Cast(how, np.array([factor], np.float32), np.array([[-1, 0, 0, 1, 0, 0, 0]]))
    bases = (np.array([memory.ctypes.data]) for memory in (stored, found))
    kernel.copy(np.array([[1, 1, len(found)]]), side, side, unit, unit, *bases, 0, len(found), 1, cast)
    return found


def patterns(dtype):
    """All bit patterns of a dtype of at most 16 bits; of float32 a million, those around ties and bounds among them."""
    if dtype != "float32":
        size = reference.ITEMSIZE[dtype]
        return np.arange(1 << (8 * size)).astype(reference.WORD[size]).view(np.uint8)
    random = np.random.default_rng(1)
    words = [random.integers(0, 1 << 32, 1 << 19, dtype=np.uint32)]
    words += [np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32)]
    words += [
        random.normal(0, scale, 1 << 16).astype(np.float32).view(np.uint32) for scale in (1e-41, 1e-7, 1e-2, 1, 300)
    ]
    for dtype in reference.DTYPES[1:]:
        exact = reference.TABLES[dtype][0]
        halfway = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
        beyond = [reference.LARGEST[dtype] * more for more in (1, 1.001, 1.04, 1.06, 2)]
        beyond = np.array([value for value in beyond if value < reference.LARGEST["float32"]], np.float32)
        for some in (exact.astype(np.float32), halfway, beyond):
            words += [some.view(np.uint32) + np.uint32(step) for step in (0, 1)] + [some.view(np.uint32)[1:] - 1]
    words = np.concatenate(words)
    return np.concatenate([words, words | np.uint32(1 << 31)]).astype(np.uint32).view(np.uint8)


PATTERNS = {dtype: patterns(dtype) for dtype in reference.DTYPES}
PAIRS = [(source, destination) for source in reference.DTYPES for destination in reference.DTYPES]


def test_the_dtypes_are_those_of_the_plan():
    assert CAST_DTYPES[1:] == reference.DTYPES
    assert CAST_ITEMSIZES[1:] == tuple(reference.ITEMSIZE.values())
    assert [float(largest) for largest in numbers.LARGEST[1:]] == list(reference.LARGEST.values())


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_each_pattern_becomes_the_nearest_number(kernel, source, destination):
    stored = PATTERNS[source]
    exact = reference.values(source, stored[None])[0].astype(np.float32)
    found = convert(kernel, stored, source, destination)
    np.testing.assert_array_equal(found, reference.stored(destination, exact))


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_torch_agrees_where_it_saturates_too(kernel, source, destination):
    stored = PATTERNS[source]
    tensor = torch.from_numpy(stored).view(getattr(torch, source))
    expected = tensor.to(getattr(torch, destination))
    found = torch.from_numpy(convert(kernel, stored, source, destination)).view(getattr(torch, destination))
    # Beyond the largest number torch gives infinity or NaN in some releases, and saturates in others.
    inside = tensor.to(torch.float64).abs() <= reference.LARGEST[destination]
    assert torch.equal(expected[inside].to(torch.float32), found[inside].to(torch.float32))
    assert found.isnan()[tensor.isnan()].all()
    assert inside.sum() >= 200


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_the_stated_bounds_hold_and_are_met(kernel, source, destination):
    stored = PATTERNS[source]
    exact = reference.values(source, stored[None])[0]
    found = reference.values(destination, convert(kernel, stored, source, destination)[None])[0]
    inside = np.abs(exact) <= reference.LARGEST[destination]
    error = np.abs(found[inside] - exact[inside])
    bound = np.maximum(np.abs(exact[inside]) * RELATIVE[destination], ABSOLUTE[destination])
    assert (error <= bound).all()
    # The bound is no wider than it must be: some number comes within a sixteenth of it.
    if source == "float32" != destination:
        assert (error >= bound * 15 / 16).any()


@pytest.mark.parametrize("destination", reference.DTYPES[1:])
def test_what_is_too_large_saturates_and_infinity_does_not(kernel, destination):
    largest, limit = reference.LARGEST[destination], reference.LARGEST["float32"]
    wanted = np.array([largest, min(limit, largest * 1.01), limit, np.inf, np.nan], np.float32)
    wanted = np.concatenate([wanted, -wanted])
    found = reference.values(destination, convert(kernel, wanted.view(np.uint8), "float32", destination)[None])[0]
    infinity = np.nan if destination == "float8_e4m3fn" else np.inf
    expected = np.array([largest, largest, largest, infinity, np.nan])
    np.testing.assert_array_equal(found, np.concatenate([expected, -expected]))


@pytest.mark.parametrize("factor", [0.37, 3.0, 2.0**-40, 2.0**60])
@pytest.mark.parametrize(("source", "destination"), [("float8_e4m3fn", "bfloat16"), ("float16", "float8_e4m3fn")])
def test_a_factor_is_multiplied_in_float32(kernel, source, destination, factor):
    stored = PATTERNS[source]
    exact = reference.values(source, stored[None])[0].astype(np.float32) * np.float32(factor)
    found = convert(kernel, stored, source, destination, factor)
    np.testing.assert_array_equal(found, reference.stored(destination, exact))
