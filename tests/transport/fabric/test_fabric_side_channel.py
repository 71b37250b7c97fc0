"""The side channel against strangers, hostile bytes and peers that break the rules; nobody else may notice."""

import contextlib
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest
from peer_process import eventually

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport import inbound, wire
from kvbaton.transport.conformance.case import CANARY, rows
from kvbaton.transport.fabric import receiver, side
from kvbaton.transport.fabric import transport as transport_module
from kvbaton.transport.fabric.memory import MemoryFabric
from kvbaton.transport.fabric.transport import FabricTransport

OPTIONS = {"executor": "packed", "slabs": "16", "slab_bytes": "4KiB", "staging_slabs": "2"}
HEADER = struct.Struct("<4sBxxxIIIqQQQ")


def transport(name, **options):
    return FabricTransport(name, MemoryFabric(name), options={**OPTIONS, **options})


@pytest.fixture
def target():
    made = transport("target")
    made.memory = np.full(1024, CANARY, dtype=np.uint8)
    made.register([Region.of(made.memory)])
    yield made
    made.close()


@pytest.fixture
def bystander(target):
    """A well-behaved writer that is connected all the while, and must be able to write at the end."""
    made = transport("bystander")
    made.register([Region.of(np.arange(64, dtype=np.uint8))])
    peer = made.connect(target.describe())
    yield
    made.write(peer, [rows(64, [0], [15])], 1)
    ended = []
    assert eventually(lambda: ended.extend(made.poll()) or ended)
    assert tuple(ended[0]) == (1, "")
    np.testing.assert_array_equal(target.memory[960:], np.arange(64))
    made.close()


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


def greeted(target):
    described = side.decode_descriptor(target.describe(), "memory")
    sock = socket.create_connection((described.host, described.port), timeout=10)
    wire.greet(sock, target._dialect, "raw", described.token, "target")
    return sock


def let_in(target):
    """A raw connection with a slab; the number of that slab."""
    sock = greeted(target)
    side.send(sock, side.Hello(True, None))
    welcome = side.read(sock, side.Welcome, side.MAX_WELCOME)
    return sock, welcome.slabs[0]


def header(slab, kind=side.WHOLE, boxes=1, units=1, ticket=5, offset=0, begin=0, payload=64, magic=b"KVBS"):
    return HEADER.pack(magic, kind, boxes, units, slab, ticket, offset, begin, payload)


def tables(shape=(1, 1, 64), destination=(0, 0, 64, 1, 0, 0, 0), unit=0):
    return np.array([*shape, *destination, unit], dtype="<i8").tobytes()


HELLOS = {
    "too long": struct.pack("<I", side.MAX_HELLO + 1),
    "endless": struct.pack("<I", 2**32 - 1) + bytes(100),
    "no msgpack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "another type": struct.pack("<I", 1) + b"\x01",
    "too many connections over": (lambda said: struct.pack("<I", len(said)) + said)(
        msgspec.msgpack.encode((True, None, 1, list(range(side.MAX_OVER + 1))))
    ),
}


@pytest.mark.parametrize("hello", HELLOS)
def test_a_hello_that_is_none_ends_that_connection_only(target, bystander, hello):
    with greeted(target) as sock:
        sock.sendall(HELLOS[hello])
        assert closed(sock)
    assert eventually(lambda: target.counters == {"frame": 1})


def drip(sock, pause=0.02):
    """Send a byte now and then, for ten seconds or until the other side hangs up."""
    for _ in range(int(10 / pause)):
        sock.sendall(b"\0")
        time.sleep(pause)


def test_a_hello_that_drips_is_cut_off(target, bystander, monkeypatch):
    """Each read gets a byte in time, but the hello as a whole does not come."""
    monkeypatch.setattr(receiver, "HELLO_SECONDS", 0.3)
    with greeted(target) as sock:
        sock.sendall(struct.pack("<I", side.MAX_HELLO))
        with pytest.raises(ConnectionError):
            drip(sock)
    assert eventually(lambda: target._receiver.connections == 1)


def test_idle_strangers_cannot_keep_writers_out(target, bystander):
    target._receiver.lobby.most = 2
    described = side.decode_descriptor(target.describe(), "memory")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection((described.host, described.port), timeout=10))
        assert eventually(lambda: len(target._receiver.lobby) == 2)
        writer = stack.enter_context(contextlib.closing(transport("writer")))
        writer.register([Region.of(np.zeros(64, np.uint8))])
        writer.disconnect(writer.connect(target.describe()))
    assert target.counters == {"full": 1}
    assert eventually(lambda: target._receiver.connections == 1)


def test_a_writer_that_finds_no_room_hears_that_it_is_full(target, bystander, monkeypatch):
    monkeypatch.setattr(inbound, "MAX_CONNECTIONS", 1)
    with contextlib.closing(transport("writer")) as writer:
        writer.register([Region.of(np.zeros(64, np.uint8))])
        with pytest.raises(TransportUnavailable, match=r"the peer .* refused: it is full"):
            writer.connect(target.describe())


def test_strangers_without_the_token_learn_nothing(target, bystander):
    described = side.decode_descriptor(target.describe(), "memory")
    with socket.create_connection((described.host, described.port), timeout=10) as sock:
        with pytest.raises(TransportError, match="its token differs"):
            wire.greet(sock, target._dialect, "raw", bytes(16), "target")
        assert closed(sock)
    assert eventually(lambda: target.counters == {"token": 1})


def test_random_bytes_at_every_stage(target, bystander):
    random = np.random.default_rng(7)
    for length in (1, 4, 43, 44, 45, 4000):
        for connect in (greeted, lambda target: let_in(target)[0]):
            with connect(target) as sock:
                # The target may hang up before all of it was sent.
                with contextlib.suppress(OSError):
                    sock.sendall(random.bytes(length))
                    sock.shutdown(socket.SHUT_WR)
                assert closed(sock)
    assert (target.memory == CANARY).all()


BREACHES = {
    "magic": lambda slab: header(slab, magic=b"NOPE"),
    "kind": lambda slab: header(slab, kind=3),
    "no boxes": lambda slab: header(slab, boxes=0),
    "too many boxes": lambda slab: header(slab, boxes=2**32 - 1),
    "too many units": lambda slab: header(slab, units=2**32 - 1),
    "another's slab": lambda slab: header((slab + 1) % 16) + tables(),
    "no slab": lambda slab: header(2**32 - 1) + tables(),
    "past the slab": lambda slab: header(slab, offset=4033) + tables(),
    "far past the slab": lambda slab: header(slab, offset=2**64 - 64) + tables(),
    "a payload that is too long": lambda slab: header(slab, payload=65) + tables(),
    "a payload that begins late": lambda slab: header(slab, begin=1) + tables(),
    "a payload that begins nowhere": lambda slab: header(slab, begin=2**64 - 1) + tables(),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_format_ends_that_connection_only(target, bystander, breach):
    sock, slab = let_in(target)
    with sock:
        sock.sendall(BREACHES[breach](slab))
        assert closed(sock)
    assert eventually(lambda: target.counters == {"frame": 1})
    assert (target.memory == CANARY).all()


OUTSIDE = {
    "a unit": {"unit": 16},
    "a negative unit": {"unit": -1},
    "a region": {"destination": (1, 0, 64, 1, 0, 0, 0)},
    "a negative offset": {"destination": (0, -64, 64, 1, 0, 0, 0)},
    "a stride that wraps": {"shape": (2, 2, 16), "destination": (0, 0, 64, 1, 0, 2**63 - 1, 2**63 - 1)},
    "no units per row": {"destination": (0, 0, 64, 0, 0, 0, 0)},
}


def read_acks(sock, count):
    buffer, acks = bytearray(), []
    while len(acks) < count:
        received = sock.recv(4096)
        assert received, "the connection ended"
        buffer += received
        acks += wire.take_acks(buffer)
    assert not buffer
    return acks


@pytest.mark.parametrize("outside", OUTSIDE)
def test_the_receiver_checks_bounds_itself(target, bystander, outside):
    """A writer that skips its own check: the frame is refused, and the next one on the same connection lands."""
    sock, slab = let_in(target)
    with sock:
        sock.sendall(header(slab) + tables(**OUTSIDE[outside]))
        refused, over = read_acks(sock, 2)
        assert refused.number == 5
        assert refused.error.startswith("destination")
        assert over == wire.Ack(slab)
        assert (target.memory == CANARY).all()
        sock.sendall(header(slab, ticket=6) + tables(unit=2))
        assert read_acks(sock, 1) == [wire.Ack(slab)]
    assert (target.memory[128:192] == 0).all()
    assert target.counters == {"bounds": 1}


def test_tickets_share_a_slab_and_only_the_one_that_is_outside_is_refused(target, bystander):
    sock, slab = let_in(target)
    with sock:
        inside = [header(slab, kind=side.PART, ticket=1) + tables(unit=1), header(slab, ticket=3) + tables(unit=3)]
        sock.sendall(inside[0] + header(slab, kind=side.PART, ticket=2) + tables(unit=99) + inside[1])
        refused, over = read_acks(sock, 2)
        assert refused.number == 2
        assert refused.error.startswith("destination")
        assert over == wire.Ack(slab)
        found = target.memory.reshape(16, 64)
        assert (found[[1, 3]] == 0).all()
        assert (np.delete(found, [1, 3], axis=0) == CANARY).all()
        # What was refused before says nothing of what comes after.
        sock.sendall(header(slab) + tables(unit=0))
        assert read_acks(sock, 1) == [wire.Ack(slab)]


def test_slabs_of_a_silent_end_are_not_granted_again_but_those_of_a_goodbye_are(target):
    sock, _ = let_in(target)
    sock.sendall(side.FAREWELL)
    assert closed(sock)
    sock.close()
    assert eventually(lambda: target._receiver.free_slabs == 16)
    sock, _ = let_in(target)
    sock.close()
    assert eventually(lambda: not target._receiver.connections_of("raw"))
    # Two were granted; nothing is known of its process.
    assert target._receiver.free_slabs == 14


DRIPS = b"an answer to the greeting that drips"
LONG = struct.pack("<I", side.MAX_WELCOME)
"""The begin of a welcome; what is to follow drips."""


class Impostor:
    """Welcomes one writer as it likes, and then says what a test says."""

    def __init__(self, target, welcome=None):
        self.listener = socket.create_server(("127.0.0.1", 0))
        host, port = self.listener.getsockname()
        described = side.decode_descriptor(target.describe(), "memory")
        self.descriptor = msgspec.msgpack.encode(msgspec.structs.replace(described, host=host, port=port))
        self.dialect, self.token = target._dialect, described.token
        self.welcome = welcome or side.Welcome(target.fabric.describe(), False, 4096, (0, 1), (side.PACKED,))
        self.sock = None

    def serve(self):
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        if self.welcome == DRIPS:
            with contextlib.suppress(ConnectionError):
                drip(self.sock, 0.2)
            return
        reception = wire.Reception(self.sock, self.dialect, self.token)
        reception.read()
        reception.answer(wire.ACCEPTED, "target")
        side.read(self.sock, side.Hello, side.MAX_HELLO)
        if isinstance(self.welcome, bytes):
            self.sock.sendall(self.welcome)
            if self.welcome == LONG:
                with contextlib.suppress(ConnectionError):
                    drip(self.sock, 0.2)
        else:
            side.send(self.sock, self.welcome)


@pytest.fixture
def writer():
    made = transport("writer")
    made.register([Region.of(np.zeros(1024, dtype=np.uint8))])
    yield made
    made.close()


@contextlib.contextmanager
def deceived(writer, target, welcome=None):
    """A writer that connects to an impostor: what `connect` gives, or its error."""
    impostor = Impostor(target, welcome)
    thread = threading.Thread(target=impostor.serve)
    thread.start()
    try:
        try:
            peer = writer.connect(impostor.descriptor)
        except TransportError as error:
            peer = error
        thread.join()
        yield impostor, peer
    finally:
        thread.join()
        impostor.listener.close()
        impostor.sock.close()


WELCOMES = {
    "too long": (struct.pack("<I", side.MAX_WELCOME + 1), "did not let this process in"),
    "garbage": (struct.pack("<I", 2) + b"\xc1\xc1", "did not let this process in"),
    "no slab": (side.Welcome(b"", False, 4096, (), (side.PACKED,)), "granted no slab"),
    "a refusal": (side.Welcome(b"", False, 0, (), (), "go away"), "go away"),
    "a fabric that is none": (
        side.Welcome(b"nonsense", False, 4096, (0,), (side.PACKED,)),
        "not a descriptor of the memory",
    ),
    "another number of ways": (side.Welcome(b"", False, 4096, (0,), ()), "ways into 0 regions"),
}


@pytest.mark.parametrize("welcome", WELCOMES)
def test_a_welcome_that_is_none_is_refused(writer, target, welcome):
    said, reason = WELCOMES[welcome]
    with deceived(writer, target, said) as (_, peer):
        assert isinstance(peer, TransportError)
        assert reason in str(peer)


@pytest.mark.parametrize(
    ("welcome", "reason"), [(DRIPS, "cannot connect to peer"), (LONG, "did not let this process in")]
)
def test_a_peer_that_drips_its_answers_is_given_up_as_a_whole(writer, target, monkeypatch, welcome, reason):
    """Each read gets a byte in time, but the handshake has one deadline."""
    monkeypatch.setattr(transport_module, "CONNECT_SECONDS", 1.0)
    with deceived(writer, target, welcome) as (_, error):
        assert isinstance(error, TransportUnavailable)
        assert reason in str(error)
        assert "it took more than" in str(error)


ACKS = {
    "of a slab that was not written": wire.encode_ack(wire.Ack(1)),
    "of no slab": wire.encode_ack(wire.Ack(77)),
    "of another ticket": wire.encode_ack(wire.Ack(2, "refused")),
    "too long": struct.pack("<qH", 0, 60000),
    "random": np.random.default_rng(1).bytes(400),
}


@pytest.mark.parametrize("ack", ACKS)
def test_acknowledgements_that_are_none_end_the_peer_and_its_tickets(writer, target, ack):
    with deceived(writer, target) as (impostor, peer):
        writer.write(peer, [rows(64, [0], [0])], 1)
        assert side.read_header(impostor.sock).ticket == 1
        impostor.sock.sendall(ACKS[ack])
        ended = []
        assert eventually(lambda: ended.extend(writer.poll()) or ended)
        assert ended[0].ticket == 1
        assert "broke" in ended[0].error
        assert not peer.alive


def test_a_peer_that_stops_reading_holds_up_nobody_else(writer, target, bystander):
    count = 2000
    memory = np.zeros(count * 8, dtype=np.uint8)
    many = transport("many")
    many.register([Region.of(memory)])
    try:
        with deceived(many, target) as (_, silent):
            living = many.connect(target.describe())
            for ticket in range(20):
                many.write(silent, [rows(8, np.arange(100), np.arange(100))], ticket)
            many.write(living, [rows(8, [0], [0])], 100)
            ended = []
            assert eventually(lambda: ended.extend(many.poll()) or ended)
            assert [tuple(one) for one in ended] == [(100, "")]
            many.disconnect(silent)
            assert eventually(lambda: ended.extend(many.poll()) or len(ended) == 21)
            assert all(one.error for one in ended[1:])
    finally:
        many.close()


def test_a_fabric_of_another_name_is_not_connected(writer, target):
    described = side.decode_descriptor(target.describe(), "memory")
    other = msgspec.msgpack.encode(msgspec.structs.replace(described, fabric="nixl"))
    for accept in (writer.connect, writer.admit):
        with pytest.raises(TransportError, match="a descriptor of the nixl transport, not of memory"):
            accept(other)


def test_another_process_at_that_address_is_found_out(writer, target):
    described = side.decode_descriptor(target.describe(), "memory")
    other = msgspec.msgpack.encode(msgspec.structs.replace(described, token=bytes(16)))
    with pytest.raises(TransportUnavailable, match="its token differs"):
        writer.connect(other)
