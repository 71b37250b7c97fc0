"""The control plane by itself: frames from many threads, garbage, disconnects, descriptors."""

import itertools
import os
import threading
from collections import Counter, defaultdict

import pytest
import zmq
from rank_world import FAST, Model, Rank, wait

import kvbaton as kb
from kvbaton import errors
from kvbaton.protocol import Ping, decode, encode
from kvbaton.runtime.control import ControlPlane

SMALL = Model(("kv",))


class Recorder:
    """A handler that decodes frames, counts what cannot be, and notes who is gone."""

    def __init__(self):
        self.messages, self.bad, self.gone = defaultdict(list), Counter(), []
        self.deadline = None

    def on_frame(self, peer, frame):
        try:
            self.messages[peer].extend(decode(frame))
        except errors.KVBatonError as error:
            self.bad[type(error).__name__] += 1

    def on_disconnected(self, peer, reason):
        self.gone.append((peer, reason))

    def on_turn(self, now):
        return self.deadline

    def has(self, message):
        return any(message in messages for messages in list(self.messages.values()))

    @property
    def count(self):
        return sum(map(len, self.messages.values()))


class Plane(ControlPlane):
    def __init__(self, bind=None, settings=FAST, **options):
        self.recorder = Recorder()
        super().__init__("test", settings, bind=bind, **options)
        self.start(self.recorder)

    def call(self, work):
        """Run ``work`` on the control thread and wait for its result."""
        done, result = threading.Event(), []

        def run():
            result.append(work())
            done.set()

        self.post(run)
        assert done.wait(10)
        return result[0]


@pytest.fixture
def planes():
    made = [Plane("127.0.0.1"), Plane()]
    yield made
    for plane in made:
        plane.close()
        assert not plane._thread.is_alive()
        assert plane.faults == 0


@pytest.fixture
def raw():
    """Sockets of a stranger."""
    context = zmq.Context()

    def dial(endpoint):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(endpoint)
        made.append(socket)
        return socket

    made = []
    yield dial
    for socket in made:
        socket.close(0)
    context.term()


def test_many_threads_one_socket(planes, raw):
    """D12: 8 threads, 1000 messages each; all arrive, in each thread's order, garbage changes nothing."""
    listener, dialler = planes
    peer = dialler.call(lambda: dialler.dial(listener.endpoint))

    senders = set()

    def send(frame):
        senders.add(threading.current_thread())
        dialler.send(peer, frame)

    def work(thread):
        for sequence in range(1000):
            frame = encode(Ping(thread << 32 | sequence))
            dialler.post(lambda frame=frame: send(frame))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = listener.recorder
    wait(lambda: seen.count == 8000, "8000 messages")
    (received,) = seen.messages.values()
    by_thread = defaultdict(list)
    for message in received:
        by_thread[message.number >> 32].append(message.number & 0xFFFFFFFF)
    assert by_thread == {thread: list(range(1000)) for thread in range(8)}
    # Whoever posts, one thread alone touches the socket.
    assert senders == {dialler._thread}

    truncated = encode(Ping(1 << 40))[:-3]
    dialler.post(lambda: dialler.send(peer, truncated))
    wait(lambda: seen.bad == {"ProtocolError": 1}, "the truncated frame to be counted")
    dialler.post(lambda: dialler.send(peer, encode(Ping(99))))
    wait(lambda: received[-1] == Ping(99), "the last good frame")
    assert len(received) == 8001
    assert listener._thread.is_alive()
    assert not seen.gone


def test_both_ways(planes):
    listener, dialler = planes
    out = dialler.call(lambda: dialler.dial(listener.endpoint))
    dialler.post(lambda: dialler.send(out, encode(Ping(1))))
    wait(lambda: listener.recorder.count)
    (inward,) = listener.recorder.messages
    for number in range(100):
        listener.post(lambda number=number: listener.send(inward, encode(Ping(number))))
    wait(lambda: dialler.recorder.count == 100)
    assert [message.number for message in dialler.recorder.messages[out]] == list(range(100))


@pytest.mark.parametrize("frames", [[], [b"a", b"b"], [b""] * 5])
def test_messages_of_more_than_one_frame_are_counted(planes, raw, frames):
    listener = planes[0]
    stranger = raw(listener.endpoint)
    stranger.send_multipart([encode(Ping(1)), *frames])
    stranger.send(encode(Ping(2)))
    wait(lambda: listener.recorder.has(Ping(2)))
    assert listener.malformed == bool(frames)


def test_the_end_of_a_connection_is_seen(planes):
    """Within a second, on both sides, and after every frame that came before it."""
    listener, dialler = planes
    for life in range(5):
        peer = dialler.call(lambda: dialler.dial(listener.endpoint))
        before = listener.recorder.count

        def send(peer=peer):
            for number in range(2000):
                dialler.send(peer, encode(Ping(number)))

        dialler.call(send)
        wait(lambda before=before: listener.recorder.count == before + 2000)
        dialler.call(lambda peer=peer: dialler.hang_up(peer))
        wait(lambda life=life: len(listener.recorder.gone) == life + 1, "the end to be seen", seconds=1)
    assert len({peer for peer, _ in listener.recorder.gone}) == 5
    assert not listener._listener._identity_of_descriptor
    assert not listener._listener._descriptor_of_identity
    assert not listener._listener._leaving

    peer = dialler.call(lambda: dialler.dial(listener.endpoint))
    dialler.call(lambda: dialler.send(peer, encode(Ping(7))))
    wait(lambda: Ping(7) in list(listener.recorder.messages.values())[-1])
    listener.close()
    wait(lambda: dialler.recorder.gone, "the listener's end to be seen", seconds=1)
    assert dialler.recorder.gone[0][0] == peer
    assert not dialler._dialled


def test_a_descriptor_that_is_used_again(planes, raw):
    """Short connections take each other's descriptor; each is a peer of its own, and each one's end is told."""
    listener = planes[0]
    for number in range(30):
        socket = raw(listener.endpoint)
        socket.send(encode(Ping(number)))
        wait(lambda number=number: listener.recorder.count == number + 1)
        socket.close()
    wait(lambda: len(listener.recorder.gone) == 30)
    peers = [peer for peer, _ in listener.recorder.gone]
    assert len(set(peers)) == 30
    assert [listener.recorder.messages[peer] for peer in peers] == [[Ping(number)] for number in range(30)]
    assert not listener._listener._identity_of_descriptor


def test_connections_that_end_at_once_are_no_peers_for_ever(planes, raw):
    listener = planes[0]
    for number in range(30):
        socket = raw(listener.endpoint)
        socket.send(encode(Ping(number)))
        socket.close()
    last = raw(listener.endpoint)
    last.send(encode(Ping(1000)))
    wait(lambda: listener.recorder.has(Ping(1000)))
    seen = listener.recorder
    wait(lambda: len(listener._listener._identity_of_descriptor) == 1 and len(seen.messages) - len(seen.gone) == 1)


def test_an_oversize_frame_ends_its_connection_only(planes, raw, monkeypatch):
    monkeypatch.setattr("kvbaton.runtime.sockets.MAX_FRAME_BYTES", 1000)
    listener = Plane("127.0.0.1")
    try:
        good, bad = raw(listener.endpoint), raw(listener.endpoint)
        good.send(encode(Ping(1)))
        bad.send(encode(Ping(2)))
        wait(lambda: listener.recorder.count == 2)
        bad.send(bytes(1001))
        wait(lambda: listener.recorder.gone, "the connection to be cut")
        good.send(encode(Ping(3)))
        wait(lambda: listener.recorder.count == 3)
        assert not listener.recorder.bad
    finally:
        listener.close()


def test_nothing_listens(planes):
    dialler = planes[1]
    peer = dialler.call(lambda: dialler.dial("tcp://127.0.0.1:9"))
    wait(lambda: dialler.recorder.gone)
    assert dialler.recorder.gone[0][0] == peer
    assert "127.0.0.1:9" in dialler.recorder.gone[0][1]


@pytest.mark.parametrize(
    "text", ["127.0.0.1:9", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://", "tcp://[::1:9", "", "tcp://*:1"]
)
def test_an_endpoint_that_cannot_be_dialled(planes, text):
    dialler = planes[1]

    def dial():
        try:
            return dialler.dial(text)
        except errors.AddressError as error:
            return error

    assert isinstance(dialler.call(dial), errors.AddressError)
    assert not dialler._dialled


def test_sending_to_nobody_is_no_error(planes):
    listener, dialler = planes
    listener.call(lambda: listener.send("in:00aabbccdd", b"x"))
    dialler.call(lambda: dialler.send("out:tcp://127.0.0.1:9#77", b"x"))
    listener.call(lambda: None)


def test_a_command_that_fails_is_counted_and_logged(caplog):
    plane = Plane()
    plane.post(lambda: 1 // 0)
    assert plane.call(lambda: "alive") == "alive"
    assert plane.faults == 1
    assert "ZeroDivisionError" in caplog.text
    plane.close()


def test_close_runs_what_was_posted_before_and_ignores_the_rest():
    plane = Plane("127.0.0.1")
    ran = []
    for number in range(100):
        plane.post(lambda number=number: ran.append(number))
    plane.close()
    assert ran == list(range(100))
    plane.post(lambda: ran.append("late"))
    plane.close()
    assert len(ran) == 100


def test_wake_after_close_does_not_touch_a_descriptor_that_was_used_again():
    plane = Plane()
    descriptor = plane._wake.descriptor
    plane.close()
    reader, writer = os.pipe()
    try:
        os.dup2(writer, descriptor)
        plane.wake()
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
    finally:
        for number in {reader, writer, descriptor}:
            os.close(number)


def test_close_while_others_wake():
    """The descriptor is never closed under a thread that writes to it."""
    for _ in range(20):
        plane, stop = Plane(), threading.Event()

        def hammer(plane=plane, stop=stop):
            while not stop.is_set():
                plane.wake()

        threads = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in threads:
            thread.start()
        plane.close()
        stop.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_descriptors_are_given_back():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        listener, dialler = Plane("127.0.0.1"), Plane()
        peer = dialler.call(lambda dialler=dialler, listener=listener: dialler.dial(listener.endpoint))
        dialler.call(lambda dialler=dialler, peer=peer: dialler.send(peer, encode(Ping(1))))
        wait(lambda listener=listener: listener.recorder.count)
        dialler.close()
        listener.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_address_that_is_not_ours():
    before = threading.active_count()
    with pytest.raises(errors.ConfigurationError, match=r"192\.0\.2\.1"):
        ControlPlane("test", FAST, bind="192.0.2.1")
    assert threading.active_count() == before


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "[::]"])
def test_a_wildcard_is_never_advertised(bind):
    """D14: at the manager, for both roles; with advertise= it works, and peers get that address."""
    rank = Rank(SMALL.layout())
    for role, transport in itertools.product(("prefill", "decode"), ("tcp", "loopback")):
        with pytest.raises(errors.AddressError, match="advertise="):
            rank.start(role, kb.MemoryRegistry(), bind=bind, transports=[transport])
    if bind == "0.0.0.0":
        registry = kb.MemoryRegistry()
        rank.start("prefill", registry, bind=bind, advertise="127.0.0.1", transports=["tcp"], secret="x" * 16)
        (registered,) = registry.topology().ranks
        assert registered.endpoint.startswith("tcp://127.0.0.1:")
        assert registered.endpoint == rank.manager.endpoint
    rank.close()


def test_a_manager_hears_garbage(raw):
    """Strangers at the control endpoint: they are refused or dropped, counted, logged once, and harm nobody."""
    registry = kb.MemoryRegistry()
    source = Rank(SMALL.layout()).start("prefill", registry)
    destination = Rank(SMALL.layout()).start("decode", registry)
    try:
        stranger = raw(source.manager.endpoint)
        for frame in (b"", b"GET / HTTP/1.1", encode(Ping(5)), encode(Ping(5))[:-1], b"KVB\x1e\x63\x00", bytes(5000)):
            stranger.send(frame)
        assert stranger.poll(5000)
        assert b"refused" in stranger.recv()
        side = source.manager.side
        wait(lambda: sum(side.malformed.values()) == 5 and side.core.unexpected)
        source.fill("kv", [0], (0, 4))
        sender, receiver = source.manager.sender(1), destination.manager.receiver(1)
        receiver.offer({"kv": [2]}, 4)
        sender.finish({"kv": [0]}, (0, 4))
        wait(lambda: receiver.poll().terminal)
        assert receiver.poll() is kb.Status.SUCCESS
        assert source.manager._control.faults == 0
    finally:
        destination.close()
        source.close()
