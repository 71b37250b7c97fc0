"""Which devices are chosen for GPUs and for host memory."""

import numpy as np
import pytest

from kvbaton.devices import Devices
from kvbaton.devices.made_up import MadeUpMachine
from kvbaton.errors import ConfigurationError
from kvbaton.memory import Region

HOST = Region.of(np.zeros(16, np.uint8))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("KVBATON_DEVICES", raising=False)


def on_gpu(number):
    return Region(0, 16, "cuda", device=number)


def eight_gpus(root):
    """Two sockets; four switches each, with a GPU and a device on it; a slow device for storage at each socket."""
    machine = MadeUpMachine(root)
    for socket in range(2):
        machine.node(socket, f"{32 * socket}-{32 * socket + 31}")
        for switch in range(4):
            number, bus = 4 * socket + switch, 16 + 64 * socket + 8 * switch
            upper = f"pci{socket:04x}:{bus:02x}/{socket:04x}:{bus:02x}:01.0/{socket:04x}:{bus + 1:02x}:00.0"
            machine.nvidia_gpu(f"{upper}/{socket:04x}:{bus + 2:02x}:00.0/{socket:04x}:{bus + 3:02x}:00.0", node=socket)
            machine.nic(
                f"mlx5_{number}",
                f"{upper}/{socket:04x}:{bus + 2:02x}:01.0/{socket:04x}:{bus + 4:02x}:00.0",
                node=socket,
            )
        machine.nic(
            f"mlx5_{8 + socket}",
            f"pci{socket:04x}:00/{socket:04x}:00:01.0/{socket:04x}:01:00.0",
            node=socket,
            rate="100 Gb/sec (4X EDR)",
        )
    return machine


def devices(root, processors=(0, 1)):
    return Devices.find(root, nvidia_smi="", processors=processors)


@pytest.mark.parametrize("gpu", range(8))
def test_each_gpu_gets_the_device_on_its_own_switch(tmp_path, gpu):
    eight_gpus(tmp_path)
    choice = devices(tmp_path).choose([HOST, on_gpu(gpu)])
    assert choice.devices == (f"mlx5_{gpu}",)
    assert "on the same PCI switch" in choice.why
    assert f"GPU {gpu}" in choice.why


def test_memory_of_two_gpus_gets_the_devices_of_both(tmp_path):
    eight_gpus(tmp_path)
    assert devices(tmp_path).choose([on_gpu(6), on_gpu(1)]).devices == ("mlx5_1", "mlx5_6")


def test_host_memory_gets_the_fast_devices_of_its_node(tmp_path):
    eight_gpus(tmp_path)
    choice = devices(tmp_path, processors=[40]).choose([HOST])
    assert choice.devices == ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7")
    assert "NUMA node 1" in choice.why
    assert "without the slower mlx5_9" in choice.why


def test_where_the_device_of_the_switch_is_down_the_next_nearest_are_taken(tmp_path):
    machine = eight_gpus(tmp_path)
    machine.write("sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN")
    choice = devices(tmp_path).choose([on_gpu(2)])
    assert choice.devices == ("mlx5_0", "mlx5_1", "mlx5_3")
    assert "on the same NUMA node" in choice.why


def test_a_switch_below_a_switch_is_nearer(tmp_path):
    machine = MadeUpMachine(tmp_path)
    upper = "pci0000:00/0000:00:01.0/0000:01:00.0"
    machine.amd_gpu(1, f"{upper}/0000:02:00.0/0000:03:00.0/0000:04:00.0/0000:05:00.0")
    machine.nic("near", f"{upper}/0000:02:00.0/0000:03:00.0/0000:04:01.0/0000:06:00.0")
    machine.nic("far", f"{upper}/0000:02:01.0/0000:07:00.0")
    assert devices(tmp_path).choose([on_gpu(0)]).devices == ("near",)


def test_a_flat_machine_uses_every_device(tmp_path):
    machine = MadeUpMachine(tmp_path)
    machine.nvidia_gpu("pci0000:00/0000:00:05.0")
    for number in range(2):
        machine.nic(f"mlx5_{number}", f"pci0000:00/0000:00:0{6 + number}.0")
    choice = devices(tmp_path).choose([on_gpu(0)])
    assert choice.devices == ("mlx5_0", "mlx5_1")
    assert "host bridge" in choice.why


def test_without_any_device_the_reason_says_so(tmp_path):
    assert devices(tmp_path).choose([HOST]).devices == ()
    assert devices(tmp_path).choose([HOST]).why == "this machine has no InfiniBand or RoCE device"
    MadeUpMachine(tmp_path).nic("mlx5_0", state="1: DOWN")
    choice = devices(tmp_path).choose([HOST])
    assert choice.devices == ()
    assert "mlx5_0 (port 1 DOWN" in choice.why


def test_a_node_without_devices_uses_any(tmp_path):
    eight_gpus(tmp_path)
    choice = devices(tmp_path, processors=[99]).choose([HOST])
    assert choice.devices == tuple(f"mlx5_{number}" for number in range(8))


def test_the_option_counts_more_than_the_variable_and_both_more_than_the_tree(tmp_path, monkeypatch):
    eight_gpus(tmp_path)
    found = devices(tmp_path)
    monkeypatch.setenv("KVBATON_DEVICES", "mlx5_3")
    choice = found.choose([on_gpu(0)])
    assert (choice.devices, choice.why) == (("mlx5_3",), "KVBATON_DEVICES says so")
    choice = found.choose([on_gpu(0)], {"devices": " mlx5_9:1, mlx5_0 ,mlx5_9:1"})
    assert (choice.devices, choice.why) == (("mlx5_9:1", "mlx5_0"), "devices= says so")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlx5_77", "devices= names device 'mlx5_77', which is not here; found are mlx5_0 (port 1 ACTIVE, InfiniBand"),
        ("mlx5_0:2", "devices= names port 2 of device 'mlx5_0', which has no active port; found are mlx5_0"),
        ("mlx5_2", "devices= names device 'mlx5_2', which has no active port"),
        (",", "devices= is ',', which names no device; found are mlx5_0"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_with_what_was_found(tmp_path, text, message):
    machine = eight_gpus(tmp_path)
    machine.write("sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN")
    with pytest.raises(ConfigurationError) as refused:
        devices(tmp_path).choose([], {"devices": text})
    assert message in str(refused.value)
    assert "mlx5_9 (port 1 ACTIVE, InfiniBand, 100 Gbit/s, NUMA node 1)" in str(refused.value)
