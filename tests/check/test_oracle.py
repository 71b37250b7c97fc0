"""The oracle itself, against small examples written out by hand."""

import numpy as np
import pytest

from kvbaton.check.execute import BrokenTransfer, execute
from kvbaton.check.explain import compare, name_of
from kvbaton.check.oracle import (
    CANARIES,
    Memory,
    RequestRows,
    Senders,
    expect,
    held_entries,
    local_places,
    needed_entries,
    region_sizes,
    write_content,
)
from kvbaton.layout import Kind, Ownership, RankLayout, compressed, mla_latent, required_bytes, tail, window
from kvbaton.plan import Boxes, Transfer

LATENT = mla_latent("kv", layers=(0, 5), rows=4, page_size=4, latent_dim=2, dtype="uint8")
LAYOUT = RankLayout((LATENT,))


@pytest.mark.parametrize(
    ("kind", "tokens", "prefix", "right"),
    [
        (Kind(), 5, 2, [2, 3, 4]),
        (Kind(reused=False), 3, 2, [0, 1, 2]),
        (window(2), 5, 1, [3, 4]),
        (window(9), 5, 4, [4]),
        (compressed(4), 11, 0, [0, 1]),
        (compressed(4), 11, 4, [1]),
        (compressed(4), 11, 7, [1]),
        (compressed(4), 11, 8, []),
        (tail(4), 11, 0, [8, 9, 10]),
        (tail(4), 12, 0, []),
        (Kind(ratio=2, window=3), 9, 0, [3]),
        (Kind(), 0, 0, []),
    ],
)
def test_what_a_receiver_needs(kind, tokens, prefix, right):
    assert needed_entries(kind, tokens, prefix).tolist() == right


def test_local_places_of_interleaved_tokens():
    assert local_places(Ownership(2, 3, 1), 1, 10).tolist() == [-1, -1, 0, 1, -1, -1, -1, -1, 2, 3]
    assert local_places(Ownership(4, 2, 1), 2, 15).tolist() == [-1, -1, 0, 1, -1, -1, 2]


def test_a_ring_holds_the_last_tokens():
    for kind, start, right in ((Kind(ring=True), 0, [3, 4, 5, 6, 7, 8, 9, 10]), (Kind(), 4, [4, 5, 6, 7, 8, 9, 10])):
        component = mla_latent("kv", layers=(0,), rows=4, page_size=4, latent_dim=2, dtype="uint8")
        entry = type(component)("kv", kind, component.tensors, 4)
        held = held_entries(RankLayout((entry,)), entry, RequestRows(np.array([2, 0]), start), 11)
        assert held.tolist() == right


def test_regions_are_as_large_as_the_builders_say():
    assert region_sizes(LAYOUT) == required_bytes(LAYOUT.components)


def test_content_lies_where_the_layout_says():
    memory = Memory(LAYOUT, 1)
    before = memory.bytes.copy()
    rows = RequestRows(np.array([3, 1]))
    write_content(memory, LATENT, rows, np.array([0, 5]), 6, Senders([LAYOUT]))
    changed = set(np.flatnonzero(memory.bytes != before) - CANARIES)
    # Token 0 is the first of row 3, token 5 the second of row 1; the second layer begins at byte 32.
    assert changed <= {24, 25, 10, 11, 56, 57, 42, 43}
    assert len(changed) >= 6


def test_elements_of_unlike_place_have_unlike_content():
    memory = Memory(RankLayout((mla_latent(layers=range(4), rows=9, page_size=4, latent_dim=8, dtype="int64"),)), 1)
    write_content(memory, memory.layout.components[0], RequestRows(np.arange(9)), np.arange(36), 36, Senders([]))
    numbers = memory.bytes[CANARIES : CANARIES + 4 * 36 * 8 * 8].view(np.uint64)
    assert len(np.unique(numbers)) == 4 * 36 * 8


def test_wrong_bytes_are_named():
    memory = Memory(LAYOUT, 1)
    rows = {"kv": RequestRows(np.array([3, 1]))}
    expected = expect(memory, rows, 6, 5, Senders([LAYOUT]))
    right, written = expected.memory, expected.written
    assert np.flatnonzero(written).tolist() == [CANARIES + byte for byte in (10, 11, 42, 43)]
    before = memory.bytes.copy()
    writes = np.zeros(len(before), np.int64)
    memory.bytes[:] = right
    writes[written] = 1
    assert compare(memory, before, expected, writes, rows, 6, 0) == []
    writes[CANARIES + 10] = 0
    writes[CANARIES + 11] = 2
    writes[CANARIES] = 1
    memory.bytes[CANARIES + 42] ^= 1
    memory.bytes[-1] ^= 1
    found = [problem.what for problem in compare(memory, before, expected, writes, rows, 6, 0)]
    assert found == [
        "1 byte never written; first: component kv, role latent, layer 0, token 5, dim 0 (byte 10 of region 0)",
        "1 byte written more than once; first: component kv, role latent, layer 0, token 5, dim 1 "
        "(byte 11 of region 0)",
        "1 byte written, but not part of what the destination needs; first: byte 0 of region 0, which belongs to no "
        "element of the request",
        "2 bytes changed, though no transfer names it; first: component kv, role latent, layer 0, token 5, dim 0 "
        "(byte 10 of region 0)",
        "1 byte written with another content than the sender's; first: component kv, role latent, layer 5, token 5, "
        "dim 0 (byte 42 of region 0)",
    ]
    assert name_of(memory, 3, rows, 6).startswith(f"byte {3 - CANARIES} of region 0")


BOX = {"shape": [1, 1, 2], "source": [0, 0, 8, 1, 0, 0, 0], "destination": [0, 0, 8, 1, 0, 0, 0], "units": [0]}
BROKEN = {
    "past the end": ({"destination": [0, 63, 8, 1, 0, 0, 0]}, "destination: a copy reaches byte 64 of region 0, which"),
    "unit past the end": ({"units": [8]}, "source: a copy reaches byte 64"),
    "no such region": ({"source": [1, 0, 8, 1, 0, 0, 0]}, "source: region 1 of 1"),
    "nothing to copy": ({"shape": [0, 1, 2]}, "a count or a run is below 1"),
    "negative": ({"source": [0, -1, 8, 1, 0, 0, 0]}, "an offset or a stride is negative"),
    "no units in a row": ({"destination": [0, 0, 8, 0, 0, 0, 0]}, "units_per_row is below 1"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_transfer_is_not_executed(change, message):
    values = {**BOX, **change}
    boxes = Boxes(*(np.array([values[name]], np.int64) for name in ("shape", "source", "destination")))
    memory = Memory(LAYOUT, 1)
    units = np.array(values["units"], np.int64)
    with pytest.raises(BrokenTransfer, match=message):
        execute(Transfer(boxes, units, units.copy()), memory, memory, np.zeros(len(memory.bytes), np.int64))


def test_tables_of_another_form_are_refused():
    boxes = Boxes(*(np.array([BOX[name]], np.int64) for name in ("shape", "source", "destination")))
    units = np.array([0], np.int64)
    memory = Memory(LAYOUT, 1)
    for transfer, message in (
        (Transfer(boxes, units.astype(np.int32), units), "units are int32"),
        (Transfer(boxes, units, np.array([0, 1])), "1 source units, 2 others"),
        (Transfer(boxes._replace(shape=boxes.shape[:, :2].copy()), units, units), r"not contiguous int64 \[n, 3\]"),
    ):
        with pytest.raises(BrokenTransfer, match=message):
            execute(transfer, memory, memory, np.zeros(len(memory.bytes), np.int64))
