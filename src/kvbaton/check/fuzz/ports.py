"""Fuzzing of ports: strangers, and peers with a token, say changed things to a process that works on beside them."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import zmq

from kvbaton.check.fuzz import samples
from kvbaton.check.fuzz.mutate import Mutator
from kvbaton.check.fuzz.run import Count, Finding
from kvbaton.check.fuzz.served import Served, State, Where
from kvbaton.check.fuzz.transport_decoders import frames_for_port, side_frames_for_port
from kvbaton.doctor import wire as doctor
from kvbaton.errors import TransportError
from kvbaton.protocol import encode
from kvbaton.transport import wire
from kvbaton.transport.fabric import side
from kvbaton.transport.tcp_wire import TCP

FABRIC = wire.Dialect("memory", b"KVBMEMO\n", side.VERSION)

ANSWER_SECONDS = 60.0
CLOSE_SECONDS = 15.0
"""Until then a port must have ended a connection that we ended."""
HAND_OVERS = 12
"""Hand-overs beside the inputs of a port, by each transport."""
GROWTH_BYTES = 96 << 20
SETTLE_SECONDS = 20.0
SENDERS = 4
"""Threads that talk to a port."""
MESSAGES = 40
"""Messages that a connection to the control port sends until another one takes its place."""


class Process:
    """The process that is talked to. Raises ``OSError`` or ``ValueError`` where it does not answer any more."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbaton.check.fuzz.served"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.where = msgspec.json.decode(self._line(), type=Served)

    def ask(self, line: str) -> str:
        """The answer to ``line``, as JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        return self._line()

    def state(self) -> State:
        """What it has."""
        return msgspec.json.decode(self.ask("state"), type=State)

    def hand_over(self) -> str:
        """Have it hand a request over by each transport; empty if that worked."""
        failed = {name: said for name in ("tcp", "memory") if (said := msgspec.json.decode(self.ask(name)))}
        return "; ".join(f"{name}: {said}" for name, said in failed.items())

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        guard = threading.Timer(ANSWER_SECONDS, self._process.kill)
        guard.start()
        try:
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        if not line:
            raise OSError(f"the process does not answer (it ended with {self._process.poll()})")
        return line


@dataclass(frozen=True)
class Port:
    """What is said to a port: ``examples`` are what one connection says; ``talk`` says the inputs that it is given.

    ``weight`` is its part of the inputs of all ports.
    """

    name: str
    examples: Callable[[Served], tuple[bytes, ...]]
    talk: Callable[[Served, Iterator[bytes]], None]
    weight: float = 1.0


def ports() -> list[Port]:
    """All of them."""
    return [
        Port("control port, bytes", lambda where: (_zmtp(),), _connections(lambda where: where.control), 3),
        Port("control port, frames", _frames, _control_frames, 6),
        Port(
            "tcp data port",
            lambda where: frames_for_port(),
            _connections(lambda where: where.tcp.port, greet=lambda where: (TCP, where.tcp)),
            3,
        ),
        Port(
            "tcp data port, no token", lambda where: _strangers(TCP), _connections(lambda where: where.strangers[0]), 2
        ),
        Port(
            "fabric side channel",
            lambda where: side_frames_for_port(),
            _connections(lambda where: where.memory.port, greet=lambda where: (FABRIC, where.memory)),
            3,
        ),
        Port(
            "fabric side channel, no token",
            lambda where: _strangers(FABRIC),
            _connections(lambda where: where.strangers[1]),
            2,
        ),
        Port("registry", _http, _connections(lambda where: where.registry), 3),
        Port("metrics", lambda where: _scrapes(), _connections(lambda where: where.metrics)),
        Port("doctor port", lambda where: _visits(), _connections(lambda where: where.doctor, _no_visit), 0.5),
    ]


def fuzz(port: Port, process: Process, count: int, seed: str) -> Count:
    """Say ``count`` changed things to a port of ``process``, with hand-overs before, meanwhile and afterwards."""
    found = Count(port.name)
    began = time.perf_counter()
    try:
        _fuzz(port, process, count, seed, found)
    except (OSError, ValueError) as error:
        found.findings.append(Finding(port.name, b"", f"after {found.inputs} inputs of seed {seed}: {error}"))
    found.seconds = time.perf_counter() - began
    return found


def _fuzz(port: Port, process: Process, count: int, seed: str, found: Count) -> None:
    examples = port.examples(process.where)
    _expect(found, process.hand_over(), "before it")
    # Pools, caches and the first connections are no growth.
    _say(port, process, examples, min(200, count), f"{seed} first", found)
    _settle(process, None, found)
    before = process.state()
    left, turns = count - found.inputs, max(1, min(HAND_OVERS, count // 50))
    for turn in range(turns):
        share = left // turns + (turn < left % turns)
        talk = threading.Thread(target=_say, args=(port, process, examples, share, f"{seed} {turn}", found))
        talk.start()
        _expect(found, process.hand_over(), f"beside turn {turn} of seed {seed}")
        talk.join()
    _expect(found, process.hand_over(), "after it")
    _settle(process, before, found)


def _expect(found: Count, failed: str, when: str) -> None:
    if failed:
        found.findings.append(Finding(found.target, b"", f"a hand-over {when} failed: {failed}"))


def _settle(process: Process, before: State | None, found: Count) -> None:
    """Wait until what strangers held is given back; what is not is a finding."""
    give_up = time.monotonic() + SETTLE_SECONDS
    while True:
        state = process.state()
        kept = _kept(state, before)
        if not kept or time.monotonic() > give_up:
            break
        time.sleep(0.1)
    if before is not None:
        found.growth = max(0, state.memory - before.memory)
    if before is not None and kept:
        found.findings.append(Finding(found.target, b"", f"it keeps {kept} after {found.inputs} inputs"))


def _kept(state: State, before: State | None) -> str:
    if state.harmed:
        return "bytes that were written outside of what is registered"
    if state.faults:
        return f"{state.faults} errors of its own"
    if before is None:
        return "" if state.descriptors < 200 else "descriptors"
    grown = {
        "descriptors": state.descriptors - before.descriptors - 4,
        "threads": state.threads - before.threads - 4,
        "bytes": state.memory - before.memory - GROWTH_BYTES,
    }
    return ", ".join(f"{more} more {name}" for name, more in grown.items() if more > 0)


def _say(port: Port, process: Process, examples: tuple[bytes, ...], count: int, seed: str, found: Count) -> None:
    """Say ``count`` things, with several threads."""

    def some(number: int) -> None:
        mutator = Mutator(f"{seed} {number}", examples)
        inputs = (mutator.next() for _ in range(count // SENDERS + (number < count % SENDERS)))
        try:
            port.talk(process.where, inputs)
        except (OSError, AssertionError) as error:
            found.findings.append(Finding(port.name, b"", f"{error} (seed {seed} {number})"))

    threads = [threading.Thread(target=some, args=(number,)) for number in range(SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.inputs += count


def _connections(
    port_of: Callable[[Served], int],
    change: Callable[[int, bytes], bytes] = lambda number, data: data,
    greet: Callable[[Served], tuple[wire.Dialect, Where]] | None = None,
) -> Callable[[Served, Iterator[bytes]], None]:
    """Each input is all that one connection says, after a greeting if there is one. The port must end each in time."""

    def talk(where: Served, inputs: Iterator[bytes]) -> None:
        address = "127.0.0.1", port_of(where)
        for number, data in enumerate(inputs):
            said = change(number, data)
            with socket.create_connection(address, timeout=CLOSE_SECONDS) as sock:
                try:
                    if greet is not None:
                        dialect, peer = greet(where)
                        wire.greet(sock, dialect, "fuzzing", peer.token, peer.instance)
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                except TimeoutError:
                    raise AssertionError(f"the connection was not ended in time: {said.hex()}") from None
                except (OSError, EOFError, TransportError):
                    pass  # It hung up before, or has no room.

    return talk


def _control_frames(where: Served, inputs: Iterator[bytes]) -> None:
    """Frames on ZeroMQ connections, of one part or two."""
    context = zmq.Context()
    sock: zmq.Socket[bytes] | None = None
    try:
        for number, data in enumerate(inputs):
            if sock is None or number % MESSAGES == 0:
                if sock is not None:
                    sock.close(1000)
                sock = context.socket(zmq.DEALER)
                sock.setsockopt(zmq.SNDTIMEO, int(1000 * CLOSE_SECONDS))
                sock.connect(f"tcp://127.0.0.1:{where.control}")
            sock.send_multipart([data, b"more"] if number % 97 == 0 else [data])
    except zmq.Again:
        raise AssertionError("the control port takes no more frames") from None
    finally:
        if sock is not None:
            sock.close(1000)
        context.term()


def _frames(where: Served) -> tuple[bytes, ...]:
    layout = samples.layout()
    hello = samples.hello(layout, (layout,), transports={"tcp": b"", "shm": b""})
    return (*(encode(message) for message in samples.messages()), encode(hello), encode(hello))


def _zmtp() -> bytes:
    """What a DEALER says: greeting, handshake, a frame."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    frame = encode(samples.messages()[-1])
    return greeting + b"\x04" + bytes([len(ready)]) + ready + b"\0" + bytes([len(frame)]) + frame


def _strangers(dialect: wire.Dialect) -> tuple[bytes, ...]:
    """What somebody says who does not know the token, and goes on as if that had been enough."""
    greeting = dialect.magic + struct.pack("<H64sB", dialect.version, bytes(64), 7) + b"fuzzing"
    return greeting, greeting + frames_for_port()[0]


def _http(where: Served) -> tuple[bytes, ...]:
    body = msgspec.json.encode(msgspec.structs.replace(samples.registration(), deployment="strangers"))
    news, question = b'{"opened": [1, 2], "closed": [3]}', b'{"rooms": [1, 2], "deployment": "tcp", "asker": "a"}'

    def request(line: bytes, body: bytes = b"") -> bytes:
        return line + b" HTTP/1.1\r\nHost: a\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body

    return (
        request(b"PUT /v1/ranks", body),
        request(b"POST /v1/ranks/prefill-1/rooms", news),
        request(b"POST /v1/rooms/find", question),
        request(b"GET /v1/topology?deployment=strangers&dp_rank=0"),
        request(b"GET /health") + request(b"POST /v1/ranks/prefill-1/heartbeat"),
    )


def _scrapes() -> tuple[bytes, ...]:
    """What asks for metrics, in their two forms, and twice on one connection."""
    plain = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    accept = b"Accept: application/openmetrics-text; version=1.0.0;q=0.5,*/*;q=0.1\r\nAccept-Encoding: gzip\r\n"
    named = b"GET /metrics?name[]=kvbaton_registry_ranks HTTP/1.1\r\nHost: a\r\n" + accept + b"\r\n"
    return plain, named, plain + named, b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nname"


def _visits() -> tuple[bytes, ...]:
    pack = msgspec.msgpack.encode
    messages = (doctor.Greeting(1, ("tcp",)), doctor.Ping(), doctor.Admit("tcp", b"x"), doctor.Check())
    frames = [struct.pack("<4sI", b"KVBD", len(pack(each))) + pack(each) for each in messages]
    return b"".join(frames), frames[0]


def _no_visit(number: int, data: bytes) -> bytes:
    """A visit is a process of its own, which takes a second: only some inputs may begin as a doctor does."""
    return data if number % 40 == 7 or not data.startswith(b"KVBD") else b"kvbd" + data[4:]
