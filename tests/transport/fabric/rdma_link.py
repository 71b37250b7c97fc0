"""The link between the two soft-RoCE devices of a virtual machine: what went over it, and how it is broken.

A test module that imports this is skipped where there is no such link.
"""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

if os.environ.get("RDMA_VM") != "1":
    pytest.skip("this machine has no RDMA devices to break: make test-rdma", allow_module_level=True)

RDMA_MTU = 4096
HERE, THERE = "rxe0", "rxe1"
"""The devices of the two sides, on the interfaces v0 and v1."""


def packets(device):
    """Packets that a device has sent so far."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


@contextlib.contextmanager
def sent(nbytes):
    """Fails unless as many packets as ``nbytes`` need left the device of this side, and some came from the other.

    A library may take TCP in silence: the data would arrive all the same.
    """
    before = packets(HERE), packets(THERE)
    yield
    assert packets(HERE) - before[0] >= nbytes // RDMA_MTU, "the bytes did not go over RDMA"
    assert packets(THERE) > before[1], "the other device acknowledged nothing"


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


def link_down():
    run("ip", "link", "set", "v0", "down")


def link_up():
    run("bash", "-c", "ip link set v0 up && bash /run/rdma-vm/net.sh")


def take_time(monkeypatch):
    """An emulated machine makes connections slowly; how long that may take is not what is tested."""
    for module in ("transport.dial", "transport.fabric.transport", "transport.fabric.nixl.adapter"):
        monkeypatch.setattr(f"kvbaton.{module}.CONNECT_SECONDS", 120.0)
