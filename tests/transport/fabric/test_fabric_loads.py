"""Transfers become loads that fit a slab, and are put in place again from what the peer is told."""

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.copy import scatter
from kvbaton.copy.movers import PackedBytes
from kvbaton.memory import Region
from kvbaton.transport.conformance.case import apply, rows
from kvbaton.transport.fabric import side
from kvbaton.transport.fabric.loads import LEAST_LOAD, LOADS, Packed, announce, cut_loads, load_bytes, load_size, pack
from kvbaton.transport.table import RegionTable
from kvbaton.transport.wire import read_tables


def deliver(transfers, slab_bytes, source, target):
    """Pack, announce and unpack all loads; their sizes."""
    table, bases = RegionTable([Region.of(source)]), np.array([target.ctypes.data])
    sizes = []
    for number, load in enumerate(cut_loads(transfers, slab_bytes)):
        slab = np.full(slab_bytes, 99, np.uint8)
        sizes.append(pack(load, table, PackedBytes.of(memoryview(slab))))
        here, there = socket.socketpair()
        with here, there:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            here.sendall(announce([Packed(7, load, 0)], number))
            here.shutdown(socket.SHUT_WR)
            kinds = []
            while (header := side.read_header(there)) is not None:
                tables = read_tables(there, header.boxes, header.units)
                assert (header.ticket, header.slab) == (7, number)
                scatter(*tables, bases, slab[header.offset : header.offset + header.payload], begin=header.begin)
                kinds.append(header.kind)
            assert kinds == [side.PART] * (len(kinds) - 1) + [side.WHOLE]
    return sizes


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from([16, 64, 4096]),
)
def test_loads_hold_every_byte_once_and_fit_a_slab(sizes, slab_bytes):
    source = np.random.default_rng(3).integers(0, 200, 8192, dtype=np.uint8)
    target, expected = (np.full(65536, 238, np.uint8) for _ in range(2))
    transfers = []
    place = 0
    for nbytes, units in sizes:
        transfer = rows(nbytes, np.arange(units)[::-1] % (8192 // nbytes), np.arange(units))
        transfer.boxes.destination[:, 1] = place
        transfers.append(transfer)
        place += nbytes * units
    found = deliver(transfers, slab_bytes, source, target)
    apply(transfers, [source], [expected])
    np.testing.assert_array_equal(target, expected)
    assert sum(found) == place
    assert max(found) <= slab_bytes


def test_loads_of_several_tickets_in_one_slab_are_told_in_one_go():
    loads = [next(cut_loads([rows(64, [number], [number])] * parts, 4096)) for number, parts in enumerate((1, 3, 2))]
    sizes = [load_size(load) for load in loads]
    assert sizes == [64, 192, 128]
    told = announce([Packed(70, loads[0], 0), Packed(71, loads[1], 64), Packed(72, loads[2], 256)], 5)
    here, there = socket.socketpair()
    found = []
    with here, there:
        here.sendall(told)
        here.shutdown(socket.SHUT_WR)
        while (header := side.read_header(there)) is not None:
            unit = int(read_tables(there, header.boxes, header.units).units[0])
            found.append((header.kind, header.slab, header.ticket, header.offset, unit))
    tickets = [(70, 0, 0), (71, 64, 1), (71, 128, 1), (71, 192, 1), (72, 256, 2), (72, 320, 2)]
    kinds = [side.PART] * 5 + [side.WHOLE]
    assert found == [(kind, 5, *one) for kind, one in zip(kinds, tickets, strict=True)]


def test_small_transfers_share_a_load():
    transfers = [rows(64, [number], [number]) for number in range(10)]
    assert [len(load) for load in cut_loads(transfers, 4096)] == [10]
    assert [len(load) for load in cut_loads(transfers, 200)] == [3, 3, 3, 1]


def test_a_unit_that_is_larger_than_a_slab_is_cut_within():
    load, *others = cut_loads([rows(1000, [0], [0])], 300)
    assert [(segment.begin, segment.end) for segment in load] == [(0, 300)]
    assert [(segment.begin, segment.end) for (segment,) in others] == [(300, 600), (600, 900), (900, 1000)]


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, LEAST_LOAD), (LOADS << 20, 1 << 20), (1 << 30, 2 << 20), (LEAST_LOAD, LEAST_LOAD)]
)
def test_a_write_is_cut_so_that_its_steps_overlap(nbytes, expected):
    assert load_bytes(nbytes, 2 << 20) == expected
    assert load_bytes(nbytes, 4096) == 4096
