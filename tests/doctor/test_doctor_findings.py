"""Limits, versions and advice, on made-up trees."""

import dataclasses
import os

import pytest
from rich.console import Console

from kvbaton.devices import Choice, Devices
from kvbaton.devices.made_up import MadeUpMachine
from kvbaton.doctor.advice import advise
from kvbaton.doctor.findings import Attempt, Measured, PeerReport
from kvbaton.doctor.libraries import library_versions
from kvbaton.doctor.limits import HugePages, Limits
from kvbaton.doctor.report import DeviceChoice, PeerAccess, Report, to_json
from kvbaton.doctor.text import show, size

SHM = Attempt("shm", "works", mapped=True, cross_process=True, memory_kinds=("host",))
WELL = Limits(8, 64 << 30, None, -1, 65536, 16 << 30, 16 << 30, None, True, None, "advise", ())


@pytest.fixture
def machine(tmp_path):
    return MadeUpMachine(tmp_path)


def report(devices=None, **changes):
    plain = Report(
        host="node7",
        kernel="Linux 6.1",
        limits=WELL,
        libraries={"kvbaton": "1.0", "nixl": "1.5", "mooncake": "", "mori": ""},
        native_copy=True,
        devices=devices or Devices((), (), ()),
        choices=(),
        peer_access=PeerAccess(),
        transports=(SHM,),
        peer=None,
    )
    return dataclasses.replace(plain, **changes)


def found(machine):
    return Devices.find(machine.root, nvidia_smi="", processors=[0])


def test_limits_of_a_tree(machine):
    machine.write("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 5 kB")
    machine.write("proc/sys/kernel/yama/ptrace_scope", "1")
    machine.write("proc/sys/kernel/shmmax", "18446744073692774399")
    machine.write("sys/fs/cgroup/memory.max", "1073741824")
    machine.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny")
    machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "12")
    machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10")
    (machine.root / "dev/shm").mkdir(parents=True)
    limits = Limits.find(machine.root)
    assert (limits.memory, limits.memory_limit) == (16 << 20, 1 << 30)
    assert (limits.ptrace_scope, limits.shmmax) == (1, 18446744073692774399)
    assert limits.shared_huge_pages == "advise"
    assert limits.huge_pages == (HugePages(2 << 20, 12, 10),)
    status = os.statvfs(machine.root)
    assert limits.dev_shm == status.f_blocks * status.f_frsize
    assert limits.processors == len(os.sched_getaffinity(0))


def test_limits_of_an_empty_tree_are_not_known(tmp_path):
    limits = Limits.find(tmp_path)
    assert (limits.memory, limits.memory_limit, limits.dev_shm, limits.ptrace_scope) == (0, None, None, None)
    assert (limits.shared_huge_pages, limits.huge_pages) == ("", ())


def test_versions_of_libraries_by_any_of_their_names():
    there = {"nixl-cu13": "1.5.1", "numpy": "2.0", "amd-mori": "1.2.4"}
    versions = library_versions(lambda name: there.get(name, ""))
    assert versions["nixl"] == "1.5.1"
    assert versions["mori"] == "1.2.4"
    assert (versions["mooncake"], versions["numpy"]) == ("", "2.0")


def test_a_machine_in_order_has_nothing_to_change(machine):
    machine.nic("mlx5_0", "pci0000:00/0000:00:01.0", node=0)
    devices = found(machine)
    choices = (DeviceChoice("host memory", devices.choose()),)
    assert advise(report(devices, choices=choices)) == ()
    assert report(devices).works


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"native_copy": False}, "the native copy kernel is missing"),
        ({"limits": dataclasses.replace(WELL, anonymous_files=False)}, "no memfd_create"),
        ({"limits": dataclasses.replace(WELL, dev_shm=64 << 20)}, "/dev/shm has 64 MiB"),
        ({"limits": dataclasses.replace(WELL, ptrace_scope=1)}, "sysctl kernel.yama.ptrace_scope=0"),
        ({"peer_access": PeerAccess(((True, False), (True, True)))}, "GPU 0 cannot address the memory of GPU 1"),
        ({"peer": PeerReport("h:1", error="nobody there")}, "h:1 was not measured to the end: nobody there"),
        ({"peer": PeerReport("h:1", libraries={"nixl": "1.4"})}, "nixl is 1.5 here and 1.4 at the peer"),
        ({"peer": PeerReport("h:1", transports=[Measured("tcp", "fails", "no way")])}, "but not between them: no way"),
    ],
)
def test_advice_is_one_line_each(changes, advice):
    (line,) = advise(report(**changes))
    assert advice in line
    assert "\n" not in line


def test_what_fails_for_one_reason_is_one_line():
    failed = [
        Attempt(name, "fails", reason)
        for name, reason in (("nixl", "no mlx5_9"), ("mori", "no mlx5_9"), ("tcp", "full"))
    ]
    assert advise(report(transports=(SHM, *failed))) == (
        "not usable here: nixl, mori: no mlx5_9",
        "not usable here: tcp: full",
    )


def test_advice_about_network_cards(machine):
    machine.netdev("eth2", mtu=1500)
    machine.nic("mlx5_0", link_layer="Ethernet", netdev="eth2", gids=(("::ffff:10.0.0.1", "RoCE v2"),))
    machine.nic("mlx5_1", state="1: DOWN")
    machine.nic("mlx5_2", link_layer="Ethernet", gids=())
    devices = found(machine)
    limits = dataclasses.replace(WELL, memlock=8 << 20)
    choices = (DeviceChoice("host memory", Choice((), "none")),)
    lines = advise(report(devices, libraries={"nixl": ""}, limits=limits, choices=choices))
    for wanted in (
        "mlx5_0 can do RDMA, but no library for it is installed: pip install 'kvbaton[nixl]'",
        "mlx5_0 port 1 sends packets of 1024 bytes: set the MTU of eth2 (1500) to 4200",
        "mlx5_1 port 1 is DOWN",
        "mlx5_2 port 1 has no GID",
        "only 8192 KiB may be pinned",
        "name devices in KVBATON_DEVICES",
    ):
        assert any(wanted in line for line in lines), wanted
    assert len(lines) == 6


def test_what_works_decides_the_exit_code():
    loopback = Attempt("loopback", "works")
    assert not report(transports=(loopback, Attempt("tcp", "missing", cross_process=True))).works
    assert report(transports=(loopback, SHM)).works
    assert not report(peer=PeerReport("h:1", transports=[Measured("tcp", "fails")])).works
    assert report(peer=PeerReport("h:1", error="hung", transports=[Measured("tcp", "works")])).works


def test_text_and_json_say_it_all(machine):
    machine.netdev("eth2", mtu=9000)
    gids = (("::ffff:10.0.0.1", "RoCE v2"),)
    machine.nic("mlx5_0", "pci0000:00/0000:00:01.0", node=0, link_layer="Ethernet", netdev="eth2", gids=gids)
    machine.amd_gpu(1, "pci0000:00/0000:00:02.0", node=0, memory=192 << 30)
    devices = found(machine)
    choices = tuple(DeviceChoice(memory, choice) for memory, choice in devices.choose_for_gpus().items())
    peer = PeerReport("10.0.0.2:8899", host="node8", round_trip_seconds=30e-6)
    peer.transports = [Measured("tcp", "works", "", 90e-6, 3.2e9), Measured("nixl", "missing", "[not] installed")]
    whole = report(devices, choices=choices, peer=peer, peer_access=PeerAccess(((True,),)), advice=("do [this]",))
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(whole, console)
    console.file.close()
    text = console.export_text()
    for wanted in (
        "mlx5_0",
        "0: 10.0.0.1 RoCE v2",
        "4096 (eth2 9000)",
        "192 GiB",
        "amd GPU 0",
        "under the same PCI host bridge",
        "node8",
        "3.20 GB/s",
        "90 us",
        "[not] installed",
        "* do [this]",
    ):
        assert wanted in text, wanted
    told = to_json(whole)
    assert '"works": true' in told
    assert '"address": "10.0.0.1"' in told
    assert '"bytes_per_second": 3200000000.0' in told


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (8 << 20, "8 MiB"), (1536, "1.5 KiB"), (1 << 62, "4 EiB")])
def test_sizes(nbytes, text):
    assert size(nbytes) == text
