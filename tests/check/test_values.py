"""Casts in the oracle, against small examples worked out by hand."""

import numpy as np
import pytest

from kvbaton.check import check_pair, values
from kvbaton.check.formats import value_of
from kvbaton.check.values import Cast, Stored
from kvbaton.layout import PAGED, Field, RankLayout, component

PLAIN = Stored("float32", 1.0, "", ())


def layout(dtype, *, scale_axes=None, heads=2, factor=1.0):
    token, head, dim = ("token", 4, None), ("head", heads, None), ("dim", 4, None)
    axes = {"token": token, "head": head, "dim": dim, "half": ("dim", 2, None)}
    fields = [Field("key", dtype, (token, head, dim), scale="key_scale" if scale_axes else "", factor=factor)]
    if scale_axes:
        fields.append(Field("key_scale", "float32", tuple(axes[name] for name in scale_axes)))
    return RankLayout((component("kv", PAGED, fields, layers=(0, 3), rows=6, page_size=4),))


def codes(monkeypatch, stored, sent, kept, *, scale=False, sender_scales=None):
    """What the oracle says about one entry of one layer whose ``stored`` values, ``[2, 4]``, are given."""

    def content(self, role, places, members):
        flat = members.indices["head"] * 4 + members.indices.get("dim", 0)
        chosen = sender_scales[members.indices["head"]] if role == sent.scale else stored.reshape(-1)[flat]
        bits = np.asarray(chosen, np.float32).view(np.uint32).astype(np.uint64)
        return np.broadcast_to(bits, (*places.shape[:2], *members.shape))

    monkeypatch.setattr(values.Cast, "_content", content)
    tensors = layout("float8_e4m3fn", scale_axes=("token", "head", "half")).components[0].tensors
    cast = Cast("kv", "key", (("dim", 4), ("head", 2)), sent, kept)
    return cast.codes(tensors[scale], np.zeros((1, 1, 1), np.uint64))


STORED = np.array([[1.0, -1.0625, 1.1875, 500.0], [0.0, -0.0, np.inf, np.nan]])


def test_values_are_rounded_to_nearest_even(monkeypatch):
    found = codes(monkeypatch, STORED, PLAIN, Stored("float8_e4m3fn", 1.0, "", ()))
    assert np.array_equal(found.low, found.high)
    # 1.0625 and 1.1875 lie in the middle of two numbers.
    assert found.low.reshape(2, 4).tolist() == [[0x38, 0xB8, 0x3A, 0x7E], [0x00, 0x80, 0x7F, 0x7F]]


def test_factors_of_both_sides(monkeypatch):
    found = codes(monkeypatch, STORED, PLAIN._replace(factor=4.0), Stored("float32", 0.5, "", ()))
    assert np.array_equal(found.low, found.high)
    assert value_of("float32", found.low).reshape(2, 4)[0].tolist() == [8.0, -8.5, 9.5, 4000.0]


def test_products_that_may_be_rounded_have_bounds(monkeypatch):
    found = codes(monkeypatch, STORED, PLAIN._replace(factor=1.7), Stored("float32", 1.0, "", ()))
    low, high = (value_of("float32", bound).reshape(2, 4)[0] for bound in found)
    exact = STORED[0] * 1.7
    assert (np.abs(low) < np.abs(exact)).all()
    assert (np.abs(high) > np.abs(exact)).all()
    assert (np.abs(high - low) <= 2.0**-20 * np.abs(exact)).all()
    assert np.array_equal(found.low.reshape(2, 4)[1], found.high.reshape(2, 4)[1])
    assert found.low.reshape(2, 4)[1].tolist() == [0, 0x80000000, 0x7F800000, 0x7FC00000]


def test_scales_of_the_sender(monkeypatch):
    sent = Stored("float32", 1.0, "key_scale", (("head", 2),))
    found = codes(monkeypatch, np.ones((2, 4)), sent, PLAIN, sender_scales=np.array([0.5, 4.0]))
    assert value_of("float32", found.low).reshape(2, 4).tolist() == [[0.5] * 4, [4.0] * 4]


def test_scales_that_are_made(monkeypatch):
    kept = Stored("float8_e4m3fn", 1.0, "key_scale", (("dim", 2), ("head", 2)))
    made = codes(monkeypatch, STORED, PLAIN, kept, scale=True)
    right = np.array([[1.0625 / 448, 500 / 448], [1.0, 1.0]], np.float32)
    assert np.array_equal(value_of("float32", made.low).reshape(2, 2), right.astype(np.float64))
    found = codes(monkeypatch, STORED, PLAIN, kept)
    assert np.array_equal(found.low, found.high)
    # The largest of each block is 448, whatever it was; what is not finite has no part in the scale.
    assert found.low.reshape(2, 4).tolist() == [[0x7D, 0xFE, 0x39, 0x7E], [0x00, 0x80, 0x7F, 0x7F]]


@pytest.mark.parametrize("seed", range(4))
def test_own_layouts_with_casts(seed):
    formats = [
        layout("bfloat16"),
        layout("float16", factor=0.3),
        layout("float8_e4m3fn", scale_axes=("token", "head")),
        layout("float8_e4m3fn", scale_axes=("token", "head", "half"), factor=2.0),
    ]
    for source in formats:
        # What spans several scales of the source is refused.
        for destination in formats if source is not formats[3] else formats[:2]:
            check_pair([source], [destination], tokens=13, prefix=3, seed=seed, cast=True).raise_if_failed()


def test_without_leave_a_cast_is_a_problem():
    report = check_pair([layout("bfloat16")], [layout("float16")], tokens=4)
    assert "dtype is bfloat16 at the source and float16 at the destination" in report.text()
