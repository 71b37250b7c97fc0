"""Several connections to a peer, and rows that go to and come from the socket without a slab in between."""

import contextlib
import socket
import struct
import threading

import msgspec
import numpy as np
import pytest
from peer_process import eventually

from kvbaton.copy import NATIVE
from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport import tcp_wire, wire
from kvbaton.transport.conformance.case import CANARY, apply, rows, table
from kvbaton.transport.tcp import TcpTransport

HEADER = struct.Struct("<4sBxxxIIqQ")
MIB = 1 << 20


@contextlib.contextmanager
def pair(nbytes, streams=2):
    """A writer with random content, a destination full of canaries, and the peer that connects them."""
    writer, target = TcpTransport("writer", streams=streams), TcpTransport("target")
    writer.memory = np.random.default_rng(nbytes).integers(0, CANARY, nbytes, dtype=np.uint8)
    target.memory = np.full(nbytes, CANARY, dtype=np.uint8)
    writer.register([Region.of(writer.memory)])
    target.register([Region.of(target.memory)])
    try:
        yield writer, target, writer.connect(target.describe())
    finally:
        writer.close()
        target.close()


def ended(transport, count):
    """The errors of ``count`` tickets, each of which ended once."""
    found = {}

    def collect():
        for ticket, error in transport.poll():
            assert ticket not in found
            found[ticket] = error
        return len(found) == count

    assert eventually(collect)
    return found


def shuffled(shape, count, stride, seed=0):
    """Boxes of ``shape``, one after the other in rows of ``stride`` bytes, between two shuffled orders of ``count``."""
    shape = table(*shape)
    sizes = shape.prod(axis=1)
    side = np.zeros((len(shape), 7), dtype=np.int64)
    side[:, 1], side[:, 2], side[:, 3] = np.cumsum(sizes) - sizes, stride, 1
    side[:, 5], side[:, 6] = shape[:, 1] * shape[:, 2], shape[:, 2]
    orders = np.random.default_rng(seed).permutation(count), np.random.default_rng(seed + 1).permutation(count)
    return Transfer(Boxes(shape, side, side.copy()), *orders)


CASES = {
    "tiny": shuffled([(1, 1, 24)], 5000, 40),
    "long": shuffled([(1, 1, 1500)], 3000, 2000),
    "long and many in a row": shuffled([(2, 5, 1024)], 400, 10_300),
    "long and tiny together": shuffled([(1, 1, 3), (1, 1, 6000), (3, 1, 7)], 1000, 6100),
    "tiny, and few long ones": shuffled([(50, 2, 5), (1, 1, 2000)], 1000, 2600),
    "longer than a step": shuffled([(1, 1, tcp_wire.DIRECT_STEP + 12_345)], 3, tcp_wire.DIRECT_STEP + 20_000),
    "longer than a slab, tiny": shuffled([(600, 100, 20)], 3, 1_300_000),
}


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_byte_lands_where_it_belongs(case, streams, monkeypatch):
    """Small frames, so that all streams get some."""
    monkeypatch.setattr(tcp_wire, "LEAST_FRAME", 1 << 15)
    transfer = CASES[case]
    side = transfer.boxes.source
    nbytes = int(side[0, 2]) * len(transfer.source_units)
    with pair(nbytes, streams) as (writer, target, peer):
        expected = target.memory.copy()
        apply([transfer], [writer.memory], [expected])
        writer.write(peer, [transfer], 1)
        assert ended(writer, 1) == {1: ""}
        np.testing.assert_array_equal(target.memory, expected)


def test_neighbours_become_one_piece_and_a_step_may_cut_a_run():
    """More runs than one call to the socket takes, most of which touch each other."""
    order = np.arange(6000)
    with pair(6000 * 1031) as (writer, target, peer):
        writer.write(peer, [rows(1031, order, order)], 1)
        assert ended(writer, 1) == {1: ""}
        np.testing.assert_array_equal(target.memory, writer.memory)


def test_many_tickets_share_the_streams():
    with pair(4 * MIB) as (writer, target, peer):
        for ticket in range(512):
            size = (64, 4096)[ticket % 2]
            writer.write(peer, [rows(size, [ticket * 8192 // size], [ticket * 8192 // size])], ticket)
        assert set(ended(writer, 512).values()) == {""}
        expected = np.full((512, 8192), CANARY, dtype=np.uint8)
        for ticket in range(512):
            size = (64, 4096)[ticket % 2]
            expected[ticket, :size] = writer.memory.reshape(512, 8192)[ticket, :size]
        np.testing.assert_array_equal(target.memory.reshape(512, 8192), expected)


class Impostor:
    """Answers the greetings of ``streams`` connections as the target would, and then does what a test says."""

    def __init__(self, streams, nbytes):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.socks = []
        self.thread = threading.Thread(target=self.answer, args=(streams,))
        self.thread.start()
        host, port = self.listener.getsockname()
        self.descriptor = msgspec.msgpack.encode(
            tcp_wire.TcpDescriptor("target", host, port, bytes(wire.TOKEN_BYTES), (nbytes,))
        )

    def answer(self, streams):
        for _ in range(streams):
            sock, _ = self.listener.accept()
            reception = wire.Reception(sock, tcp_wire.TCP, bytes(wire.TOKEN_BYTES))
            reception.read()
            reception.answer(wire.ACCEPTED, "target")
            self.socks.append(sock)

    def close(self):
        self.thread.join()
        for sock in (self.listener, *self.socks):
            sock.close()


@contextlib.contextmanager
def connected_to_an_impostor(streams, nbytes):
    impostor = Impostor(streams, nbytes)
    writer = TcpTransport("writer", streams=streams)
    writer.register([Region.of(np.zeros(nbytes, dtype=np.uint8))])
    try:
        peer = writer.connect(impostor.descriptor)
        impostor.thread.join()
        yield impostor, writer, peer
    finally:
        writer.close()
        impostor.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_one_connection_that_ends_takes_the_others_and_all_tickets(broken):
    with connected_to_an_impostor(2, 32 * MIB) as (impostor, writer, peer):
        for ticket in range(3):
            writer.write(peer, [rows(32 * MIB, [0], [0])], ticket)
        impostor.socks[broken].close()
        found = ended(writer, 3)
        assert all("target" in error for error in found.values())
        assert not peer.alive
        with pytest.raises(TransportError, match="connect again"):
            writer.write(peer, [rows(64, [0], [0])], 9)


def test_an_acknowledgement_of_what_was_never_sent_is_a_breach():
    """A peer cannot make a ticket a success that it has not been sent."""
    with connected_to_an_impostor(2, 32 * MIB) as (impostor, writer, peer):
        for ticket in range(2):
            writer.write(peer, [rows(32 * MIB, [0], [0])], ticket)
        for sock in impostor.socks:
            sock.sendall(wire.encode_ack(wire.Ack(7)))
        found = ended(writer, 2)
        assert all("ticket 7" in error for error in found.values())


def test_an_early_acknowledgement_does_not_end_a_ticket_that_is_being_sent():
    """Its rows are read until the frame was sent; before that, the ticket is not over."""
    with connected_to_an_impostor(1, 64 * MIB) as (impostor, writer, peer):
        writer.write(peer, [rows(64 * MIB, [0], [0])], 5)
        sock = impostor.socks[0]
        frame = tcp_wire.read_frame(sock)
        sock.sendall(wire.encode_ack(wire.Ack(5)))
        assert wire.read_tables(sock, frame.boxes, frame.units) is not None
        assert eventually(lambda: not peer._outstanding[5].unacknowledged)
        assert writer.poll() == []
        left = memoryview(bytearray(64 * MIB))
        assert wire.receive_into(sock, left)
        assert ended(writer, 1) == {5: ""}


def test_where_not_all_connections_are_taken_none_stays_open():
    impostor = Impostor(1, 64)
    writer = TcpTransport("writer", streams=2)

    def hang_up():
        impostor.thread.join()
        impostor.listener.accept()[0].close()

    second = threading.Thread(target=hang_up)
    second.start()
    with pytest.raises(TransportUnavailable):
        writer.connect(impostor.descriptor)
    second.join()
    assert impostor.socks[0].recv(1) == b""
    writer.close()
    impostor.close()


@pytest.fixture
def target():
    transport = TcpTransport("target")
    transport.memory = np.full(8192, CANARY, dtype=np.uint8)
    transport.register([Region.of(transport.memory)])
    yield transport
    transport.close()


@pytest.fixture
def raw(target):
    """A socket that has been let in, to say what a writer never would."""
    described = tcp_wire.decode_descriptor(target.describe())
    sock = socket.create_connection((target.host, target.port), timeout=10)
    wire.greet(sock, tcp_wire.TCP, "raw", described.token, described.instance)
    yield sock
    sock.close()


def frame(unit, nbytes=4096):
    tables = np.array([1, 1, nbytes, 0, 0, nbytes, 1, 0, 0, 0, unit], dtype="<i8").tobytes()
    return HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 5, nbytes) + tables


def test_long_rows_outside_the_region_are_refused_and_the_next_land(target, raw):
    raw.sendall(frame(2) + bytes(4096))
    acks = tcp_wire.read_acks(raw)
    ticket, error = next(acks)
    assert (ticket, "destination" in error) == (5, True)
    assert (target.memory == CANARY).all()
    raw.sendall(frame(1) + b"\x05" * 4096)
    assert next(acks) == (5, "")
    assert (target.memory[4096:] == 5).all()
    assert (target.memory[:4096] == CANARY).all()


def test_half_a_row_ends_the_connection_and_nothing_else_is_touched(target, raw):
    raw.sendall(frame(0) + b"\x05" * 1000)
    raw.shutdown(socket.SHUT_WR)
    assert raw.recv(1) == b""
    assert (target.memory[1000:] == CANARY).all()
    assert target.counters == {}


@pytest.mark.parametrize("end", ["fence", "close"])
def test_an_end_comes_while_half_a_row_is_awaited(target, raw, end):
    """The receiver waits inside of a row; the end does not wait for the writer, and the other half never lands."""
    raw.sendall(frame(0) + b"\x05" * 1000)
    # Without the native kernel, rows come by slabs: nothing lands before a slab is complete.
    assert not NATIVE or eventually(lambda: (target.memory[:1000] == 5).all())
    if end == "fence":
        assert target.fence("raw") is True
    else:
        target.close()
    with contextlib.suppress(OSError):
        raw.sendall(b"\x06" * 3096)
        assert raw.recv(1) == b""
    assert eventually(lambda: target._receiver.connections == 0)
    assert (target.memory[1000:] == CANARY).all()
