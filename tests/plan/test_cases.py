"""Real faults of the field as inputs: the pieces and bytes that must result."""

import numpy as np
import pytest

from kvbaton.check.execute import execute
from kvbaton.check.oracle import CANARIES, Memory, RequestRows, Senders, expect, write_content
from kvbaton.errors import RowsError
from kvbaton.layout import PAGED, Field, RankLayout, component, conv_state, paged_kv, replicated_spans
from kvbaton.plan import Pages, assign, compile_pair


def pieces(transfers):
    """``(source byte, destination byte, length)`` of every piece, each side's bases at 0, sorted by destination."""
    found = []
    for transfer in transfers:
        for unit, other in zip(transfer.source_units, transfer.destination_units, strict=True):
            for shape, at, to in zip(*transfer.boxes[:3], strict=True):
                begin, end = (
                    side[1] + number // side[3] * side[2] + number % side[3] * side[4]
                    for side, number in ((at, unit), (to, other))
                )
                found += [
                    (int(begin + i * at[5] + j * at[6]), int(end + i * to[5] + j * to[6]), int(shape[2]))
                    for i in range(shape[0])
                    for j in range(shape[1])
                ]
    return sorted(found, key=lambda piece: piece[1])


def heads(total, rank, tp, rows=4, **options):
    spans = replicated_spans(total, rank, tp)
    kv = paged_kv(layers=(0,), rows=rows, heads=total, head_dim=4, dtype="bfloat16", head_spans=spans, **options)
    return RankLayout((kv,))


def move(transfers, source, destination):
    """Execute ``transfers``; how often each byte of the destination was written."""
    writes = np.zeros(len(destination.bytes), np.int64)
    for transfer in transfers:
        execute(transfer, source, destination, writes)
    return writes


def test_d01_each_rank_gets_the_right_head():
    sources = [Memory(heads(2, rank, 2, page_size=2), 1) for rank in range(2)]
    for source in sources:
        for tensor in source.layout.components[0].tensors:
            head = tensor.axes[1].spans[0][0]
            begin = CANARIES + tensor.offset
            source.bytes[begin : begin + tensor.rows * tensor.row_stride] = 0x10 + head
    for index in range(8):
        destination = Memory(heads(2, index, 8, page_size=2), 2)
        shares = assign([source.layout for source in sources], destination.layout, destination_index=index)
        assert [share.empty for share in shares] == [index >= 4, index < 4]
        for source, share in zip(sources, shares, strict=True):
            plan = compile_pair(source.layout, destination.layout, share)
            transfers = plan.bind("kv", (0, 2), Pages([3], 0), Pages([1], 0))
            assert [length for _, _, length in pieces(transfers)] == [16, 16] * (not share.empty)
            move(transfers, source, destination)
        right = Memory(destination.layout, 2).bytes
        for tensor in destination.layout.components[0].tensors:
            begin = CANARIES + tensor.offset + tensor.row_stride
            right[begin : begin + 16] = 0x10 + index // 4
        assert np.array_equal(destination.bytes, right)


@pytest.mark.parametrize(
    ("rank", "right"),
    [(0, [(0, 0, 16), (16, 32, 16)]), (1, [(0, 16, 16), (16, 48, 16)]), (2, [(0, 0, 16), (16, 32, 16)])],
)
def test_d02b_head_slices(rank, right):
    source, destination = keys_alone(rank, 4), keys_alone(rank // 2, 2)
    plan = compile_pair(source, destination)
    assert pieces(plan.bind("kv", (0, 2), Pages([0], 0), Pages([0], 0))) == right


def keys_alone(rank, tp):
    axes = (("token", 2, None), ("head", 8, replicated_spans(8, rank, tp)), ("dim", 4, None))
    return RankLayout((component("kv", PAGED, [Field("key", "bfloat16", axes)], layers=(0,), rows=4, page_size=2),))


CONV = {"blocks": {"q": 8, "k": 8, "v": 16}, "columns": 3, "dtype": "bfloat16", "layers": (0,), "rows": 2}
D03 = [[(0, 0, 24), (48, 24, 24), (96, 48, 48)], [(24, 0, 24), (72, 24, 24), (144, 48, 48)]]


@pytest.mark.parametrize("rank", [0, 1])
def test_d03_sub_blocks(rank):
    full, half = RankLayout((conv_state(**CONV),)), RankLayout((conv_state(rank=rank, size=2, **CONV),))
    (scatter,) = assign([full], half, destination_index=rank)
    assert pieces(compile_pair(full, half, scatter).bind_slots("conv", [0], [0])) == D03[rank]
    assert sum(length for _, _, length in D03[rank]) == 96
    gather = compile_pair(half, full).bind_slots("conv", [0], [0])
    assert pieces(gather) == sorted(((b, a, n) for a, b, n in D03[rank]), key=lambda piece: piece[1])


def test_d03_without_sub_blocks_there_is_one_contiguous_cut():
    changes = {**CONV, "blocks": (32,)}
    full, half = RankLayout((conv_state(**changes),)), RankLayout((conv_state(rank=1, size=2, **changes),))
    assert pieces(compile_pair(full, half).bind_slots("conv", [0], [0])) == [(96, 0, 96)]


def test_equal_layouts_move_whole_rows_in_one_piece():
    for placement in ("fused", "blocks_first"):
        layout = RankLayout(
            (
                paged_kv(
                    layers=range(3), rows=4, page_size=8, heads=2, head_dim=4, dtype="bfloat16", placement=placement
                ),
            )
        )
        transfers = compile_pair(layout, layout).bind("kv", (0, 16), Pages([3, 1], 0), Pages([0, 2], 0))
        assert len(pieces(transfers)) == (6 if placement == "fused" else 2)


def test_d10_the_tail_of_a_prefix_hit_is_matched_by_token():
    layout = heads(2, 0, 1, page_size=4, rows=30)
    plan = compile_pair(layout, layout)
    (transfer,) = plan.bind("kv", (20, 32), Pages(np.arange(10, 18), 0), Pages([2, 5, 9], 20))
    assert list(zip(transfer.source_units.tolist(), transfer.destination_units.tolist(), strict=True)) == [
        (15, 2),
        (16, 5),
        (17, 9),
    ]


def test_d10b_slots_are_matched_by_position_and_placeholders_are_not_sent():
    state = RankLayout((conv_state(**{**CONV, "rows": 30}),))
    plan = compile_pair(state, state)
    local, remote = [[16], [17], [18], [19], [20, 21]], [[0, 17], [0, 19], [0, 21], [0, 23], [24, 25]]
    moved = []
    for mine, theirs in zip(local, remote, strict=True):
        (transfer,) = plan.bind_slots("conv", theirs[-len(mine) :], mine)
        moved += zip(transfer.source_units.tolist(), transfer.destination_units.tolist(), strict=True)
    assert moved == [(17, 16), (19, 17), (21, 18), (23, 19), (24, 20), (25, 21)]


def test_d10c_counts_that_differ_are_refused_with_both():
    state = RankLayout((conv_state(**{**CONV, "rows": 30}),))
    plan = compile_pair(state, state)
    with pytest.raises(RowsError, match="component conv: 2 rows at the source and 3 at the destination"):
        plan.bind_slots("conv", [1, 2], [3, 4, 5])
    pages = heads(2, 0, 1, page_size=4)
    with pytest.raises(
        RowsError, match=r"source: component kv: 2 rows of 4 tokens cover .* 0\.\.8, but tokens 0\.\.12"
    ):
        compile_pair(pages, pages).bind("kv", (0, 12), Pages([0, 1], 0), Pages([0, 1, 2], 0))


def test_d11_pages_of_another_size_land_exactly():
    source, destination = (
        Memory(
            RankLayout((paged_kv(layers=range(2), rows=9, page_size=size, heads=2, head_dim=4, dtype="bfloat16"),)),
            seed,
        )
        for size, seed in ((32, 1), (64, 2))
    )
    here, there = RequestRows(np.array([7, 0, 3, 8, 2])), RequestRows(np.array([4, 1, 5]))
    write_content(source, source.layout.components[0], here, np.arange(150), 150, Senders([source.layout]))
    right, written, _ = expect(destination, {"kv": there}, 150, 0, Senders([source.layout]))
    transfers = compile_pair(source.layout, destination.layout).bind("kv", (0, 150), Pages(*here), Pages(*there))
    assert np.array_equal(move(transfers, source, destination), written)
    assert np.array_equal(destination.bytes, right)
    assert sum(transfer.nbytes for transfer in transfers) == 150 * 2 * 2 * 2 * 4 * 2


def test_stripes_between_ranks_that_hold_unlike_parts():
    # Each head is held by two of three ranks; each rank sends one head in these stripes and the other in those.
    def layout(spans, page_size):
        kv = paged_kv(
            layers=(0, 1), rows=20, page_size=page_size, heads=3, head_dim=2, dtype="bfloat16", head_spans=spans
        )
        return RankLayout((kv,))

    sources = [Memory(layout(spans, 2), 1) for spans in (((0, 2),), ((2, 1), (1, 1)), ((2, 1), (0, 1)))]
    destination = Memory(layout(((0, 3),), 3), 2)
    here, there = RequestRows(np.arange(15)), RequestRows(np.arange(12, 2, -1))
    senders = Senders([source.layout for source in sources])
    right, written, _ = expect(destination, {"kv": there}, 29, 5, senders)
    writes = 0
    shares = assign([source.layout for source in sources], destination.layout, striped=True)
    assert [len({part.tokens for part in share.parts}) for share in shares] == [1, 2, 1]
    for source, share in zip(sources, shares, strict=True):
        write_content(source, source.layout.components[0], here, np.arange(29), 29, senders)
        plan = compile_pair(source.layout, destination.layout, share)
        transfers = plan.bind("kv", (5, 29), Pages(*here), Pages(*there))
        assert transfers
        writes = writes + move(transfers, source, destination)
    assert np.array_equal(destination.bytes, right)
    assert np.array_equal(writes, written)
