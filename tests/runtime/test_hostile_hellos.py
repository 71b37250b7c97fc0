"""Strangers that say Hello: with absurd layouts, and with hosts that do not answer; nobody else may notice."""

import contextlib
import socket
import time

import msgspec
import pytest
import zmq
from rank_world import DEADLINE, wait
from room_pairs import KV, hand_over

from kvbaton.errors import HandshakeError, ProtocolError
from kvbaton.layout import PAGED, Axis, Component, RankLayout, Tensor
from kvbaton.protocol import Refused, answer_hello, decode, encode, make_hello
from kvbaton.protocol.packed import MAX_LAYOUT_BYTES
from kvbaton.runtime import destinations, reach
from kvbaton.transport import tcp_wire


@contextlib.contextmanager
def strangers(endpoint, count):
    """Raw connections to a control endpoint."""
    context = zmq.Context()
    made = []
    try:
        for _ in range(count):
            sock = context.socket(zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(endpoint)
            made.append(sock)
        yield made
    finally:
        for sock in made:
            sock.close(0)
        context.term()


@contextlib.contextmanager
def dead_host():
    """An address whose connections are never taken: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(listener.getsockname())
        time.sleep(0.05)
        yield listener.getsockname()


def hello(layout, sources=None, **changes):
    descriptor = msgspec.msgpack.encode(tcp_wire.TcpDescriptor("x", "127.0.0.1", 9, bytes(16), (1 << 20,)))
    message = make_hello(
        instance=changes.pop("instance", "stranger"),
        model=changes.pop("model", ""),
        layout=layout,
        destination_index=0,
        destinations=1,
        sources=sources or [layout],
        source_index=0,
        transports={"tcp": descriptor},
    )
    return msgspec.structs.replace(message, **changes)


def answers(sock):
    assert sock.poll(1000 * DEADLINE)
    return decode(sock.recv())


def absurd_layout(tensors, spans):
    """Every tensor has axes of its own, with many spans."""
    made = []
    for number in range(tensors):
        axes = (
            Axis("token", 1, 0, ((0, 1),)),
            Axis("a", 4 * spans + number, 1, tuple((3 * at, 1) for at in range(spans))),
        )
        made.append(Tensor("k", number, 0, 0, 1, 1 << 30, "int8", axes))
    return RankLayout((Component("kv", PAGED, tuple(made)),))


@pytest.fixture
def tcp_world(world):
    world.transport = "tcp"
    return world


def test_forty_hellos_that_name_dead_hosts_hold_up_nobody(tcp_world):
    """They fit in every other way, so that each of them is dialled; a decode rank joins and receives meanwhile."""
    (source,) = tcp_world.prefill(KV.layout())
    source.fill("kv", [0, 1], (0, 8))
    with strangers(source.manager.endpoint, 40) as others, dead_host() as (host, port):
        dead = msgspec.msgpack.encode(tcp_wire.TcpDescriptor("x", host, port, bytes(16), (1 << 20,)))
        for number, other in enumerate(others):
            other.send(encode(hello(source.layout, instance=f"stranger-{number}", transports={"tcp": dead})))
        handshakes = source.manager.side._destinations._handshakes
        wait(lambda: len(handshakes) == 40, "the strangers' handshakes")
        (destination,) = tcp_world.decode(KV.layout())
        hand_over(source, destination)
        assert handshakes, "all strangers were served before"
        for other in others:
            (refused,) = answers(other)
            assert isinstance(refused, Refused)
            assert "cannot connect" in refused.reason
        hand_over(source, destination, 1)
    assert not source.manager._control.faults


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "model"),
        ({"layout": KV.layout(dim=8)}, "dim"),
        ({"sources": [KV.layout(rows=9)]}, "stale"),
        ({"transports": {"nixl": b""}}, "no transport in common"),
    ],
)
def test_no_host_is_dialled_that_a_hello_names_unless_it_fits(tcp_world, monkeypatch, changes, reason):
    (source,) = tcp_world.prefill(KV.layout())
    with socket.create_server(("127.0.0.1", 0)) as listener, strangers(source.manager.endpoint, 1) as (other,):
        host, port = listener.getsockname()
        named = msgspec.msgpack.encode(tcp_wire.TcpDescriptor("x", host, port, bytes(16), (1 << 20,)))
        changes = {"transports": {"tcp": named}, **changes}
        layout = changes.pop("layout", source.layout)
        sources = changes.pop("sources", [source.layout])
        other.send(encode(hello(layout, sources, **changes)))
        (refused,) = answers(other)
        assert reason in refused.reason
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    # The same one, where all fits, is dialled.
    with socket.create_server(("127.0.0.1", 0)) as listener, strangers(source.manager.endpoint, 1) as (other,):
        host, port = listener.getsockname()
        named = msgspec.msgpack.encode(tcp_wire.TcpDescriptor("x", host, port, bytes(16), (1 << 20,)))
        other.send(encode(hello(source.layout, transports={"tcp": named})))
        listener.settimeout(DEADLINE)
        listener.accept()[0].close()


def test_a_connection_gets_one_handshake(tcp_world):
    """Refused once, it is not listened to again, whether its Hello was wrong or no Hello at all."""
    (source,) = tcp_world.prefill(KV.layout())
    core = source.manager.side.core
    with strangers(source.manager.endpoint, 2) as (wrong, garbage):
        wrong.send(encode(hello(source.layout, model="other")))
        assert "model" in answers(wrong)[0].reason
        for _ in range(5):
            garbage.send(b"garbage")
        assert "does not begin" in answers(garbage)[0].reason
        for other in (wrong, garbage):
            other.send(encode(hello(source.layout)))
        wait(lambda: core.unexpected["second Hello"] == 2)
        assert not garbage.poll(50)


def test_handshakes_that_wait_are_bounded(tcp_world, monkeypatch):
    monkeypatch.setattr(destinations, "AT_ONCE", 2)
    monkeypatch.setattr(destinations, "MOST_WAITING", 3)
    (source,) = tcp_world.prefill(KV.layout())
    side = source.manager.side._destinations
    with strangers(source.manager.endpoint, 6) as others, dead_host() as (host, port):
        dead = msgspec.msgpack.encode(tcp_wire.TcpDescriptor("x", host, port, bytes(16), (1 << 20,)))
        for number, other in enumerate(others):
            other.send(encode(hello(source.layout, transports={"tcp": dead})))
            wait(lambda number=number: len(side._handshakes) >= min(number + 1, 5))
        (refused,) = answers(others[5])
        assert "3 other handshakes wait" in refused.reason
        assert (len(side._answering), len(side._waiting)) == (2, 3)
        # One that leaves gives its place back.
        others[4].close(0)
        wait(lambda: len(side._waiting) == 2)
    wait(lambda: not (side._handshakes or side._waiting or side._answering or side._waiting_bytes))


def test_no_other_transport_is_tried_when_the_first_took_too_long(tcp_world, monkeypatch):
    monkeypatch.setattr(reach, "PATIENCE_SECONDS", -1.0)
    (source,) = tcp_world.prefill(KV.layout())
    with strangers(source.manager.endpoint, 1) as (other,):
        other.send(encode(hello(source.layout)))
        assert "tcp: not tried" in answers(other)[0].reason


def test_absurd_layouts_are_refused_while_others_are_served(tcp_world):
    source, destination = tcp_world.prefill(KV.layout())[0], tcp_world.decode(KV.layout())[0]
    source.fill("kv", [0, 1], (0, 8))
    absurd = [absurd_layout(1500, 100), absurd_layout(4000, 1)]
    with strangers(source.manager.endpoint, 10) as others:
        for number, other in enumerate(others):
            other.send(encode(hello(absurd[number % 2], [source.layout, *absurd] * 3)))
        hand_over(source, destination)
        for other in others:
            assert isinstance(answers(other)[0], Refused)
        hand_over(source, destination, 1)
    assert not source.manager._control.faults


def answer(message, layout):
    return answer_hello(message, instance="prefill", model="", layout=layout, transports=("tcp",))


def test_a_hello_is_taken_in_without_unpacking_its_layouts():
    """The control thread decodes frames: what it keeps of a large layout are the bytes that came."""
    absurd = absurd_layout(1500, 100)
    (decoded,) = decode(encode(hello(absurd)))
    assert isinstance(decoded.layout, msgspec.Raw)
    assert all(isinstance(source, msgspec.Raw) for source in decoded.sources)
    with pytest.raises(HandshakeError, match=r"\d+ spans"):
        answer(decoded, absurd)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"\x01", "cannot be decoded"),
        (b"\x93\xdd\xff\xff\xff\xff", None),
        (msgspec.msgpack.encode([[["kv", [], [0] * (1 << 14)]]]), "cannot be decoded"),
        (msgspec.msgpack.encode([[]] + [[0] * 100_000] * 11), "bytes when it is packed"),
        (msgspec.msgpack.encode([[["kv", [], [["k", -1, 0, 0, 1, 1, "int8", []]]]]]), "cannot be decoded"),
        (msgspec.msgpack.encode([[["kv", [], [["k", 0, 0, 1 << 60, 1, 1, "int8", []]]]]]), "cannot be decoded"),
        (msgspec.msgpack.encode([[["k" * 1000, [], []]]]), "cannot be decoded"),
        (msgspec.msgpack.encode([[["k", [], []]] * 1000]), "cannot be decoded"),
        (
            msgspec.msgpack.encode([[["k", [], [["k", 0, 0, 0, 1, 1, "int8", [["a", 1, 1, []]] * 9]]]]]),
            "cannot be decoded",
        ),
    ],
)
def test_layouts_out_of_bounds_are_refused_before_they_are_made(packed, reason):
    layout = KV.layout()
    message = msgspec.structs.replace(hello(layout), layout=msgspec.Raw(packed))
    if reason is None:
        # It is not even a frame.
        with pytest.raises(ProtocolError):
            decode(encode(message))
        return
    assert len(packed) < MAX_LAYOUT_BYTES or "bytes" in reason
    (decoded,) = decode(encode(message))
    with pytest.raises(HandshakeError, match=reason):
        answer(decoded, layout)
