"""Ranks that share a secret, and those that do not: real sockets, proxies that listen and proxies that change bytes."""

import contextlib
import dataclasses
import logging
import os
import socket
import struct
import subprocess
import sys
import threading

import msgspec
import pytest
import zmq
from rank_world import FAST, wait, wait_released
from room_pairs import KV, failed, hand_over, pair, start
from test_control_plane import Plane

import kvbaton as kb
from kvbaton import errors
from kvbaton.protocol import MAX_FRAME_BYTES, Ping, encode
from kvbaton.registry import Registration
from kvbaton.registry.server import RegistryServer
from kvbaton.runtime.curve import keys_of
from kvbaton.secret import Secret

ONE, TWO = "the-secret-of-one-deployment", "the-secret-of-another-deployment"


class Proxy:
    """Carries bytes between a dialler and ``port``, keeps them, and lets ``change(number, data)`` alter them.

    ``number`` counts the bytes that went in the same direction before.
    """

    def __init__(self, port, change=lambda number, data, outward: data):
        self.seen, self._change = {True: bytearray(), False: bytearray()}, change
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                for source, sink, outward in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._carry, args=(source, sink, outward), daemon=True).start()

    def _carry(self, source, sink, outward):
        with contextlib.suppress(OSError):
            number = 0
            while data := source.recv(65536):
                self.seen[outward] += data
                sink.sendall(self._change(number, data, outward))
                number += len(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @property
    def bytes(self):
        return bytes(self.seen[True] + self.seen[False])

    def close(self):
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def proxied():
    """Puts a proxy before the control port of a prefill rank."""
    made = []

    def put(world, source, **options):
        port = int(source.manager.endpoint.rpartition(":")[2])
        made.append(Proxy(port, **options))
        (registered,) = world.registry.topology().ranks
        there = msgspec.structs.replace(registered, endpoint=f"tcp://127.0.0.1:{made[-1].port}")
        world.registry.register(there)
        return made[-1]

    yield put
    for proxy in made:
        proxy.close()


class TestSameSecret:
    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    def test_a_hand_over_of_which_a_listener_learns_nothing(self, world, transport, proxied, caplog):
        caplog.set_level(logging.DEBUG)
        source, destination = pair(world, secret=ONE, transports=[transport], model=KV)
        proxy = proxied(world, source)
        room = 0x1234_5678_9ABC
        hand_over(source, destination, room)
        assert len(proxy.bytes) > 1000
        for plain in (b"KVB\x1e", b"kvbaton", source.manager.instance.encode(), destination.manager.instance.encode()):
            assert plain not in proxy.bytes
        for form in (struct.pack("<Q", room), struct.pack(">Q", room), str(room).encode()):
            assert form not in proxy.bytes
        assert ONE not in caplog.text
        world.assert_no_faults()

    def test_over_ipv6(self, world):
        source, destination = pair(world, secret=ONE, transports=["tcp"], bind="::1")
        assert source.manager.endpoint.startswith("tcp://[::1]:")
        hand_over(source, destination)

    def test_without_a_secret_all_of_that_is_plain(self, world, proxied):
        """The test above can fail."""
        source, destination = pair(world)
        proxy = proxied(world, source)
        hand_over(source, destination, 0x1234_5678_9ABC)
        assert destination.manager.instance.encode() in proxy.bytes
        assert struct.pack(">Q", 0x1234_5678_9ABC) in proxy.bytes

    def test_it_may_come_from_the_environment(self, world, monkeypatch, tmp_path):
        file = tmp_path / "secret"
        file.write_text(ONE + "\n")
        (source,) = world.prefill(KV.layout(), secret=ONE)
        source.fill("kv", [0, 1], (0, 8))
        monkeypatch.setenv("KVBATON_SECRET_FILE", str(file))
        (destination,) = world.decode(KV.layout())
        hand_over(source, destination)

    def test_the_largest_frame_still_goes_through(self):
        keys = keys_of(Secret.of(ONE))
        listener, dialler = SecretPlane("127.0.0.1", keys), SecretPlane(None, keys)
        try:
            listener.recorder.on_frame = lambda peer, frame: sizes.append(len(frame))
            sizes = []
            peer = dialler.call(lambda: dialler.dial(listener.endpoint))
            dialler.call(lambda: dialler.send(peer, bytes(MAX_FRAME_BYTES)))
            wait(lambda: sizes == [MAX_FRAME_BYTES], "the frame")
        finally:
            dialler.close()
            listener.close()


class SecretPlane(Plane):
    def __init__(self, bind, keys, settings=FAST):
        self._given = keys
        super().__init__(bind, settings, keys=keys)
        self.recorder.on_refused = lambda peer, reason: self.recorder.gone.append((peer, "refused: " + reason))


class TestDifferentSecrets:
    @pytest.mark.parametrize(
        ("prefill", "decode", "words"),
        [
            (ONE, TWO, ("another secret", "KVBATON_SECRET")),
            (ONE, None, ("secret", "KVBATON_SECRET")),
            (None, TWO, ("secret", "KVBATON_SECRET")),
        ],
    )
    def test_the_room_fails_at_once_and_names_the_rank(self, world, prefill, decode, words, caplog):
        (source,) = world.prefill(KV.layout(), secret=prefill)
        (destination,) = world.decode(KV.layout(), secret=decode, settings=kb.Settings(handshake_seconds=300.0))
        receiver = destination.manager.receiver(1)
        receiver.offer({"kv": [4]}, 4)
        failed(receiver, "tp0/1", source.manager.endpoint, *words)
        wait_released(receiver)
        receiver.close()
        wait(lambda: source.manager._control._listener.refused, "the listener to count it")
        wait(lambda: "was not let in" in caplog.text, "the listener to log it")
        assert not source.manager.peers
        assert not destination.manager._control._dialled
        for text in (ONE, TWO):
            assert text not in caplog.text + receiver.reason
        world.assert_empty()
        world.assert_no_faults()

    def test_it_is_an_error_by_name(self, world):
        world.prefill(KV.layout(), secret=ONE)
        (destination,) = world.decode(KV.layout(), secret=TWO)
        sources = destination.manager.side._sources
        seen, tell = [], sources._user.source_failed
        sources._user.source_failed = lambda source: (seen.append(source.failure), tell(source))
        failed(destination.manager.receiver(1), "does not share our secret")
        assert [type(failure) for failure in seen] == [errors.AuthenticationError]

    def test_ranks_that_share_it_go_on_beside_those_that_do_not(self, world):
        source, destination = pair(world, secret=ONE)
        (stranger,) = world.decode(KV.layout(), secret=TWO)
        hand_over(source, destination, 1)
        for number in range(5):
            receiver = stranger.manager.receiver(100 + number)
            failed(receiver, "secret")
            receiver.close()
        hand_over(source, destination, 2)
        assert len(source.manager.peers) == 1

    def test_the_log_does_not_fill(self, world, caplog):
        (source,) = world.prefill(KV.layout(), secret=ONE)
        (destination,) = world.decode(KV.layout(), secret=TWO)
        for number in range(10):
            receiver = destination.manager.receiver(number)
            failed(receiver, "secret")
            receiver.close()
        refused = source.manager._control._listener.refused
        wait(lambda: sum(refused.values()) == 10)
        warned = [each for each in caplog.records if "was not let in" in each.message and each.levelno > logging.DEBUG]
        assert len(warned) == len(refused)


class TestRotation:
    @pytest.mark.parametrize(
        ("prefill", "decode"),
        [([ONE, TWO], ONE), (ONE, [ONE, TWO]), ([ONE, TWO], [TWO, ONE]), ([TWO, ONE], [ONE, TWO]), (TWO, [ONE, TWO])],
    )
    def test_every_step_of_a_rotation_works(self, world, prefill, decode):
        (source,) = world.prefill(KV.layout(), secret=prefill)
        (destination,) = world.decode(KV.layout(), secret=decode)
        source.fill("kv", [0, 1], (0, 8))
        for room in range(2):
            hand_over(source, destination, room)
        assert len(destination.manager._control._dialled) == 1
        world.assert_no_faults()

    def test_when_all_secrets_are_tried_the_room_fails(self, world):
        world.prefill(KV.layout(), secret="a-secret-that-nobody-has")
        (destination,) = world.decode(KV.layout(), secret=[ONE, TWO])
        failed(destination.manager.receiver(1), "another secret")
        assert not destination.manager._control._dialled


FLIPS = (0, 12, 70, 100, 260, 300, 450, 700, 1000)


class TestHostileBytes:
    @pytest.mark.parametrize("at", FLIPS)
    def test_a_bit_that_is_changed_on_its_way_is_never_believed(self, world, proxied, at):
        """Greeting, handshake, Hello: wherever it is, the room fails by name and no wrong byte lands."""

        def flip(number, data, outward):
            if not outward or not number <= at < number + len(data):
                return data
            changed = bytearray(data)
            changed[at - number] ^= 0x10
            return bytes(changed)

        source, destination = pair(world, secret=ONE, settings=dataclasses.replace(FAST, handshake_seconds=1.5))
        proxied(world, source, change=flip)
        sender, receiver = start(source, destination, 1)
        sender.finish({"kv": [0, 1]}, (0, 8))
        wait(lambda: receiver.poll().terminal, "the room to end")
        if receiver.poll() is kb.Status.SUCCESS:
            # What pads the greeting and the first command of the handshake means nothing to either side.
            assert at < 146
            destination.check("kv", [4, 5], (0, 8))
        else:
            assert receiver.reason
        destination.check_rest()
        assert not source.manager.side.malformed
        assert not source.manager.side.core.unexpected
        assert source.manager._control.faults == destination.manager._control.faults == 0

    def test_strangers_at_an_authenticated_port(self, world):
        """Garbage, plain ZeroMQ, a good client with another key: none is a peer, none harms those that are."""
        source, destination = pair(world, secret=ONE)
        hand_over(source, destination, 1)
        host, port = "127.0.0.1", int(source.manager.endpoint.rpartition(":")[2])
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(49)
        old_greeting = b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00"
        garbage = [
            b"",
            b"\x00",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(200),
            b"\xff" * 200,
            greeting,
            old_greeting,
            b"\x01\x00\x05hello",
        ]
        for noise in garbage:
            with socket.create_connection((host, port), timeout=10) as sock:
                sock.sendall(noise)
        context = zmq.Context()
        socks = []
        for keys in (None, ONE):
            sock = context.socket(zmq.DEALER)
            sock.linger = 0
            if keys is not None:
                # It knows whom it dials, but has a key of its own.
                sock.curve_serverkey = keys_of(Secret.of(ONE))[0].listener.public
                sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
            sock.connect(source.manager.endpoint)
            sock.send(encode(Ping(5)))
            socks.append(sock)
        listener = source.manager._control._listener
        wait(lambda: {"it has no secret", "its key is unknown"} <= set(listener.refused), "the refusals")
        hand_over(source, destination, 2)
        for sock in socks:
            assert not sock.poll(0)
            sock.close(0)
        context.term()
        assert not source.manager.side.malformed
        assert not source.manager.side.core.unexpected
        assert len(source.manager.peers) == 1
        assert source.manager._control.faults == 0
        wait(lambda: len(listener._open_descriptors) == 1, "the strangers to be forgotten")


CHILD = """
import sys, time
import kvbaton as kb
from rank_world import FAST, Model, Rank
rank = Rank(Model(("kv",)).layout()).start("decode", sys.argv[1], transports=[sys.argv[2]])
receiver = rank.manager.receiver(7)
receiver.offer({"kv": [4, 5]}, 8)
while not receiver.poll().terminal:
    time.sleep(0.005)
print(receiver.poll().name, receiver.reason)
if receiver.poll() is kb.Status.SUCCESS:
    rank.check("kv", [4, 5], (0, 8))
rank.check_rest()
receiver.close()
rank.close()
"""


@pytest.mark.parametrize(
    ("secret", "transport", "word"), [(ONE, "tcp", "SUCCESS"), (ONE, "shm", "SUCCESS"), (TWO, "tcp", "secret")]
)
def test_two_processes_and_a_registry(world, secret, transport, word):
    """The whole way: a registry over HTTP, and a decode rank in another process with its secret in the environment."""
    with RegistryServer(secret=ONE) as registry:
        (source,) = world.prefill(KV.layout(), secret=ONE, registry=registry.url, transports=[transport])
        source.fill("kv", [0, 1], (0, 8))
        sender = source.manager.sender(7)
        sender.finish({"kv": [0, 1]}, (0, 8))
        environment = {**os.environ, "KVBATON_SECRET": secret, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, registry.url, transport],
            env=environment, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert word in done.stdout
        assert secret not in done.stdout + done.stderr
        if secret == TWO:
            assert done.stdout.startswith("FAILED")
            assert "another secret" in done.stdout
        sender.close()
        source.manager.close()


def test_a_wildcard_is_not_dialled():
    """D14: whoever registered it, we would reach ourselves."""
    registry = kb.MemoryRegistry()
    with pytest.raises(errors.RegistryError, match="stands for every address"):
        registry.register(Registration("a", "tcp://0.0.0.0:7000", KV.layout(), ""))
    plane = Plane()
    try:
        for endpoint in ("tcp://0.0.0.0:7000", "tcp://[::]:7000"):
            outcome = plane.call(lambda endpoint=endpoint: caught(lambda: plane.dial(endpoint)))
            assert isinstance(outcome, errors.AddressError)
            assert "every address" in str(outcome)
        outcome = plane.call(lambda: caught(lambda: plane.dial("tcp://localhost:7000")))
        assert isinstance(outcome, errors.AddressError)
        assert "was not looked up" in str(outcome)
    finally:
        plane.close()


def caught(work):
    try:
        return work()
    except errors.KVBatonError as error:
        return error
