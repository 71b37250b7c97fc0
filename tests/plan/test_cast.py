"""Casts through the planner: what lands is what the formats of both sides say, or the pair is refused by name.

The oracle knows the values of the whole model, the formats, and which elements a rank holds; never the planner.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvbaton.copy import check_bounds, check_source, copy_boxes, numbers
from kvbaton.errors import LayoutMismatch
from kvbaton.layout import (
    PAGED,
    SLOT,
    Coords,
    Field,
    RankLayout,
    check_layout,
    component,
    dense_axes,
    replicated_spans,
    required_bytes,
)
from kvbaton.plan import Pages, assign, compile_pair
from kvbaton.plan.boxes import CAST_DTYPES, CAST_ITEMSIZES

replace = msgspec.structs.replace
HEADS, DIM, LAYERS, TOKENS = 4, 8, (3, 5), 11
CANARY = 0xEE
BLOCKS = {
    "": None,
    "token": (HEADS, DIM),
    "head": (1, DIM),
    "two heads": (2, DIM),
    "half": (1, DIM // 2),
    "one": (1, 1),
}
"""Heads and dims that share a scale."""


@dataclass(frozen=True)
class Form:
    """How a side stores elements: dtype, the block that shares a scale, factor."""

    dtype: str
    block: str = ""
    factor: float = 1.0


@dataclass(frozen=True)
class Shape:
    """How a side lays them out."""

    tp: int = 1
    page: int = 4
    order: str = "NHD"
    dims: tuple = ((0, DIM),)
    fused: bool = False


def layouts(form, shape, kind=PAGED):
    """The layouts of all ranks of a side."""
    made = []
    for rank in range(shape.tp):
        spans = replicated_spans(HEADS, rank, shape.tp)
        head, dim = ("head", HEADS, spans), ("dim", DIM, shape.dims)
        token = [("token", shape.page, None)] if kind.has_tokens else []
        outer = [*token, head] if shape.order == "NHD" else [head, *token]
        fields = []
        for role in ("key", "value"):
            fields.append(Field(role, form.dtype, (*outer, dim), f"{role}_scale" if form.block else "", form.factor))
            if form.block:
                heads, dims = BLOCKS[form.block]
                axes = [*token]
                if heads < HEADS:
                    axes.append(("head", HEADS // heads, tuple((a // heads, n // heads) for a, n in spans)))
                if dims < DIM:
                    axes.append(("dim", DIM // dims, tuple((a // dims, n // dims) for a, n in shape.dims)))
                fields.append(Field(f"{role}_scale", "float32", tuple(axes)))
        placement = "fused" if shape.fused else "layers_first"
        page = shape.page if kind.has_tokens else 1
        part = component("kv", kind, fields, layers=LAYERS, rows=16, page_size=page, placement=placement, offset=5)
        made.append(RankLayout((part,), Coords(tp=(rank, shape.tp))))
        check_layout(made[-1], required_bytes(made[-1].components))
    return made


def model(seed):
    """Values of the whole model by role and layer: ``[token, head, dim]``."""
    random = np.random.default_rng(seed)
    size = (TOKENS, HEADS, DIM)
    magnitude = np.exp2(random.integers(-6, 7, (TOKENS, HEADS, 1)))
    return {
        (role, layer): (random.normal(size=size) * magnitude).astype(np.float32)
        for role in ("key", "value")
        for layer in LAYERS
    }


def blocks_of(values, block):
    """``values`` with the elements of each block last."""
    heads, dims = BLOCKS[block]
    cut = values.reshape(TOKENS, HEADS // heads, heads, DIM // dims, dims)
    return np.moveaxis(cut, 2, 3).reshape(TOKENS, HEADS // heads, DIM // dims, heads * dims)


def spread(scales, block):
    """The scale of each element."""
    heads, dims = BLOCKS[block]
    return np.repeat(np.repeat(scales, heads, axis=1), dims, axis=2)


def encode(form, values):
    number = CAST_DTYPES.index(form.dtype)
    stored = numbers.encode(number, values.reshape(-1, DIM))
    return stored.reshape(TOKENS, HEADS, DIM, CAST_ITEMSIZES[number])


def decode(form, stored):
    values = numbers.decode(CAST_DTYPES.index(form.dtype), stored.reshape(-1, stored.shape[-1] * DIM))
    return values.reshape(TOKENS, HEADS, DIM)


def at_source(form, values, seed):
    """Elements, and scales that the source chose as it liked (None without)."""
    values = values / np.float32(form.factor)
    if not form.block:
        return encode(form, values), None
    random = np.random.default_rng(seed)
    blocks = blocks_of(values, form.block)
    scales = (np.abs(blocks).max(axis=-1) / 300 * random.uniform(0.8, 1.2, blocks.shape[:-1])).astype(np.float32)
    return encode(form, values / spread(scales, form.block)), scales


def at_destination(source, destination, stored, scales):
    """What must arrive: the same bytes in the same format, else values in float32 that are rounded once."""
    if source == destination:
        return stored, scales
    times = np.float32(source.factor / destination.factor)
    if scales is not None:
        times = spread(scales, source.block) * times
    values = decode(source, stored) * times
    if not destination.block:
        return encode(destination, values), None
    most = np.abs(blocks_of(values, destination.block)).max(axis=-1)
    made = np.where(most == 0, np.float32(1), most / np.float32(448)).astype(np.float32)
    return encode(destination, values / spread(made, destination.block)), made


class Rank:
    """The memory of a rank, with canaries; `put` writes logical elements where its layout says."""

    def __init__(self, layout, rows):
        self.layout = layout
        self.rows = rows
        self.memory = np.full(required_bytes(layout.components)[0] + 9, CANARY, np.uint8)

    @property
    def bases(self):
        return np.array([self.memory.ctypes.data])

    def put(self, role, layer, values, memory):
        """``values``: bytes ``[token, *axes of the whole tensor, itemsize]``, axes in the order head, dim."""
        part = self.layout.components[0]
        tensor = next(each for each in part.tensors if (each.role, each.layer) == (role, layer))
        axes = {axis.name: axis for axis in tensor.axes}
        places = np.zeros((TOKENS, 1, 1), np.int64)
        for token in range(TOKENS):
            row, inside = (token // part.page_size, token % part.page_size) if part.kind.has_tokens else (token, 0)
            step = axes["token"].stride if "token" in axes else 0
            places[token] = tensor.offset + self.rows[row] * tensor.row_stride + inside * step
        for number, name in ((1, "head"), (2, "dim")):
            if name not in axes:
                continue
            local = [index for start, count in axes[name].spans for index in range(start, start + count)]
            values = values.take(local, axis=number)
            shape = [1, 1, 1]
            shape[number] = len(local)
            places = places + (np.arange(len(local)) * axes[name].stride).reshape(shape)
        memory[places[..., None] + np.arange(values.shape[-1])] = values


def fill(rank, form, contents, memory):
    for (role, layer), (stored, scales) in contents.items():
        rank.put(role, layer, stored, memory)
        if form.block:
            rank.put(f"{role}_scale", layer, scales[..., None].view(np.uint8), memory)


def hand_over(source, destination, shapes, kind=PAGED, seed=1, striped=False, cut=6):
    """Send everything from all source ranks to all destination ranks, in two chunks; check every byte."""
    here, there = layouts(source, shapes[0], kind), layouts(destination, shapes[1], kind)
    values = model(seed)
    contents = {key: at_source(source, value, seed) for key, value in values.items()}
    expected = {key: at_destination(source, destination, *content) for key, content in contents.items()}
    sources = [Rank(layout, np.random.default_rng(7).permutation(16)) for layout in here]
    for rank in sources:
        fill(rank, source, contents, rank.memory)
    for index, layout in enumerate(there):
        rank = Rank(layout, np.random.default_rng(8).permutation(16))
        wanted = rank.memory.copy()
        fill(rank, destination, expected, wanted)
        shares = assign(here, layout, destination_index=index, striped=striped, cast=True)
        moved = 0
        for sender, share in zip(sources, shares, strict=True):
            plan = compile_pair(sender.layout, layout, share, cast=True)
            for transfer in bind(plan, sender, rank, kind, cut):
                check_source(transfer.boxes, transfer.source_units, np.array([len(sender.memory) - 9]))
                tables = transfer.boxes.shape, transfer.boxes.destination, transfer.destination_units
                moved += check_bounds("destination", *tables, np.array([len(rank.memory) - 9]))
                copy_boxes(transfer, sender.bases, rank.bases)
        np.testing.assert_array_equal(rank.memory, wanted)
        assert moved == needed_bytes(layout)


def bind(plan, sender, rank, kind, cut):
    if "kv" not in plan.components:
        return []
    if not kind.has_tokens:
        return plan.bind_slots("kv", sender.rows[:TOKENS], rank.rows[:TOKENS])
    chunks = [plan.bind("kv", span, Pages(sender.rows, 0), Pages(rank.rows, 0)) for span in ((0, cut), (cut, TOKENS))]
    return [transfer for chunk in chunks for transfer in chunk]


def needed_bytes(layout):
    """Bytes of all tokens in all tensors of a rank: each is written exactly once."""
    total = 0
    for tensor in layout.components[0].tensors:
        count = [axis.local_size for axis in tensor.axes if axis.name != "token"]
        total += TOKENS * tensor.itemsize * int(np.prod(count))
    return total


FLOATS = [Form(dtype) for dtype in ("float32", "bfloat16", "float16")]
FP8 = [Form("float8_e4m3fn", factor=0.5), *(Form("float8_e4m3fn", block) for block in BLOCKS)]
FORMS = st.sampled_from([*FLOATS, *FP8, Form("float8_e4m3fn", "half", 0.25)])
DIMS = [((0, DIM),), ((0, DIM),), ((4, 4), (0, 4)), ((3, 5), (0, 3))]
SHAPES = st.builds(
    Shape,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(DIMS),
    st.booleans(),
)


def can_be(form, shape):
    """Whether the spans of the scales can say what the spans of the elements say."""
    if not form.block:
        return True
    heads, dims = BLOCKS[form.block]
    whole_heads = heads in (1, HEADS) or shape.tp <= HEADS // heads
    return whole_heads and (dims == DIM or all(start % dims == count % dims == 0 for start, count in shape.dims))


def must_work(source, destination, shapes):
    """Pairs that are promised: blocks that both sides hold whole and in one run, within one scale of the source."""
    if source == destination or not destination.block:
        return True
    heads, dims = BLOCKS[destination.block]
    if source.block:
        more_heads, more_dims = BLOCKS[source.block]
        if more_heads % heads or more_dims % dims:
            return False
    if heads == 1:
        return dims < DIM // 2 or all(
            shape.dims in (((0, DIM),), ((4, 4), (0, 4))[: 2 * (dims < DIM)]) for shape in shapes
        )
    return all(shape.order == "NHD" and shape.dims == ((0, DIM),) and shape.tp <= HEADS // heads for shape in shapes)


@settings(deadline=None, max_examples=250)
@given(
    source=FORMS,
    destination=FORMS,
    shapes=st.tuples(SHAPES, SHAPES),
    kind=st.sampled_from([PAGED, PAGED, SLOT]),
    seed=st.integers(0, 9),
    striped=st.booleans(),
    cut=st.integers(0, TOKENS),
)
def test_any_pair_of_formats_and_layouts(source, destination, shapes, kind, seed, striped, cut):
    assume(all(can_be(form, shape) for form, shape in zip((source, destination), shapes, strict=True)))
    refused = ""
    try:
        hand_over(source, destination, shapes, kind, seed, striped, cut)
    except LayoutMismatch as error:
        refused = str(error)
    if refused:
        assert not must_work(source, destination, shapes), refused
        assert "component kv, role key, layer 3: a scale of the destination (key_scale)" in refused


@pytest.mark.parametrize("source", [*FLOATS, *FP8], ids=str)
@pytest.mark.parametrize("destination", [*FLOATS, *FP8], ids=str)
def test_every_pair_of_formats(source, destination):
    shapes = Shape(page=4), Shape(page=3, fused=True)
    if must_work(source, destination, shapes):
        hand_over(source, destination, shapes)
    else:
        with pytest.raises(LayoutMismatch, match=r"a scale of the destination \(key_scale\) is that of \d+ elements"):
            hand_over(source, destination, shapes)


def pair(source, destination):
    return layouts(source, Shape())[0], layouts(destination, Shape())[0]


REFUSED = {
    "dtype": (Form("bfloat16"), Form("float8_e4m3fn"), "dtype is bfloat16 at the source and float8_e4m3fn at the dest"),
    "factor": (
        Form("float8_e4m3fn", factor=0.5),
        Form("float8_e4m3fn", factor=0.25),
        "float8_e4m3fn with factor 0.5 at the source and float8_e4m3fn with factor 0.25 at",
    ),
    "scale": (
        Form("float8_e4m3fn", "head"),
        Form("float8_e4m3fn", "half"),
        r"with scales in key_scale \(head 4\) at the source and .* with scales in key_scale \(dim 2, head 4\) at",
    ),
    "no scale": (Form("float8_e4m3fn"), Form("float8_e4m3fn", "token"), r"one for each token or row\) at the dest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_without_leave_nothing_is_cast(name):
    source, destination, message = REFUSED[name]
    here, there = pair(source, destination)
    advice = r".*allow a cast with Settings\(cast=True\) on the decode side"
    for refuse in (lambda: assign([here], there), lambda: compile_pair(here, there)):
        with pytest.raises(LayoutMismatch, match=f"component kv, role key, layer 3: .*{message}{advice}"):
            refuse()
    share = assign([here], there, cast=True)[0]
    with pytest.raises(LayoutMismatch, match=message):
        compile_pair(here, there, share)
    assert compile_pair(here, there, share, cast=True).components == ("kv",)


@pytest.mark.parametrize("dtype", ["float64", "float8_e5m2", "int8", "uint8", "bool"])
def test_other_dtypes_are_never_cast(dtype):
    here, there = pair(Form("bfloat16"), Form(dtype))
    for ends in ((here, there), (there, here)):
        with pytest.raises(
            LayoutMismatch, match=rf"{dtype} .* casts are only between float32, bfloat16, float16, float8"
        ):
            assign([ends[0]], ends[1], cast=True)
    assert assign([there], there, cast=True) == assign([there], there)


def test_scales_are_made_for_fp8_only():
    here, there = pair(Form("float32"), Form("float16", "head"))
    with pytest.raises(LayoutMismatch, match=r"float16 with scales .* scales are made for float8_e4m3fn only"):
        assign([here], there, cast=True)
    assert compile_pair(there, here, cast=True).components == ("kv",)


def test_source_ranks_of_two_formats_are_refused():
    shape = Shape(tp=2)
    here = [layouts(Form("float32"), shape)[0], layouts(Form("bfloat16"), shape)[1]]
    for destination in (Form("float8_e4m3fn", "head"), Form("bfloat16", "head")):
        with pytest.raises(LayoutMismatch, match=r"bfloat16 on some source ranks and float32 on others"):
            assign(here, layouts(destination, Shape())[0], cast=True)


def test_a_block_that_is_spread_over_source_ranks_is_refused():
    here, there = layouts(Form("bfloat16"), Shape(tp=2)), layouts(Form("float8_e4m3fn", "token"), Shape())[0]
    shares = assign(here, there, cast=True)
    with pytest.raises(LayoutMismatch, match=r"is that of 32 elements, but only 16 of them .* in one source rank"):
        compile_pair(here[0], there, shares[0], cast=True)


def test_equal_formats_make_the_same_plan_with_and_without_leave():
    for form in (*FLOATS, *FP8):
        here, there = pair(form, form)
        plans = [
            compile_pair(here, there, cast=cast).bind("kv", (0, 4), Pages([1], 0), Pages([2], 0)) for cast in (0, 1)
        ]
        for plain, allowed in zip(*plans, strict=True):
            assert plain.boxes.cast is allowed.boxes.cast is None
            np.testing.assert_array_equal(plain.boxes.shape, allowed.boxes.shape)


def test_what_is_not_cast_stays_folded_beside_what_is():
    """Index keys of the same dtype on both sides move in one long run, and the cast of the others harms nobody."""
    axes, size = dense_axes([("token", 4, None), ("dim", 8, None)], "uint8")
    parts = []
    for dtype in ("bfloat16", "float32"):
        fields = [Field(f"index_{n}", "uint8", (("token", 4, None), ("dim", 8, None))) for n in range(3)]
        fields.append(Field("key", dtype, (("token", 4, None), ("dim", 8, None))))
        parts.append(RankLayout((component("kv", PAGED, fields, layers=(0,), rows=4, page_size=4, placement="fused"),)))
    (transfer,) = compile_pair(*parts, cast=True).bind("kv", (0, 4), Pages([1], 0), Pages([2], 0))
    assert transfer.boxes.shape.tolist() == [[1, 1, 3 * size], [1, 1, 4 * 32]]
    assert transfer.boxes.source_shape.tolist() == [[1, 1, 3 * size], [1, 1, 2 * 32]]
    assert transfer.nbytes == 3 * size + 4 * 32
    assert len(axes) == 2
