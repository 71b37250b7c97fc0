"""How NIXL is loaded and its back-end started: options, network devices, and what UCX must be told."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbaton.devices import Choice, find_nics
from kvbaton.errors import ConfigurationError, TransportUnavailable
from kvbaton.transport.base import Costs
from kvbaton.transport.fabric.own_options import OwnOptions

OPTIONS = {
    "backend": "UCX or LIBFABRIC; UCX if not given",
    "devices": "network devices, comma separated: mlx5_0:1,mlx5_1:1 or eth0; all that there are if not given",
    "protocol": "any, rdma (never TCP) or tcp (never RDMA); any if not given",
    "num_threads": "threads in which the library posts long lists of writes, 0 to 64; 0 if not given",
}
_PROTOCOLS = {"any": "", "rdma": "^tcp", "tcp": "^ib"}
# One retry of RC takes about a second, and 7, UCX's own, is for ever on soft-RoCE. UD makes the connections of RC.
# Writes notice a dead peer without keepalives. Over UD these end the whole process when a port of this machine is down.
_UCX_SETTINGS = {"KEEPALIVE_INTERVAL": "inf", "RC_RETRY_COUNT": "3", "UD_TIMEOUT": "30s"}
_MODULES = "UCX_MODULES"
_NEEDS = {
    "UCX": "beside shared memory it needs a transport that notices the death of a peer, RDMA or tcp (UCX_TLS, "
    "protocol=..., devices=...); UCX's own messages say more",
    "LIBFABRIC": "it needs libfabric.so.1, libhwloc.so.15 and the CUDA driver's libcuda.so.1",
}
SHARED_MEMORY_COSTS = Costs(piece_seconds=4e-6, copy_bytes_per_second=5e9)
"""Two processes of one host (`kvbaton bench fabrics`, UCX_TLS=tcp,posix,sysv,cma): a piece took 3.5 us at 256 B and 4.2
us at 8 KiB, and a packed byte 0.4 ns more than a direct one does beside that: at 8 KiB the two cost about the same. A
lone piece of 64 B is no quicker by itself than packed."""
TCP_COSTS = Costs(piece_seconds=7e-6, copy_bytes_per_second=20e9)
"""The same over UCX_TLS=tcp: 6 to 8 us up to 2 KiB. Copies overlap with the wire, so that packing costs nearly nothing
more: at 32 KiB it was still quicker by half."""
_starting = threading.Lock()


def load() -> ModuleType:
    """The vendor's Python module. Raises `TransportUnavailable` where it is not installed."""
    raising = logging.raiseExceptions
    try:
        api = importlib.import_module("nixl_cu13._api")
    except ImportError as error:
        raise TransportUnavailable(f"NIXL cannot be imported ({error}); pip install 'kvbaton[nixl]'") from error
    finally:
        # The import sets up logging for the whole process.
        logging.raiseExceptions = raising
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return api


def errors(api: ModuleType) -> tuple[type[Exception], ...]:
    """What the library's calls raise."""
    known = [value for value in vars(api.nixlBind).values() if isinstance(value, type)]
    return (RuntimeError, *(value for value in known if issubclass(value, Exception)))


def devices_found() -> dict[str, str]:
    """Network devices by the names that UCX gives them: ``mlx5_0:1`` is "rdma", ``eth0`` is "tcp"."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    networks = sorted(Path("/sys/class/net").glob("*"))
    return {f"{port.parent.parent.name}:{port.name}": "rdma" for port in ports} | {n.name: "tcp" for n in networks}


def devices_option(options: Mapping[str, str], near: Callable[[], Choice]) -> str:
    """The option ``devices`` for the network devices that are near; empty where UCX is to find out, or was told."""
    rdma = options.get("backend", "UCX").upper() == "UCX" and options.get("protocol", "any") != "tcp"
    ports = near().ports if rdma and "UCX_NET_DEVICES" not in os.environ else ()
    # NIXL takes several only if one of them is a port 1.
    return ",".join(ports) if len(ports) == 1 or any(port.endswith(":1") for port in ports) else ""


def uses_hardware(options: Mapping[str, str]) -> bool:
    """Whether an RDMA device will carry the bytes to other hosts."""
    return options.get("protocol", "any") != "tcp" and any(nic.active for nic in find_nics())


def costs() -> Costs:
    """What writing costs, as UCX is set up here."""
    named = set(os.environ.get("UCX_TLS", "").split(",")) - {"self"}
    return TCP_COSTS if named == {"tcp"} else SHARED_MEMORY_COSTS


def memory_kinds() -> frozenset[str]:
    """The kinds of memory that this machine has and the library reaches."""
    return frozenset({"host", "cuda"} if any(Path("/dev").glob("nvidia[0-9]*")) else {"host"})


def parameters(options: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The back-end that ``options`` ask for, and its parameters.

    Raises `ConfigurationError` for what is not known or does not fit, `TransportUnavailable` for a missing device.
    """
    own = OwnOptions("nixl", {**options, "backend": options.get("backend", "UCX").upper()}, OPTIONS)
    backend = own.one_of("backend", tuple(_NEEDS), "UCX")
    protocol = own.one_of("protocol", tuple(_PROTOCOLS), "any")
    threads = own.number("num_threads", 0, 64, 0)
    taken = {"num_threads": str(threads)} if threads else {}
    devices = own.names("devices")
    if backend == "UCX":
        return backend, taken | _ucx(protocol, devices)
    if protocol != "any" or devices:
        raise ConfigurationError(
            "protocol and devices are for UCX; libfabric has variables (FI_PROVIDER, FI_EFA_IFACE)"
        )
    return backend, taken


def _ucx(protocol: str, devices: list[str]) -> dict[str, str]:
    found = devices_found()
    listed = ", ".join(f"{name} ({kind})" for name, kind in found.items()) or "none"
    missing = [name for name in devices if name not in found]
    if missing or (protocol == "rdma" and "rdma" not in found.values()):
        raise TransportUnavailable(
            f"this machine has no network device {', '.join(missing) or 'for rdma'}; found are {listed}"
        )
    settings = dict(_UCX_SETTINGS)
    if protocol != "any":
        if "UCX_TLS" in os.environ:
            raise ConfigurationError(f"protocol is {protocol}, but UCX_TLS is set too: use one of them")
        settings["TLS"] = _PROTOCOLS[protocol]
    # NIXL takes a list of devices to whose end it appends port 1, or settings without commas.
    taken: dict[str, str] = {}
    for name in devices:
        if name.endswith(":1"):
            taken["device_list"] = ",".join([*(other for other in devices if other != name), name[:-2]])
            break
    else:
        if len(devices) > 1 or (devices and "UCX_NET_DEVICES" in os.environ):
            raise ConfigurationError(
                f"NIXL cannot be given {','.join(devices)} as an option; set UCX_NET_DEVICES to it"
            )
        if devices:
            settings["NET_DEVICES"] = devices[0]
    # A setting of which the environment has its own stays as it is there.
    return taken | {"engine_config": ",".join(f"{name}={value}" for name, value in settings.items())}


def start(agent: Any, backend: str, wanted: dict[str, str], raised: tuple[type[Exception], ...]) -> None:
    """Start the back-end of ``agent``. Raises `TransportUnavailable` with what is known of the reason."""
    with _starting, _without_efa():
        try:
            agent.create_backend(backend, wanted)
        except raised as error:
            raise TransportUnavailable(f"NIXL cannot start {backend} ({error}): {_NEEDS[backend]}") from error


@contextlib.contextmanager
def _without_efa() -> Iterator[None]:
    """Keep UCX from loading its module for EFA on machines that have none.

    It brings the system's netlink libraries beside those of the wheel, and the process would crash when it ends.
    """
    needless = _MODULES not in os.environ and not any(Path("/sys/class/infiniband").glob("*efa*"))
    if needless:
        os.environ[_MODULES] = "^efa"
    try:
        yield
    finally:
        if needless:
            del os.environ[_MODULES]
