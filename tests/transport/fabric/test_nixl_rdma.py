"""NIXL over RDMA: UCX's reliable connections between two devices with a link between them, and faults of that link.

Runs where there are soft-RoCE devices rxe0 and rxe1 on the interfaces v0 and v1 and the right to break the link between
them: `make test-rdma` makes such a machine.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("RDMA_VM") != "1":
    pytest.skip("this machine has no RDMA devices to break: make test-rdma", allow_module_level=True)
pytest.importorskip("nixl_cu13", reason="NIXL is not installed: make setup-fabrics")

from fabric_ends import let_go
from nixl_peer import CANARY, collect, destination, pieces, receive, started

from kvbaton.errors import TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.transport import dial
from kvbaton.transport.conformance import Conformance, NotApplicable
from kvbaton.transport.fabric import transport
from kvbaton.transport.fabric.nixl import adapter as nixl
from kvbaton.transport.fabric.nixl.adapter import NixlFabric
from kvbaton.transport.fabric.transport import FabricTransport

MIB = 1 << 20
HERE, THERE = "rxe0:1", "rxe1:1"
RDMA_MTU = 4096
SMALL = {"slabs": "16", "staging_slabs": "4", "slab_bytes": "256KiB"}


@pytest.fixture(autouse=True)
def rdma_only(monkeypatch):
    """UCX may use reliable connections only: with another way to the peer it could take that in silence."""
    monkeypatch.setenv("UCX_TLS", "rc")
    # An emulated machine makes connections slowly; how long that may take is not what is tested here.
    monkeypatch.setattr(nixl, "CONNECT_SECONDS", 120.0)
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 120.0)
    monkeypatch.setattr(dial, "CONNECT_SECONDS", 120.0)


def packets(device):
    """Packets that a device has sent so far."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


@contextlib.contextmanager
def sent(nbytes):
    """Fails unless as many packets as ``nbytes`` need left the device of this side, and some came from the other."""
    before = packets("rxe0"), packets("rxe1")
    yield
    assert packets("rxe0") - before[0] >= nbytes // RDMA_MTU, "the bytes did not go over RDMA"
    assert packets("rxe1") > before[1], "the other device acknowledged nothing"


def run(*command):
    subprocess.run(command, check=True, timeout=60)


@contextlib.contextmanager
def link_with(*faults):
    """The link loses or delays packets meanwhile."""
    run("tc", "qdisc", "add", "dev", "v1", "root", "netem", *faults)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", "v1", "root")


@pytest.fixture
def here():
    fabric = NixlFabric("here", options={"devices": HERE})
    yield fabric
    fabric.close()


@pytest.fixture
def there(monkeypatch):
    """The descriptor of another process, which uses the other device, and the connection to it."""

    @contextlib.contextmanager
    def start(nbytes):
        with monkeypatch.context() as patch:
            patch.setenv("UCX_NET_DEVICES", THERE)
            other = started(destination, nbytes)
            process, connection = other.__enter__()
        try:
            yield process, connection, receive(connection)
        finally:
            other.__exit__(None, None, None)

    return start


def source(nbytes):
    return np.random.default_rng(1).integers(0, CANARY, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("check", Conformance.names())
@pytest.mark.parametrize("executor", ["packed", "direct"])
def test_promise_is_kept_over_rdma(executor, check):
    made = []

    def make(instance):
        made.append(instance)
        fabric = NixlFabric(instance, options={"devices": THERE if len(made) % 2 else HERE})
        return FabricTransport(instance, fabric, options={"executor": executor, **SMALL})

    before = packets("rxe0") + packets("rxe1")
    try:
        Conformance(make, timeout=240.0).run(check)
    except NotApplicable as missing:
        pytest.skip(f"{executor}: {missing}")
    moved = packets("rxe0") + packets("rxe1") - before
    print(f"{executor} {check}: {moved} packets")


def write_all(fabric, peer, connection, data, piece, handle):
    """One write of all of ``data`` in shuffled pieces, checked by content with canaries between them."""
    order = np.random.default_rng(handle).permutation(len(data) // piece)
    with sent(len(data)):
        fabric.post(peer, pieces(order, piece, order[::-1], stride=2 * piece), handle)
        assert collect(fabric, 1) == {handle: ""}
    connection.send("content")
    found = np.frombuffer(connection.recv_bytes(), dtype=np.uint8).reshape(-1, 2 * piece)
    np.testing.assert_array_equal(found[order[::-1], :piece], data.reshape(-1, piece)[order])
    assert (found[:, piece:] == CANARY).all()


@pytest.mark.parametrize("faults", [(), ("loss", "0.5%"), ("delay", "2ms")], ids=["whole", "loss", "delay"])
@pytest.mark.parametrize("piece", [512, 65536])
def test_content_arrives_over_the_link(here, there, faults, piece):
    data = source(2 * MIB)
    here.register([Region.of(data)])
    with there(4 * MIB) as (_, connection, descriptor):
        peer = here.connect(descriptor, "destination")
        with link_with(*faults) if faults else contextlib.nullcontext():
            write_all(here, peer, connection, data, piece, 1)
        assert let_go(here, peer)


def test_outage_of_a_second_is_waited_for(here, there):
    data = source(2 * MIB)
    here.register([Region.of(data)])
    with there(4 * MIB) as (_, connection, descriptor):
        peer = here.connect(descriptor, "destination")
        ended = threading.Event()

        def outage():
            with link_with("loss", "100%"):
                time.sleep(1.0)
            ended.set()

        threading.Thread(target=outage).start()
        try:
            write_all(here, peer, connection, data, 4096, 1)
        finally:
            assert ended.wait(60)
        assert let_go(here, peer)


def test_port_that_is_down_for_a_while_harms_no_idle_connection(here, there):
    data = source(2 * MIB)
    here.register([Region.of(data)])
    with there(4 * MIB) as (process, connection, descriptor):
        peer = here.connect(descriptor, "destination")
        run("ip", "link", "set", "v0", "down")
        time.sleep(3.0)
        run("bash", "-c", "ip link set v0 up && bash /run/rdma-vm/net.sh")
        assert process.is_alive()
        write_all(here, peer, connection, data, 4096, 1)
        assert let_go(here, peer)


def test_peer_that_is_killed_in_the_middle_of_writes(here, there):
    here.register([Region.of(source(4 * MIB))])
    everything = pieces(np.arange(64), 65536)
    with there(4 * MIB) as (process, _, descriptor):
        peer = here.connect(descriptor, "destination")
        for handle in range(4):
            here.post(peer, everything, handle)
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        taken = 4
        with contextlib.suppress(TransportError):
            for taken in range(4, 20):
                here.post(peer, everything, taken)
            taken = 20
        ended = collect(here, taken)
        print(
            f"{taken} writes were taken, all of them ended {time.monotonic() - began:.1f} s after the peer was killed"
        )
        assert sorted(ended) == list(range(taken))
        assert any(ended.values()) or taken < 20, "the peer was killed with 64 MiB to come, but all of it succeeded"
        assert not peer.alive
        with pytest.raises(TransportError):
            here.post(peer, everything, 100)
        assert let_go(here, peer)
        with pytest.raises(TransportUnavailable):
            here.connect(descriptor, "destination")


def test_memory_that_the_peer_takes_away(here, there):
    here.register([Region.of(source(4 * MIB))])
    with there(4 * MIB) as (process, connection, descriptor):
        peer = here.connect(descriptor, "destination")
        connection.send("revoke")
        assert connection.poll(300)
        assert connection.recv() == "revoked"
        with contextlib.suppress(TransportError):
            here.post(peer, pieces(np.arange(64), 65536), 1)
            assert collect(here, 1)[1], "the peer has let go of its memory, but a write to it succeeded"
        assert process.is_alive()
        assert let_go(here, peer)


def test_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(TransportUnavailable, match=r"no network device rxe7:1; found are rxe0:1 \(rdma\), rxe1:1"):
        NixlFabric("here", options={"devices": "rxe7:1"})
