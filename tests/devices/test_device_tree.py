"""Devices, ports and distances as they are read from made-up trees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.devices import Devices, Distance, PciDevice, distance, find_gpus, find_nics
from kvbaton.devices.files import natural, numbers_in_list
from kvbaton.devices.made_up import MadeUpMachine
from kvbaton.devices.nics import roce_mtu
from kvbaton.devices.pci import normal_address

SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0/"
"""A root port and the upper side of a switch below it."""


@pytest.fixture
def machine(tmp_path):
    return MadeUpMachine(tmp_path)


def test_a_machine_without_any_device_has_none(tmp_path):
    assert Devices.find(tmp_path, nvidia_smi="", processors=[0]) == Devices((), (), ())


def test_infiniband_port(machine):
    machine.nic("mlx5_0", SWITCH + "0000:02:00.0/0000:03:00.0", node=1)
    (nic,) = find_nics(machine.root)
    assert nic.pci.address == "0000:03:00.0"
    assert nic.pci.numa_node == 1
    (port,) = nic.ports
    assert (port.number, port.state, port.link_layer, port.gbits) == (1, "ACTIVE", "InfiniBand", 400)
    assert (port.mtu, port.netdev) == (0, "")
    assert nic.active


def test_roce_port_takes_the_gid_of_ipv4_and_version_2(machine):
    machine.netdev("eth2", SWITCH + "0000:02:00.0/0000:03:00.0", mtu=9000)
    gids = (
        ("fe80::5054:ff:fe12:3456", "IB/RoCE v1"),
        ("fe80::5054:ff:fe12:3456", "RoCE v2"),
        ("::ffff:10.1.2.3", "IB/RoCE v1"),
        ("fd00::7", "RoCE v2"),
        ("::ffff:10.1.2.3", "RoCE v2"),
        ("::", "RoCE v2"),
    )
    place = SWITCH + "0000:02:00.0/0000:03:00.0"
    machine.nic("bnxt_re0", place, link_layer="Ethernet", netdev="eth2", gids=gids)
    (nic,) = find_nics(machine.root)
    (port,) = nic.ports
    assert len(port.gids) == 5
    assert port.best_gid is not None
    assert (port.best_gid.index, port.best_gid.address, port.best_gid.kind) == (4, "10.1.2.3", "RoCE v2")
    assert (port.netdev, port.netdev_mtu, port.mtu) == ("eth2", 9000, 4096)


def test_roce_without_ipv4_prefers_an_address_that_is_routed(machine):
    gids = (("fe80::1", "RoCE v2"), ("fd00::7", "RoCE v2"), ("::ffff:10.0.0.1", "IB/RoCE v1"))
    machine.nic("mlx5_0", link_layer="Ethernet", gids=gids)
    best = find_nics(machine.root)[0].ports[0].best_gid
    assert best is not None
    assert best.index == 1


@pytest.mark.parametrize(
    ("netdev", "rdma"), [(1500, 1024), (4200, 4096), (4191, 2048), (9000, 4096), (0, 0), (352, 256), (351, 0)]
)
def test_mtu_of_roce_leaves_room_for_headers(netdev, rdma):
    assert roce_mtu(netdev) == rdma


def test_software_device_stands_where_its_ethernet_device_stands(machine):
    place = "pci0000:00/0000:00:03.0"
    machine.pci(place, 0)
    machine.netdev("eth0", place)
    machine.nic("rxe0", link_layer="Ethernet", netdev="eth0", rate="2.5 Gb/sec (1X SDR)")
    (nic,) = find_nics(machine.root)
    assert (nic.pci.address, nic.pci.numa_node) == ("0000:00:03.0", 0)
    assert nic.ports[0].gbits == 2.5


def test_two_ports_and_a_port_that_is_down(machine):
    machine.nic("mlx4_0", "pci0000:00/0000:00:03.0", state="1: DOWN")
    machine.nic("mlx4_0", "pci0000:00/0000:00:03.0", port=2, rate="100 Gb/sec (4X EDR)")
    machine.nic("mlx5_10", state="1: DOWN")
    machine.nic("mlx5_9", state="")
    nics = find_nics(machine.root)
    assert [nic.name for nic in nics] == ["mlx4_0", "mlx5_9", "mlx5_10"]
    assert [nic.active for nic in nics] == [True, False, False]
    assert nics[0].gbits == 100
    assert nics[1].ports[0].state == "unknown"
    assert "port 1 DOWN" in nics[0].describe()


def test_gpus_of_amd(machine):
    machine.write("sys/class/kfd/kfd/topology/nodes/0/properties", "simd_count 0\ncpu_cores_count 64")
    machine.amd_gpu(1, SWITCH + "0000:02:01.0/0000:c5:00.0", node=0, memory=192 << 30)
    machine.amd_gpu(2, "pci0001:00/0001:00:01.0/0001:e5:00.0", node=1)
    gpus = find_gpus(machine.root)
    assert [(gpu.vendor, gpu.index, gpu.pci.address, gpu.pci.numa_node) for gpu in gpus] == [
        ("amd", 0, "0000:c5:00.0", 0),
        ("amd", 1, "0001:e5:00.0", 1),
    ]
    assert gpus[0].memory_bytes == 192 << 30
    assert gpus[0].name == "gfx942"


def test_gpus_of_nvidia_by_the_tool_and_without_it(machine):
    machine.nvidia_gpu(SWITCH + "0000:02:01.0/0000:18:00.0", node=0)
    said = "0, 00000000:18:00.0, NVIDIA H200, 143771\n1, 00000000:2A:00.0, NVIDIA H200, 143771\nNo devices were found\n"
    gpus = find_gpus(machine.root, said)
    assert [(gpu.index, gpu.pci.address, gpu.memory_bytes) for gpu in gpus] == [
        (0, "0000:18:00.0", 143771 << 20),
        (1, "0000:2a:00.0", 143771 << 20),
    ]
    assert gpus[0].pci.chain[0] == "pci0000:00"
    assert gpus[1].pci.chain == ()
    (gpu,) = find_gpus(machine.root)
    assert (gpu.index, gpu.name, gpu.pci) == (0, "NVIDIA H200", gpus[0].pci)


def test_what_is_nearer(machine):
    def place(where, node):
        return PciDevice.at(machine.pci(where, node))

    here = place(SWITCH + "0000:02:00.0/0000:03:00.0", 0)
    assert distance(here, place(SWITCH + "0000:02:01.0/0000:04:00.0", 0)) is Distance.SAME_SWITCH
    assert distance(here, place("pci0000:00/0000:00:01.0/0000:01:00.1", 0)) is Distance.SAME_ROOT_PORT
    assert distance(here, place("pci0000:00/0000:00:02.0/0000:09:00.0", 0)) is Distance.SAME_HOST_BRIDGE
    assert distance(here, place("pci0000:80/0000:80:01.0/0000:81:00.0", 0)) is Distance.SAME_NUMA_NODE
    assert distance(here, place("pci0000:c0/0000:c0:01.0/0000:c1:00.0", 1)) is Distance.ACROSS
    assert distance(here, place("pci0000:d0/0000:d0:01.0/0000:d1:00.0", -1)) is Distance.UNKNOWN
    assert distance(here, PciDevice()) is Distance.UNKNOWN


def test_a_link_that_leads_nowhere_is_no_device(machine):
    machine.nic("mlx5_0")
    (machine.root / "sys/class/infiniband/mlx5_0/device").symlink_to("../gone")
    assert find_nics(machine.root)[0].pci == PciDevice()


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("00000000:18:00.0", "0000:18:00.0"),
        ("0000:AB:00.0", "0000:ab:00.0"),
        ("18:00.0", "0000:18:00.0"),
        ("00010000:18:00.0", "00010000:18:00.0"),
    ],
)
def test_addresses_of_tools(written, address):
    assert normal_address(written) == address


def test_lists_of_the_kernel():
    assert numbers_in_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert numbers_in_list("") == numbers_in_list("all of them") == ()


def test_nodes_of_a_process(machine):
    machine.node(0, "0-3,8-11")
    machine.node(1, "4-7")
    machine.write("sys/devices/system/node/possible", "0-1")
    assert Devices.find(machine.root, nvidia_smi="", processors=[5, 6]).nodes == (1,)
    assert Devices.find(machine.root, nvidia_smi="", processors=[5, 9]).nodes == (0, 1)


@settings(deadline=None)
@given(st.lists(st.from_regex(r"[a-z_]{0,5}[0-9]{0,4}[a-z]?", fullmatch=True)))
def test_natural_order_is_an_order(names):
    ordered = sorted(names, key=natural)
    assert sorted(ordered, key=natural) == ordered
    assert sorted(names) == sorted(ordered)


@settings(deadline=None)
@given(content=st.binary(max_size=64), files=st.lists(st.sampled_from(range(8)), min_size=1))
def test_whatever_files_say_nothing_is_raised(tmp_path_factory, content, files):
    root = tmp_path_factory.mktemp("tree")
    machine = MadeUpMachine(root)
    machine.nic("mlx5_0", SWITCH + "0000:02:00.0/0000:03:00.0", link_layer="Ethernet", netdev="eth0")
    machine.netdev("eth0")
    machine.amd_gpu(1, SWITCH + "0000:02:01.0/0000:04:00.0")
    machine.node(0, "0-1")
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    places = [
        *(port / name for name in ("state", "rate", "link_layer", "gids/0", "gid_attrs/types/0")),
        root / "sys/class/net/eth0/mtu",
        root / "sys/class/kfd/kfd/topology/nodes/1/properties",
        root / "sys/devices/system/node/node0/cpulist",
    ]
    for number in files:
        places[number].write_bytes(content)
    Devices.find(root, nvidia_smi=content.decode(errors="replace"), processors=[0]).choose()
