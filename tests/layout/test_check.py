import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import LayoutError
from kvbaton.layout import (
    PAGED,
    SLOT,
    Axis,
    Component,
    Coords,
    Kind,
    Ownership,
    RankLayout,
    Tensor,
    check_layout,
    compressed,
    paged_kv,
    required_bytes,
)

HEAD = Axis("head", 4, 4, ((2, 2),))
TOKENS = Axis("token", 8, 8, ((0, 8),))
DIM = Axis("dim", 2, 2, ((0, 2),))
KEY = Tensor("key", 5, 0, 16, 10, 64, "bfloat16", (TOKENS, HEAD, DIM))
KV = Component("kv", PAGED, (KEY,), page_size=8)
SIZE = 16 + 10 * 64
replace = msgspec.structs.replace


def with_axis(axis):
    return replace(KV, tensors=(replace(KEY, axes=tuple(axis if a.name == axis.name else a for a in KEY.axes)),))


def with_tensor(**changes):
    return replace(KV, tensors=(replace(KEY, **changes),))


def test_a_sound_layout_passes():
    check_layout(RankLayout((KV,)), [SIZE])
    check_layout(RankLayout((KV,)), None)
    check_layout(RankLayout(()), [])


def test_one_byte_less_is_refused_with_both_numbers():
    with pytest.raises(LayoutError, match=rf"component kv, role key, layer 5.*ends at byte {SIZE}.*{SIZE - 1} bytes"):
        check_layout(RankLayout((KV,)), [SIZE - 1])


def test_what_the_builders_make_fits_exactly():
    kv = paged_kv(layers=(0, 3), rows=5, page_size=4, heads=2, head_dim=8, dtype="float16", placement="blocks_first")
    sizes = required_bytes([kv])
    assert sizes == [5 * 2 * 2 * 4 * 2 * 8 * 2]
    check_layout(RankLayout((kv,)), sizes)
    with pytest.raises(LayoutError):
        check_layout(RankLayout((kv,)), [sizes[0] - 1])


def test_an_elided_tensor_needs_no_bytes():
    check_layout(RankLayout((with_tensor(rows=0, offset=0),)), [0])


def test_rows_may_lie_inside_the_outermost_axis():
    axes = (Axis("head", 2, 10 * 8, ((0, 2),)), Axis("token", 2, 4, ((0, 2),)), DIM)
    inside = Tensor("key", 0, 0, 0, 10, 8, "bfloat16", axes)
    check_layout(RankLayout((Component("kv", PAGED, (inside,), page_size=2),)), [160])
    overlapping = replace(inside, axes=(Axis("head", 2, 72, ((0, 2),)), *axes[1:]))
    with pytest.raises(LayoutError, match=r"axis head.*stride is 72 bytes.*takes 80 bytes"):
        check_layout(RankLayout((Component("kv", PAGED, (overlapping,), page_size=2),)), [160])


BAD = {
    "span outside the axis": (with_axis(replace(HEAD, spans=((3, 2),))), r"axis head: span 3\.\.5 .* size is 4"),
    "spans overlap": (with_axis(replace(HEAD, spans=((1, 1), (0, 2)))), r"axis head: span 0\.\.2 overlaps .* at 1"),
    "no span": (with_axis(replace(HEAD, spans=())), "axis head: 0 spans"),
    "empty span": (with_axis(replace(HEAD, spans=((0, 0),))), "axis head: count of a span is 0"),
    "negative start": (with_axis(replace(HEAD, spans=((-1, 2),))), "axis head: start of a span is -1"),
    "negative stride": (with_axis(replace(DIM, stride=-2)), "axis dim: stride is -2"),
    "stride inside an element": (with_axis(replace(DIM, stride=1)), "axis dim: the stride is 1 bytes.*takes 2 bytes"),
    "aliased axis": (with_axis(replace(HEAD, stride=0)), "axis head: the stride is 0 bytes"),
    "row too short": (with_tensor(row_stride=63), "rows: the stride is 63 bytes.*takes 64 bytes"),
    "huge stride": (with_tensor(row_stride=1 << 62), "row_stride is 4611686018427387904"),
    "more than 64 bits": (with_tensor(offset=1 << 10000), "offset is a number of 10001 bits"),
    "negative rows": (with_tensor(rows=-1), "rows is -1"),
    "product of bounded values": (with_tensor(rows=1 << 50, row_stride=1 << 50), "ends at byte"),
    "unknown region": (with_tensor(region=1), "it lies in region 1, but 1 regions are registered"),
    "unknown dtype": (with_tensor(dtype="float4"), "dtype 'float4' is not one of"),
    "token axis missing": (with_tensor(axes=(HEAD, DIM)), "needs the axis token, of size 8"),
    "token axis of another size": (with_axis(replace(TOKENS, size=4, spans=((0, 4),))), "size 4 .* page_size is 8"),
    "token axis cut": (with_axis(replace(TOKENS, spans=((0, 4), (4, 4)))), "must hold 0..8 in one span"),
    "token axis in a slot": (replace(KV, kind=SLOT, page_size=1), "axis token: kind slot has rows of no token"),
    "page size of a slot": (replace(KV, kind=SLOT), r"page_size \(slot\) is 8, it must be 1"),
    "page size 0": (replace(KV, page_size=0), r"page_size \(paged\) is 0"),
    "entries do not fill a page": (
        replace(KV, kind=compressed(3)),
        "page_size .* is 8, not a multiple of the 3",
    ),
    "token axis without the ratio": (
        replace(KV, kind=compressed(2)),
        r"axis token: size 8 .* 2 tokens to .* 0\.\.4 in",
    ),
    "ratio 0": (replace(KV, kind=Kind(ratio=0)), "ratio of its kind is 0"),
    "window and tail": (replace(KV, kind=Kind(window=4, tail=4)), "a window of 4 and a tail of 4 tokens"),
    "negative window": (replace(KV, kind=Kind(window=-1)), "window of its kind is -1"),
    "aux with tokens": (replace(KV, kind=Kind(aux=True)), "its kind is aux, but its rows hold tokens"),
    "a state with a window": (
        replace(KV, kind=Kind(per="request", window=1)),
        "rows of a request have no ratio",
    ),
    "unknown kind": (replace(KV, kind=Kind(per="layer")), "kind per 'layer' is neither"),
    "a ring that is no bool": (replace(KV, kind=Kind(ring=2)), "ring of its kind is 2, not a bool"),
    "ownership of a slot": (
        replace(KV, kind=SLOT, page_size=1, owned=Ownership(), tensors=()),
        "owned is given, but",
    ),
    "ownership that cuts entries": (
        replace(KV, kind=compressed(4), owned=Ownership(6, 2, 0)),
        "in units of 6, not a multiple of the 4 tokens",
    ),
    "the same tensor twice": (replace(KV, tensors=(KEY, KEY)), "role key, layer 5: is listed twice"),
    "the same axis twice": (with_tensor(axes=(TOKENS, HEAD, HEAD, DIM)), "axis head: is listed twice"),
    "too many axes": (with_tensor(axes=(TOKENS, *(Axis(f"a{i}", 1, 0, ((0, 1),)) for i in range(8)))), "9 axes"),
    "empty name": (replace(KV, name=""), "component name ''"),
    "name with a line break": (replace(KV, name="a\nb"), "component name"),
    "spans in a list": (with_axis(replace(HEAD, spans=[(2, 2)])), "axis head: spans is of type list; pass a tuple"),
    "one span without a tuple": (with_axis(replace(HEAD, spans=(0, 2))), "axis head: a span is 0, not a pair"),
    "axes in a list": (with_tensor(axes=[TOKENS, HEAD, DIM]), "axes is of type list"),
    "tensors in a list": (replace(KV, tensors=[KEY]), "tensors is of type list"),
    "a pool with a line break": (replace(KV, pool="a\nb"), "pool name"),
    "a bool": (with_tensor(rows=True), "rows is True of type bool"),
    "a float": (with_tensor(rows=2.0), "rows is 2.0 of type float"),
}


@pytest.mark.parametrize(("component", "message"), BAD.values(), ids=BAD.keys())
def test_refused(component, message):
    with pytest.raises(LayoutError, match=message):
        check_layout(RankLayout((component,)), [SIZE])


def test_refused_beside_the_components():
    with pytest.raises(LayoutError, match="component kv: is listed twice"):
        check_layout(RankLayout((KV, KV)), [SIZE])
    with pytest.raises(LayoutError, match="components is of type Component; pass a tuple of Component"):
        check_layout(RankLayout(KV), [SIZE])
    with pytest.raises(LayoutError, match=r"coords tp: 4 is no pair \(rank, size\)"):
        check_layout(RankLayout((KV,), Coords(tp=4)), [SIZE])
    with pytest.raises(LayoutError, match="coords tp: rank is 2"):
        check_layout(RankLayout((KV,), Coords(tp=(2, 2))), [SIZE])
    with pytest.raises(LayoutError, match="owned: remainder is 4"):
        check_layout(RankLayout((KV,), owned=Ownership(1, 4, 4)), [SIZE])
    with pytest.raises(LayoutError, match=r"owned: unit \* modulus"):
        check_layout(RankLayout((KV,), owned=Ownership(1 << 20, 1 << 20, 0)), [SIZE])


NUMBERS = st.one_of(st.integers(-2, 5), st.integers(), st.just(1 << 63), st.just(1 << 200))
AXES = st.builds(
    Axis,
    st.sampled_from(("token", "head", "")),
    NUMBERS,
    NUMBERS,
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple),
)
TENSORS = st.builds(
    Tensor,
    st.sampled_from(("key", "")),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from(("bfloat16", "uint8", "x")),
    st.lists(AXES, max_size=3).map(tuple),
    st.sampled_from(("", "key", "scale")),
    st.floats() | st.integers(),
)
FLAGS = st.one_of(st.booleans(), NUMBERS)
KINDS = st.builds(Kind, st.sampled_from(("token", "request", "x")), NUMBERS, NUMBERS, NUMBERS, FLAGS, FLAGS, FLAGS)
OWNED = st.builds(Ownership, NUMBERS, NUMBERS, NUMBERS)
LAYOUTS = st.builds(
    RankLayout,
    st.lists(
        st.builds(
            Component,
            st.sampled_from(("kv", "state")),
            st.one_of(KINDS, st.sampled_from(("paged", None))),
            st.lists(TENSORS, max_size=2).map(tuple),
            NUMBERS,
            st.one_of(st.none(), OWNED, NUMBERS),
        ),
        max_size=2,
    ).map(tuple),
    st.one_of(st.just(Coords()), st.builds(Coords, st.tuples(NUMBERS, NUMBERS))),
    st.one_of(st.just(Ownership()), OWNED),
)


@given(LAYOUTS)
def test_hostile_values_end_in_a_layout_error_or_in_none(layout):
    with contextlib.suppress(LayoutError):
        check_layout(layout, [100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "paged"}, "component kv: kind is 'paged' of type str, not Kind"),
        ({"owned": 3}, "component kv: owned is '3' of type int, not Ownership"),
    ],
)
def test_values_of_another_type_are_refused(change, message):
    with pytest.raises(LayoutError, match=message):
        check_layout(RankLayout((replace(KV, **change),)), [SIZE])
