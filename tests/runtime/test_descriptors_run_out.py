"""A process that is out of descriptors: its ports neither spin nor die, say so once, and go on when there are some."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import zmq
from rank_world import wait

import kvbaton
from kvbaton.doctor import wire as doctor_wire
from kvbaton.protocol import Refused, decode
from kvbaton.transport import tcp_wire, wire
from kvbaton.transport.fabric import side

SCRIPT = Path(__file__).with_name("exhausted_process.py")
SOURCE = str(Path(kvbaton.__file__).parent.parent)
FABRIC = wire.Dialect("memory", b"KVBMEMO\n", side.VERSION)


class Process:
    def __init__(self, kind):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        )
        self.warnings = []

    def wait_until_it_listens(self):
        port, *self.token = self._answer("listens")
        self.address = "127.0.0.1", int(port)

    def _answer(self, word):
        for line in self.process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
            if first in ("WARNING", "ERROR"):
                self.warnings.append(line)
        raise AssertionError(f"the process ended with {self.process.wait()}")

    def cpu_seconds(self):
        self.process.stdin.write("?\n")
        return float(self._answer("used")[0])

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def greeted(dialect):
    def serves(process):
        with socket.create_connection(process.address, timeout=5) as sock:
            wire.greet(sock, dialect, "writer", bytes.fromhex(process.token[0]), "target")
        return True

    return serves


def answers_a_frame(process):
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    try:
        sock.connect(f"tcp://127.0.0.1:{process.address[1]}")
        sock.send(b"garbage")
        return bool(sock.poll(5000)) and isinstance(decode(sock.recv())[0], Refused)
    finally:
        sock.close(0)
        context.term()


def answers_http(process):
    with urllib.request.urlopen(f"http://127.0.0.1:{process.address[1]}/health", timeout=5) as answer:
        return answer.status == 200


def answers_a_doctor(process):
    with socket.create_connection(process.address, timeout=5) as sock:
        doctor_wire.send(sock, doctor_wire.Greeting(doctor_wire.VERSION, ()))
        return isinstance(doctor_wire.receive(sock), doctor_wire.Offers)


SERVES = {
    "tcp": greeted(tcp_wire.TCP),
    "fabric": greeted(FABRIC),
    "control": answers_a_frame,
    "registry": answers_http,
    "doctor": answers_a_doctor,
}


@pytest.fixture
def processes():
    made = {}
    try:
        for kind in SERVES:
            made[kind] = Process(kind)
        yield made
    finally:
        for process in made.values():
            process.close()


def serves_again(kind, process):
    try:
        return SERVES[kind](process)
    except (OSError, EOFError, kvbaton.errors.KVBatonError):
        return False


def test_ports_live_on(processes):
    for process in processes.values():
        process.wait_until_it_listens()
    with contextlib.ExitStack() as stack:
        for process in processes.values():
            for _ in range(60):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(process.address)
        for kind, process in processes.items():
            wait(lambda process=process: process.cpu_seconds() and process.warnings, f"a word of {kind}")
        before = {kind: process.cpu_seconds() for kind, process in processes.items()}
        time.sleep(1.0)
        for kind, process in processes.items():
            # One that tries again without a pause takes all that it can get of a core.
            assert process.cpu_seconds() - before[kind] < 0.3, kind
    for kind, process in processes.items():
        wait(lambda kind=kind, process=process: serves_again(kind, process), f"{kind} to serve again", 20)
        assert process.cpu_seconds()
        about = [line for line in process.warnings if "out of descriptors" in line or "Too many open files" in line]
        assert len(about) == 1, (kind, process.warnings)
