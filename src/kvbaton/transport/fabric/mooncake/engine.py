"""Starting Mooncake's transfer engine: its options, its environment variables, and the devices of this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbaton.devices import Choice
from kvbaton.errors import ConfigurationError, TransportUnavailable
from kvbaton.transport.fabric.own_options import OwnOptions

OPTIONS = {
    "protocol": "rdma or tcp; if not given, rdma where this machine has a device for it, else tcp",
    "devices": "RDMA devices, comma separated: mlx5_0,mlx5_1; all that there are if not given",
    "allow_tcp": "1: take tcp where protocol is rdma but no device can be used; 0 if not given",
}
PROTOCOLS = ("rdma", "tcp")
LEAST = "0.3.12"
LANES = 4
"""Connections to a peer over TCP, where no variable says another number."""
"""The first version that acknowledges writes over TCP."""
_INFINIBAND = Path("/sys/class/infiniband")
# Variables that change what a completion means, or make the library's calls block.
_REFUSED = {
    "MC_TCP_PROTO": ("1", "a write would end before its bytes are in place"),
    "MC_TCP_ENABLE_CONNECTION_POOL": ("0 false no", "each write would block on the peer"),
    "MC_USE_TENT": ("", "it selects another engine, which this adapter does not know"),
    "MC_USE_TEV1": ("", "it selects another engine, which this adapter does not know"),
}
_environment = threading.Lock()
_log = logging.getLogger(__name__)


def rdma_devices() -> list[str]:
    """The names of this machine's RDMA devices."""
    return sorted(device.name for device in _INFINIBAND.glob("*"))


def library(*, ipv6: bool = False) -> ModuleType:
    """The vendor's Python module. Raises `TransportUnavailable` where there is none, or an old one.

    It reads most of its variables when it is first imported in a process: what the user has set stays.
    """
    defaults = {"MC_RDMA_RAIL_PAUSE_SECONDS": "1", "MC_LOG_LEVEL": "ERROR"} | ({"MC_USE_IPV6": "1"} if ipv6 else {})
    try:
        with _variables(defaults | {name: os.environ[name] for name in defaults if name in os.environ}):
            module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransportUnavailable(
            f"Mooncake cannot be imported ({error}): pip install 'kvbaton[mooncake]', and on Debian apt-get install "
            "libibverbs1 librdmacm1 ibverbs-providers libnuma1"
        ) from error
    version = _version()
    if not hasattr(module.TransferEngine, "send_probe") or _numbers(version or LEAST) < _numbers(LEAST):
        raise TransportUnavailable(
            f"Mooncake {version} is too old, since its writes over TCP end before their bytes are in place: {LEAST} is "
            "needed, pip install 'kvbaton[mooncake]'"
        )
    return module


def devices_option(options: Mapping[str, str], near: Callable[[], Choice]) -> str:
    """The option ``devices`` for the RDMA devices that are near; empty where the protocol has none."""
    return "" if options.get("protocol") == "tcp" else ",".join(near().devices)


def _version() -> str:
    """The version of what was installed; empty if that is not known."""
    names = importlib.metadata.packages_distributions().get("mooncake", [])
    return importlib.metadata.version(names[0]) if names else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def choose(options: dict[str, str]) -> tuple[list[str], str]:
    """The protocols to try, in order, and the devices. Raises `ConfigurationError` and `TransportUnavailable`."""
    own = OwnOptions("mooncake", options, OPTIONS)
    for variable, (values, reason) in _REFUSED.items():
        value = os.environ.get(variable, "").lower()
        if value and (not values or value in values.split()):
            raise ConfigurationError(f"{variable} is {value}: {reason}; unset it")
    found = rdma_devices()
    protocol = own.one_of("protocol", PROTOCOLS, "rdma" if found else "tcp")
    allow_tcp = own.one_of("allow_tcp", ("0", "1"), "0")
    devices = own.names("devices")
    if protocol == "tcp":
        if devices:
            raise ConfigurationError(f"devices are for protocol=rdma; protocol is tcp, and devices {','.join(devices)}")
        return ["tcp"], ""
    missing = [device for device in devices if device not in found]
    if allow_tcp == "0" and (missing or not found):
        raise TransportUnavailable(
            f"protocol is rdma with {options.get('devices') or 'any device'}, but this machine has "
            f"{', '.join(found) or 'none'}; name others (devices=...), take protocol=tcp, or allow the fall-back to it "
            "(allow_tcp=1)"
        )
    return ["rdma", "tcp"] if allow_tcp == "1" else ["rdma"], ",".join(devices)


def lanes() -> int:
    """How many connections the library makes to a peer over TCP."""
    given = os.environ.get("MC_TCP_LANES_PER_PEER") or os.environ.get("MC_TCP_MAX_CONNECTIONS_PER_PEER") or ""
    return int(given) if given.isdecimal() else LANES


def start(module: ModuleType, host: str, protocols: Sequence[str], devices: str) -> tuple[str, Any]:
    """The first protocol that works, and its engine. Raises `TransportUnavailable` if none does."""
    for protocol in protocols:
        if protocol != protocols[0]:
            _log.warning("Mooncake cannot use RDMA on this machine: it takes TCP, as allow_tcp=1 says")
        engine = module.TransferEngine()
        local = f"[{host}]" if ":" in host else host
        # The library ignores the protocol that it is given; these two it obeys.
        forced = {
            "MC_FORCE_TCP": "1" if protocol == "tcp" else None,
            "MC_FORCE_HCA": "1" if protocol == "rdma" else None,
        }
        with _variables(forced):
            if engine.initialize(local, "P2PHANDSHAKE", protocol, devices if protocol == "rdma" else "") == 0:
                _let_close(engine.get_rpc_port())
                # Its listener waits with the old limit until somebody comes.
                engine.send_probe(f"{local}:{engine.get_rpc_port()}")
                return protocol, engine
    raise TransportUnavailable(
        f"Mooncake cannot start over {' or '.join(protocols)} at {host}, with {devices or 'any device'} of "
        f"{', '.join(rdma_devices()) or 'none'}: an RDMA port must be active and have an address "
        "(ibv_devinfo), and a TCP port from 15000 to 16999 be free"
    )


def _let_close(port: int) -> None:
    """Have the library look every 50 ms whether to stop listening at ``port``.

    It looks once in a second, and an engine that is destroyed waits for that while it holds Python's lock.
    """
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as found:
                    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))


@contextlib.contextmanager
def _variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for a while; None: not set."""
    with _environment:
        before = {name: os.environ.get(name) for name in values}
        try:
            _set(values)
            yield
        finally:
            _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
