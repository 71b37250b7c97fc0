"""The tcp port against strangers, hostile bytes and peers that break the rules; nobody else may notice."""

import contextlib
import hmac
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest
from peer_process import eventually

from kvbaton.errors import AddressError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport import inbound, tcp_wire, wire
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.dial import PAUSES
from kvbaton.transport.tcp import TcpTransport

HEADER = struct.Struct("<4sBxxxIIqQ")


@pytest.fixture
def target():
    transport = TcpTransport("target")
    transport.memory = np.full(1024, CANARY, dtype=np.uint8)
    transport.register([Region.of(transport.memory)])
    yield transport
    transport.close()


@pytest.fixture
def bystander(target):
    """A well-behaved writer that is connected all the while, and must be able to write at the end."""
    transport = TcpTransport("bystander", streams=1)
    transport.register([Region.of(np.arange(64, dtype=np.uint8))])
    peer = transport.connect(target.describe())
    yield
    transport.write(peer, [rows(64, [0], [15])], 1)
    ended = []
    assert eventually(lambda: ended.extend(transport.poll()) or ended)
    assert tuple(ended[0]) == (1, "")
    np.testing.assert_array_equal(target.memory[960:], np.arange(64))
    transport.close()


BEGINNING = struct.Struct("<8sHB32sB")


def greeting(target, *, magic=tcp_wire.TCP.magic, version=tcp_wire.TCP.version, token=None, name=b"raw", nonce=b""):
    described = tcp_wire.decode_descriptor(target.describe())
    said = b"kvbaton writer" + tcp_wire.TCP.magic + nonce + bytes(32) + name
    proof = hmac.digest(described.token if token is None else token, said, "sha256")
    return struct.pack("<8sH32s32sB", magic, version, bytes(32), proof, len(name)) + name


def nonce_of(sock):
    magic, version, status, nonce, length = BEGINNING.unpack(sock.recv(BEGINNING.size, socket.MSG_WAITALL))
    assert (magic, version, status, length) == (tcp_wire.TCP.magic, tcp_wire.TCP.version, wire.BEGIN, 0)
    return nonce


def dial(target):
    return socket.create_connection((target.host, target.port), timeout=10)


def greeted(target):
    sock = dial(target)
    sock.sendall(greeting(target, nonce=nonce_of(sock)))
    assert sock.recv(BEGINNING.size, socket.MSG_WAITALL)[10] == wire.ACCEPTED
    assert sock.recv(len("target"), socket.MSG_WAITALL) == b"target"
    return sock


def closed(sock):
    """Whether the other side ended the connection; what it said before is read away."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\nHost: example\r\nUser-Agent: something\r\n\r\n", "greeting"),
    "zeros": (bytes(64), "greeting"),
    "no name": (lambda target, nonce: greeting(target, name=b"", nonce=nonce), "greeting"),
    "a name that is no text": (lambda target, nonce: greeting(target, name=b"\xff\xfe", nonce=nonce), "greeting"),
    "a wrong token": (lambda target, nonce: greeting(target, token=bytes(16), nonce=nonce), "token"),
    "a greeting of another connection": (lambda target, nonce: greeting(target, nonce=bytes(32)), "token"),
    "another version": (lambda target, nonce: greeting(target, version=99, nonce=nonce), "version"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_turned_away_and_counted(target, bystander, stranger):
    said, counter = STRANGERS[stranger]
    with dial(target) as sock:
        sock.sendall(said if isinstance(said, bytes) else said(target, nonce_of(sock)))
        assert closed(sock)
    assert eventually(lambda: target.counters == {counter: 1})


def test_random_bytes_at_every_stage(target, bystander):
    random = np.random.default_rng(7)
    for length in (1, 74, 75, 90, 4000):
        for connect in (dial, greeted):
            with connect(target) as sock:
                # The target may hang up before all of it was sent.
                with contextlib.suppress(OSError):
                    sock.sendall(random.bytes(length))
                    sock.shutdown(socket.SHUT_WR)
                assert closed(sock)
    assert (target.memory == CANARY).all()


def tables(shape=(1, 1, 64), side=(0, 0, 64, 1, 0, 0, 0), unit=0):
    return np.array([*shape, *side, unit], dtype="<i8").tobytes()


BREACHES = {
    "magic": HEADER.pack(b"NOPE", 1, 1, 1, 5, 64),
    "flags": HEADER.pack(tcp_wire.FRAME, 2, 1, 1, 5, 64),
    "no boxes": HEADER.pack(tcp_wire.FRAME, 1, 0, 1, 5, 64),
    "too many boxes": HEADER.pack(tcp_wire.FRAME, 1, 2**32 - 1, 1, 5, 64),
    "too many units": HEADER.pack(tcp_wire.FRAME, 1, 1, 2**32 - 1, 5, 64),
    "a longer payload": HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 5, 65) + tables() + bytes(65),
    "a huge payload": HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 5, 2**64 - 1) + tables(),
    "a shorter payload": HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 5, 63) + tables() + bytes(63),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_format_ends_that_connection_only(target, bystander, breach):
    with greeted(target) as sock:
        sock.sendall(BREACHES[breach])
        assert closed(sock)
    assert eventually(lambda: target.counters == {"frame": 1})
    assert (target.memory == CANARY).all()


OUTSIDE = {
    "a unit": {"unit": 16},
    "a negative unit": {"unit": -1},
    "a huge unit": {"unit": 2**63 - 1},
    "a region": {"side": (1, 0, 64, 1, 0, 0, 0)},
    "a negative offset": {"side": (0, -64, 64, 1, 0, 0, 0)},
    "a stride that wraps": {"shape": (2, 2, 16), "side": (0, 0, 64, 1, 0, 2**63 - 1, 2**63 - 1)},
    "no units per row": {"side": (0, 0, 64, 0, 0, 0, 0)},
}


@pytest.mark.parametrize("outside", OUTSIDE)
def test_the_receiver_checks_bounds_itself(target, bystander, outside):
    """A writer that skips its own check: the frame is refused, and the next one on the same connection lands."""
    with greeted(target) as sock:
        sock.sendall(HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 5, 64) + tables(**OUTSIDE[outside]) + bytes(64))
        acks = tcp_wire.read_acks(sock)
        ticket, error = next(acks)
        assert ticket == 5
        assert "destination" in error
        assert (target.memory == CANARY).all()
        sock.sendall(HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 6, 64) + tables(unit=2) + b"\x05" * 64)
        assert next(acks) == (6, "")
    assert (target.memory[128:192] == 5).all()
    assert (target.memory[:128] == CANARY).all()
    assert target.counters == {"bounds": 1}


def test_a_refused_part_makes_the_whole_ticket_fail(target):
    with greeted(target) as sock:
        sock.sendall(HEADER.pack(tcp_wire.FRAME, 0, 1, 1, 5, 64) + tables(unit=99) + bytes(64))
        sock.sendall(HEADER.pack(tcp_wire.FRAME, 1, 1, 1, 5, 64) + tables(unit=0) + bytes(64))
        ticket, error = next(tcp_wire.read_acks(sock))
        assert (ticket, bool(error)) == (5, True)


def test_who_says_nothing_is_cut_off(target, bystander):
    target._receiver.lobby.seconds = 0.1
    with dial(target) as sock:
        sock.sendall(b"K")
        assert closed(sock)


def test_idle_strangers_cannot_keep_writers_out(target, bystander):
    """The port is full of connections that say nothing: the one that waits longest goes, and writers come in."""
    target._receiver.lobby.most = 3
    idle = [dial(target) for _ in range(3)]
    assert eventually(lambda: len(target._receiver.lobby) == 3)
    greeted(target).close()
    nonce_of(idle[0])
    assert idle[0].recv(BEGINNING.size, socket.MSG_WAITALL)[10] == wire.FULL
    assert closed(idle[0])
    assert target.counters == {"full": 1}
    writer = TcpTransport("writer")
    writer.register([Region.of(np.zeros(64, dtype=np.uint8))])
    for _ in range(3):
        idle += [dial(target) for _ in range(30)]
        writer.disconnect(writer.connect(target.describe()))
    writer.close()
    for sock in idle:
        sock.close()
    assert eventually(lambda: (target._receiver.connections, len(target._receiver.lobby)) == (1, 0))


def test_a_writer_tries_again_where_there_is_no_room(target, bystander, monkeypatch):
    monkeypatch.setattr(inbound, "MAX_CONNECTIONS", 2)
    first, writer = greeted(target), TcpTransport("writer", streams=1)
    writer.register([Region.of(np.zeros(64, dtype=np.uint8))])
    with pytest.raises(TransportUnavailable, match=r"the peer .* refused: it is full"):
        writer.connect(target.describe())
    tries = target.counters["full"]
    assert tries == len(PAUSES) + 1
    leaves = threading.Thread(target=lambda: eventually(lambda: target.counters["full"] > tries) and first.close())
    leaves.start()
    writer.disconnect(writer.connect(target.describe()))
    leaves.join()
    writer.close()


@pytest.mark.parametrize(
    "host", ["a\0b", "x" * 300, "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "", "..", "-"]
)
def test_a_host_that_cannot_be_dialled(target, host):
    described = msgspec.structs.replace(tcp_wire.decode_descriptor(target.describe()), host=host, port=1)
    writer = TcpTransport("writer")
    with pytest.raises(TransportUnavailable, match="cannot connect"):
        writer.connect(msgspec.msgpack.encode(described))
    writer.close()


def test_a_host_whose_name_is_never_answered(target, monkeypatch):
    free, before = threading.Event(), set(threading.enumerate())
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **options: (
        (free.wait() and []) if host == "slow" else known(host, *more, **options)
    ))  # fmt: skip
    monkeypatch.setattr("kvbaton.transport.dial.ANSWER_SECONDS", 0.05)
    described = msgspec.structs.replace(tcp_wire.decode_descriptor(target.describe()), host="slow")
    writer = TcpTransport("writer")
    with pytest.raises(TransportUnavailable, match=r"cannot connect.*'slow' was not looked up"):
        writer.connect(msgspec.msgpack.encode(described))
    writer.close()
    free.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_a_wrong_token_is_said_to_the_writer(target):
    described = tcp_wire.decode_descriptor(target.describe())
    other = msgspec.structs.replace(described, token=bytes(16))
    writer = TcpTransport("writer")
    with pytest.raises(TransportUnavailable, match="its token differs"):
        writer.connect(msgspec.msgpack.encode(other))
    writer.close()


def test_who_listens_to_a_connection_does_not_learn_the_token(target):
    """Both sides prove that they know it; what was said once opens no other connection."""
    writer, heard, listener = TcpTransport("writer", streams=1), bytearray(), socket.create_server(("127.0.0.1", 0))
    socks = []

    def carry(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                heard.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve():
        near, far = listener.accept()[0], dial(target)
        socks.extend([near, far])
        threading.Thread(target=carry, args=(near, far), daemon=True).start()
        carry(far, near)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    described = tcp_wire.decode_descriptor(target.describe())
    there = msgspec.structs.replace(described, port=listener.getsockname()[1])
    peer = writer.connect(msgspec.msgpack.encode(there))
    writer.disconnect(peer)
    writer.close()
    thread.join(10)
    assert b"writer" in heard
    assert described.token not in heard
    said = heard[heard.index(tcp_wire.TCP.magic, 1) :]
    with dial(target) as sock:
        sock.sendall(said)
        assert closed(sock)
    for sock in (listener, *socks):
        sock.close()


def test_one_that_does_not_know_the_token_is_not_written_to(target):
    described = tcp_wire.decode_descriptor(target.describe())
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        sock, _ = listener.accept()
        with sock:
            reception = wire.Reception(sock, tcp_wire.TCP, bytes(16))
            assert not reception.read().authentic
            reception.answer(wire.ACCEPTED, "target")
            assert closed(sock)

    thread = threading.Thread(target=answer)
    thread.start()
    writer = TcpTransport("writer", streams=1)
    with pytest.raises(TransportUnavailable, match="does not know the token"):
        writer.connect(msgspec.msgpack.encode(msgspec.structs.replace(described, port=listener.getsockname()[1])))
    writer.close()
    thread.join()
    listener.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_in_a_descriptor_is_not_dialled(target, host):
    described = msgspec.structs.replace(tcp_wire.decode_descriptor(target.describe()), host=host)
    writer = TcpTransport("writer")
    with pytest.raises(TransportUnavailable, match="every address"):
        writer.connect(msgspec.msgpack.encode(described))
    writer.close()


def test_what_answers_but_is_no_kvbaton(target):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"SSH-2.0-something\r\n")
            closed(sock)

    thread = threading.Thread(target=answer)
    thread.start()
    described = msgspec.structs.replace(tcp_wire.decode_descriptor(target.describe()), port=listener.getsockname()[1])
    writer = TcpTransport("writer")
    with pytest.raises(TransportUnavailable, match="does not speak the tcp transport"):
        writer.connect(msgspec.msgpack.encode(described))
    writer.close()
    thread.join()
    listener.close()


def test_write_does_not_wait_for_a_peer_that_does_not_read(target):
    """The peer takes nothing: `write` and `poll` return, and `disconnect` ends the tickets within its limit."""
    listener = socket.create_server(("127.0.0.1", 0))
    described = msgspec.structs.replace(
        tcp_wire.decode_descriptor(target.describe()), port=listener.getsockname()[1], regions=(1 << 26,)
    )
    accepted = []

    def answer():
        sock, _ = listener.accept()
        reception = wire.Reception(sock, tcp_wire.TCP, described.token)
        reception.read()
        reception.answer(wire.ACCEPTED, "target")
        accepted.append(sock)

    thread = threading.Thread(target=answer)
    thread.start()
    writer = TcpTransport("writer", streams=1)
    writer.register([Region.of(np.zeros(1 << 26, dtype=np.uint8))])
    peer = writer.connect(msgspec.msgpack.encode(described))
    thread.join()
    for ticket in range(3):
        writer.write(peer, [rows(1 << 26, [0], [0])], ticket)
    time.sleep(0.05)
    assert writer.poll() == []
    writer.disconnect(peer)
    assert sorted(completion.ticket for completion in writer.poll()) == [0, 1, 2]
    writer.close()
    accepted[0].close()
    listener.close()


def test_large_tables_are_cut_into_frames():
    boxes = Boxes(*(np.ones((wire.MAX_BOXES + 1, columns), dtype=np.int64) for columns in (3, 7, 7)))
    units = np.arange(2 * wire.MAX_UNITS + 1)
    parts = list(wire.cut([Transfer(boxes, units, units)], 1 << 40))
    assert [(len(part.boxes.shape), len(part.source_units)) for part in parts] == [
        (count, size) for count in (wire.MAX_BOXES, 1) for size in (wire.MAX_UNITS, wire.MAX_UNITS, 1)
    ]
    assert sum(part.nbytes for part in parts) == Transfer(boxes, units, units).nbytes


@pytest.mark.parametrize("bind", ["0.0.0.0", "[::]:0", "::"])
def test_a_wildcard_is_bound_but_never_advertised(bind):
    with pytest.raises(AddressError, match="advertise"):
        TcpTransport("one", bind=bind)
    transport = TcpTransport("one", bind=bind, advertise="localhost")
    assert tcp_wire.decode_descriptor(transport.describe()).host == "localhost"
    transport.close()


@pytest.mark.parametrize("bind", [":5", "10.0.0.1:99999", "10.0.0.1:", "192.0.2.7", "no.such.host.invalid"])
def test_addresses_that_cannot_be_bound(bind):
    with pytest.raises(AddressError):
        TcpTransport("one", bind=bind)


def test_a_taken_port_is_an_address_error(target):
    with pytest.raises(AddressError, match=str(target.port)):
        TcpTransport("two", bind=f"127.0.0.1:{target.port}")


def test_units_may_be_used_again_after_write(target):
    writer = TcpTransport("writer")
    writer.register([Region.of(np.arange(128, dtype=np.uint8))])
    peer = writer.connect(target.describe())
    source, destination = np.array([1]), np.array([3])
    writer.write(peer, [rows(64, source, destination)], 1)
    source[:], destination[:] = 0, 9
    assert eventually(writer.poll)
    np.testing.assert_array_equal(target.memory[192:256], np.arange(64, 128))
    assert (target.memory[576:640] == CANARY).all()
    writer.close()


def test_too_many_regions_for_a_descriptor_are_refused():
    transport = TcpTransport("one")
    region = Region.of(np.zeros(70_000, dtype=np.uint8))
    transport.register([region] * 20_000)
    with pytest.raises(TransportError, match="20000 regions"):
        transport.describe()
    transport.close()
