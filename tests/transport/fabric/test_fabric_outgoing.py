"""Tickets that wait share slabs: what each of them moved is right, and one that is refused fails alone."""

import msgspec
import numpy as np
import pytest
from fabric_ends import MIB, Ends
from peer_process import eventually

from kvbaton.memory import Region
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric import side
from kvbaton.transport.fabric.base import FabricLimits
from kvbaton.transport.fabric.loads import LEAST_LOAD, MOST_LOADS
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport

ROW = 64
ROOM = 128
"""Rows are this far apart at the destination, with canaries between them."""
ROWS = 2048


@pytest.fixture
def make():
    made = []

    def ends(*arguments, **options):
        made.append(Ends("packed", *arguments, **options))
        return made[-1].connect()

    yield ends
    for one in made:
        one.close()


def posts_of(fabric):
    """Counts what is posted from now on: the bytes of each post."""
    sizes = []
    post = fabric.post

    def counting(peer, writes, handle):
        sizes.append(writes.nbytes)
        post(peer, writes, handle)

    fabric.post = counting
    return sizes


def held_up(ends):
    """Have writes wait behind one that is stuck, which takes the only credit."""
    ends.fabrics[0].faults.stuck = True
    ends.writer.write(ends.peer, [rows(ROW, [0], [0])], 0)
    assert eventually(lambda: ends.fabrics[0]._posts)


def test_writes_that_wait_share_a_slab_and_a_post(make):
    ends = make(slabs="1")
    sizes = posts_of(ends.fabrics[0])
    held_up(ends)
    for ticket in range(1, 101):
        ends.writer.write(ends.peer, [rows(ROW, [ticket], [ticket])], ticket)
    ends.fabrics[0].faults.stuck = False
    assert ends.errors(*range(101)) == [""] * 101
    assert sizes == [ROW, 100 * ROW]
    np.testing.assert_array_equal(ends.target[: 101 * ROW], ends.source[: 101 * ROW])
    assert (ends.target[101 * ROW :] == CANARY).all()


def test_a_slab_takes_so_many_loads_and_no_more(make):
    ends = make(slabs="1")
    sizes = posts_of(ends.fabrics[0])
    held_up(ends)
    for ticket in range(1, 2 * MOST_LOADS + 2):
        ends.writer.write(ends.peer, [rows(ROW, [ticket], [ticket])], ticket)
    ends.fabrics[0].faults.stuck = False
    assert ends.errors(*range(2 * MOST_LOADS + 2)) == [""] * (2 * MOST_LOADS + 2)
    assert sizes == [ROW, MOST_LOADS * ROW, MOST_LOADS * ROW, ROW]


def test_large_loads_have_slabs_of_their_own_and_small_ones_go_between_them(make):
    """A write of four loads, and small ones behind it: none waits for the whole of the large one."""
    ends = make(slabs="1", slab_bytes="512KiB")
    sizes = posts_of(ends.fabrics[0])
    held_up(ends)
    units = MIB // 4096
    ends.writer.write(ends.peer, [rows(4096, np.arange(units), np.arange(units))], 1)
    for ticket in range(2, 5):
        ends.writer.write(ends.peer, [rows(ROW, [ticket], [ticket])], ticket)
    ends.fabrics[0].faults.stuck = False
    assert ends.errors(*range(5)) == [""] * 5
    assert sizes[0] == ROW
    assert sum(sizes) == MIB + 4 * ROW
    assert max(sizes) == LEAST_LOAD
    np.testing.assert_array_equal(ends.target, ends.source)


def test_a_write_that_failed_before_its_slab_was_written_is_not_announced(make):
    """Of two loads of a ticket the first fails in the fabric: the second, which shares a slab, is left out."""
    ends = make(nbytes=MIB, slab_bytes="512KiB")
    ends.fabrics[0].faults.fail = lambda handle: "the cable is out" if handle == 0 else ""
    units = MIB // 4096
    ends.writer.write(ends.peer, [rows(4096, np.arange(units), np.arange(units))], 1)
    ends.writer.write(ends.peer, [rows(ROW, [0], [0])], 2)
    first, second = ends.errors(1, 2)
    assert first == "the cable is out"
    assert second == ""
    np.testing.assert_array_equal(ends.target[:ROW], ends.source[:ROW])


@pytest.mark.parametrize("posts", [1, 64])
def test_many_small_tickets_to_several_destinations_of_which_one_refuses_some(posts):
    """The destinations are told to be larger than they are, so that the writer sends what they have to refuse."""
    options = {"slabs": "8", "staging_slabs": "4", "slab_bytes": "16KiB", "executor": "packed"}
    random = np.random.default_rng(5)
    fabric = MemoryFabric("outgoing-writer", limits=FabricLimits(posts=posts))
    writer = FabricTransport("outgoing-writer", fabric, options=options)
    source = random.integers(0, CANARY, ROWS * ROW, dtype=np.uint8)
    writer.register([Region.of(source)])
    names = [f"outgoing-destination-{number}" for number in range(3)]
    destinations = [FabricTransport(name, MemoryFabric(name), options=options) for name in names]
    targets = [np.full(ROWS * ROOM, CANARY, np.uint8) for _ in names]
    peers = []
    for destination, target in zip(destinations, targets, strict=True):
        destination.register([Region.of(target)])
        told = side.decode_descriptor(destination.describe(), "memory")
        larger = msgspec.structs.replace(told, regions=(2 * target.nbytes,))
        peers.append(writer.connect(msgspec.msgpack.encode(larger)))
    expected = [target.copy() for target in targets]
    refused = set()
    for ticket in range(3 * ROWS // 4):
        number = ticket % 3
        here, there = int(random.integers(ROWS)), ticket // 3
        outside = number == 1 and ticket % 5 == 0
        writer.write(peers[number], [rows(ROW, [here], [there + ROWS * outside], stride=ROOM)], ticket)
        if outside:
            refused.add(ticket)
        else:
            expected[number].reshape(ROWS, ROOM)[there, :ROW] = source.reshape(ROWS, ROW)[here]
    ended = {}
    assert eventually(lambda: ended.update(dict(writer.poll())) or len(ended) == 3 * ROWS // 4)
    assert {ticket for ticket, error in ended.items() if error} == refused
    assert len(refused) > 50
    assert all(f"peer {names[1]} refused the write: destination" in ended[ticket] for ticket in refused)
    for target, right in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target, right)
    assert [destination.counters for destination in destinations] == [{}, {"bounds": len(refused)}, {}]
    writer.close()
    for destination in destinations:
        destination.close()
    assert not fabric.misuses
