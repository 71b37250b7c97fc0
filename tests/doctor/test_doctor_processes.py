"""The doctor with real processes and sockets: attempts, a peer over loopback, and peers that are none."""

import json
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import pytest

from kvbaton.doctor import session, wire
from kvbaton.doctor.examine import measure_peer, try_transports
from kvbaton.doctor.measure import measure
from kvbaton.doctor.serve import DoctorServer
from kvbaton.doctor.session import serve_visit
from kvbaton.errors import AddressError, ConfigurationError, ProtocolError


@contextmanager
def serving():
    """``kvbaton doctor --serve`` in a process; gives its address."""
    command = [sys.executable, "-u", "-m", "kvbaton", "doctor", "--serve", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline()
            yield re.search(r"listens on (\S+);", said)[1]
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


@contextmanager
def stranger(answer):
    """Listens, calls ``answer(sock)`` for the first who comes, and gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            sock, _ = listener.accept()
            with sock:
                answer(sock)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("arguments", [["attempt", "shm"], ["measure", "127.0.0.1:1", "tcp"], ["gpu_access"]])
def test_the_processes_print_their_findings_and_no_warning(arguments):
    command = [sys.executable, "-W", "error", "-m", f"kvbaton.doctor.{arguments[0]}", *arguments[1:]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    json.loads(ended.stdout.splitlines()[-1])


def test_each_transport_of_the_release_is_tried():
    shm, unknown = try_transports(["shm", "carrier pigeons"])
    assert (shm.state, shm.mapped, shm.cross_process, shm.memory_kinds) == ("works", True, True, ("host",))
    assert unknown.state == "fails"
    assert "carrier pigeons" in unknown.reason


def test_a_transport_that_does_not_return_is_ended():
    (late,) = try_transports(["shm"], seconds=0.001)
    assert late.state == "fails"
    assert "took longer than 0.001 s" in late.reason


def test_two_doctors_measure_the_way_between_them():
    with serving() as address:
        command = [sys.executable, "-m", "kvbaton", "doctor", "--peer", address, "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr
        report = json.loads(ended.stdout)
    assert report["works"]
    assert report["peer"]["error"] == ""
    assert report["peer"]["round_trip_seconds"] > 0
    measured = {each["name"]: each for each in report["peer"]["transports"]}
    for name in ("shm", "tcp"):
        assert measured[name]["state"] == "works", measured[name]
        assert measured[name]["round_trip_seconds"] > 0
        assert measured[name]["bytes_per_second"] > 0
    assert "loopback" not in measured


def test_nobody_at_the_peers_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    report = measure_peer(address, ["tcp"])
    assert "start 'kvbaton doctor --serve' there" in report.error
    assert not report.works


def test_the_exit_code_is_1_where_nothing_works_with_the_peer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "kvbaton", "doctor", "--peer", address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "was not measured to the end" in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no doctor of kvbaton"),
        (b"", "the connection ended where Offers was expected"),
        (b"KVBD\xff\xff\xff\xff", "longer than a doctor's may be"),
        (b"KVBD\x08\x00\x00\x00abc", "ended after 3 of 8 bytes"),
        (b"KVBD\x03\x00\x00\x00abc", "cannot be decoded"),
    ],
)
def test_a_peer_that_is_no_doctor_is_a_clear_error(said, error):
    def answer(sock):
        sock.recv(1 << 16)
        sock.sendall(said)

    with stranger(answer) as address:
        *_, last = measure(address, ("tcp",))
    assert error in last.error
    assert not last.works


def test_a_peer_of_another_version_is_named():
    def answer(sock):
        sock.recv(1 << 16)
        wire.send(sock, wire.Offers(9, "far away", {}, {}, {}))

    with stranger(answer) as address:
        *_, last = measure(address, ("tcp",))
    assert "speaks version 9, this one 1" in last.error
    assert last.host == "far away"


def test_a_silent_peer_is_given_up(monkeypatch):
    monkeypatch.setattr(wire, "STEP_SECONDS", 0.2)
    over = threading.Event()
    with stranger(lambda sock: over.wait(60)) as address:
        *_, last = measure(address, ("tcp",))
        over.set()
    assert "it did not answer in time" in last.error


def test_a_measurement_that_hangs_is_ended_and_what_was_found_is_kept():
    over = threading.Event()

    def answer(sock):
        wire.expect(sock, wire.Greeting)
        wire.send(sock, wire.Offers(wire.VERSION, "half way", {}, {"tcp": b"?"}, {}))
        while isinstance(message := wire.receive(sock), wire.Ping):
            wire.send(sock, wire.Answer())
        assert isinstance(message, wire.Admit)
        over.wait(60)

    with stranger(answer) as address:
        report = measure_peer(address, ["tcp"], seconds=4)
        over.set()
    assert report.host == "half way"
    assert "took longer than 4 s and was ended while transport tcp was tried" in report.error


def test_a_descriptor_that_is_none_fails_that_transport_only():
    def answer(sock):
        wire.expect(sock, wire.Greeting)
        wire.send(sock, wire.Offers(wire.VERSION, "liar", {}, {"tcp": b"\xc1", "shm": b"x"}, {"nixl": "no card"}))
        while wire.receive(sock) is not None:
            wire.send(sock, wire.Answer())

    with stranger(answer) as address:
        *_, last = measure(address, ("tcp", "shm", "nixl"))
    assert [(each.name, each.state) for each in last.transports] == [
        ("tcp", "fails"),
        ("shm", "fails"),
        ("nixl", "missing"),
    ]
    assert last.transports[2].reason == "at the peer: no card"
    assert last.error == ""


@contextmanager
def serving_here(**options):
    """A `DoctorServer` in a thread, made now."""
    server = DoctorServer("127.0.0.1:0", **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@pytest.fixture
def server():
    with serving_here() as server:
        yield server


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n", b"KVBD\xff\xff\xff\xff" + bytes(32), b"KV"])
def test_a_visitor_that_is_no_doctor_harms_nobody(server, said, monkeypatch):
    monkeypatch.setattr("kvbaton.doctor.serve.GREETING_SECONDS", 0.5)
    where = (server.address.host, server.address.port)
    with socket.create_connection(where) as sock:
        sock.sendall(said)
        sock.settimeout(60)
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    *_, last = measure(str(server.address), ("shm",))
    assert [each.state for each in last.transports] == ["works"]


@pytest.mark.parametrize("said", [(), (wire.Ping(),)])
def test_a_visitor_that_falls_silent_gives_its_place_to_others(monkeypatch, said):
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        visitor = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    with visitor, here:
        visitor.settimeout(30)
        wire.send(visitor, wire.Greeting(wire.VERSION, ()))
        for message in said:
            wire.send(visitor, message)
        with pytest.raises(ProtocolError, match=r"said nothing for 0\.1 s"):
            serve_visit(here)


def warnings(caplog, words):
    return [record for record in caplog.records if words in record.getMessage() and record.levelname == "WARNING"]


def test_a_visitor_too_many_is_told_that_it_is_busy(monkeypatch, caplog):
    monkeypatch.setattr("kvbaton.doctor.serve.VISITS", 1)
    monkeypatch.setattr("kvbaton.doctor.serve.GREETING_SECONDS", 2.0)
    with serving_here() as server, socket.create_connection((server.address.host, server.address.port)) as first:
        wire.send(first, wire.Greeting(wire.VERSION, ()))
        wire.expect(first, wire.Offers)
        for _ in range(2):
            *_, last = measure(str(server.address), ("tcp",))
            assert last.error == "it refused: busy: 1 others are measuring; try again in a minute or two"
    assert len(warnings(caplog, "while 1 others were measuring")) == 1


def test_a_crowd_is_told_that_it_is_busy(monkeypatch, caplog):
    monkeypatch.setattr("kvbaton.doctor.serve.WAITING", 1)
    with serving_here() as server, socket.create_connection((server.address.host, server.address.port)) as first:
        wire.send(first, wire.Greeting(wire.VERSION, ()))
        wire.expect(first, wire.Offers)
        for _ in range(2):
            # It says so without being asked.
            with (
                socket.create_connection((server.address.host, server.address.port)) as late,
                pytest.raises(ProtocolError, match="it refused: busy: 1 others are connected"),
            ):
                wire.expect(late, wire.Offers)
        *_, last = measure(str(server.address), ("tcp",))
        assert "busy: 1 others are connected" in last.error or "too many measure at the same time" in last.error
    assert len(warnings(caplog, "while 1 others were here")) == 1


def test_strangers_do_not_fill_the_log(server, caplog):
    for _ in range(3):
        with socket.create_connection((server.address.host, server.address.port)) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            sock.settimeout(60)
            with suppress(ConnectionResetError):
                assert sock.recv(100) == b""
    assert len(warnings(caplog, "did not speak like a doctor")) == 1


def drip(sock, said, over):
    """Send a byte now and then, for as long as the other side takes them, and at most 10 s."""
    with suppress(OSError):
        for byte in said:
            if over.wait(0.02):
                return
            sock.sendall(bytes([byte]))


@pytest.mark.parametrize("greeted", [False, True])
def test_who_drips_bytes_does_not_hold_a_visit(greeted, monkeypatch):
    """Each read gets something in time, but the message as a whole does not come."""
    monkeypatch.setattr(wire, "STEP_SECONDS", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    with here, there:
        if greeted:
            wire.send(there, wire.Greeting(wire.VERSION, ()))
        said = b"KVBD" + (500).to_bytes(4, "little") + bytes(500)
        dripper = threading.Thread(target=drip, args=(there, said, over))
        dripper.start()
        try:
            # A dripper that was heard to the end would be a ProtocolError: zeros cannot be decoded.
            with pytest.raises(TimeoutError):
                serve_visit(here)
        finally:
            over.set()
            dripper.join()


def test_a_visitor_may_not_ask_for_what_was_not_offered(server):
    with socket.create_connection((server.address.host, server.address.port)) as sock:
        sock.settimeout(60)
        wire.send(sock, wire.Greeting(wire.VERSION, ("no such", "tcp")))
        offers = wire.expect(sock, wire.Offers)
        assert sorted(offers.transports) == ["tcp"]
        assert offers.missing == {"no such": "this release does not have it"}
        wire.send(sock, wire.Admit("shm", b""))
        assert "was not offered" in wire.expect(sock, wire.Answer).error
        wire.send(sock, wire.Admit("tcp", b""))
        assert "not a descriptor" in wire.expect(sock, wire.Answer).error
        wire.send(sock, wire.Greeting(wire.VERSION, ()))
        with pytest.raises((ProtocolError, ConnectionResetError)):
            wire.expect(sock, wire.Answer)


def test_an_address_that_is_taken_is_refused(server):
    with pytest.raises(AddressError, match="cannot listen on"):
        DoctorServer(str(server.address))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "--json"], "leave --peer and --json"),
        (["10.0.0.1:8899"], "did you mean --peer 10.0.0.1:8899?"),
        (["--peer", "a:b:c"], "no IPv6 address"),
        (["--serve", "1.2.3"], "no IPv4 address"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    command = [sys.executable, "-m", "kvbaton", "doctor", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


ONE, TWO = "the-secret-of-one-machine-room", "the-secret-of-another-machine-room"


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (ONE, ONE, ""),
        (ONE, TWO, "another secret"),
        (ONE, None, "it wants a secret, and there is none here"),
        (None, ONE, "it has no secret, and there is one here"),
    ],
)
def test_two_doctors_share_a_secret_or_do_not_measure(there, here, said, monkeypatch, caplog):
    monkeypatch.setattr("kvbaton.doctor.serve.GREETING_SECONDS", 0.5)
    monkeypatch.delenv("KVBATON_SECRET", raising=False)
    with serving_here(secret=there) as server:
        if here is not None:
            monkeypatch.setenv("KVBATON_SECRET", here)
        *_, report = measure(str(server.address), ())
    assert said in report.error
    assert bool(report.error) == bool(said)
    assert bool(report.host) == (not said)
    assert ONE not in report.error + caplog.text


def test_a_crowd_is_told_that_it_is_busy_before_it_shows_its_secret(monkeypatch):
    monkeypatch.setattr("kvbaton.doctor.serve.WAITING", 1)
    monkeypatch.setenv("KVBATON_SECRET", ONE)
    with serving_here() as server, socket.create_connection((server.address.host, server.address.port)):
        *_, report = measure(str(server.address), ())
        assert "it is busy" in report.error


def test_a_doctor_beyond_loopback_needs_a_secret(monkeypatch):
    for name in ("KVBATON_SECRET", "KVBATON_SECRET_FILE", "KVBATON_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"^doctor: .*KVBATON_SECRET"):
        DoctorServer("0.0.0.0:0")
    command = [sys.executable, "-m", "kvbaton", "doctor", "--serve", "0.0.0.0:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--insecure" in ended.stderr
    for allowed in ({"secret": ONE}, {"insecure": True}):
        DoctorServer("0.0.0.0:0", **allowed)._listener.close()
