"""What ends a process that uses MORI-IO, or hangs it, found out before MORI-IO is asked.

The library calls ``exit`` or ``abort`` where others return an error: for a port that is taken, a machine without an AMD
GPU (also if only host memory is used), a device that may not be opened, and memory that cannot be pinned. For the last
it does so late, in a thread of its own, when a peer asks for the memory first.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvbaton.address import Endpoint, advertised
from kvbaton.errors import AddressError, ConfigurationError, TransportUnavailable
from kvbaton.memory import Region

_PCI_ADDRESS = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_CAP_IPC_LOCK = 1 << 14


def control_host(bind: str, advertise: str) -> str:
    """The dotted address where MORI-IO listens: the same that it tells peers. ``bind`` may have a port, of no use here.

    Raises `AddressError` for IPv6, a wildcard without ``advertise``, and names that have no IPv4 address, and
    `ConfigurationError` if ``bind`` and ``advertise`` are two addresses.
    """
    endpoint = Endpoint.parse(bind)
    host = _dotted(advertised(endpoint.host, advertise or None))
    if advertise and not endpoint.is_wildcard and _dotted(endpoint.host) != host:
        raise ConfigurationError(
            f"MORI-IO listens on the address that it tells peers, so bind={endpoint.host} and advertise={advertise} "
            "cannot differ; leave one of them out"
        )
    return host


def _dotted(host: str) -> str:
    if ":" in host:
        raise AddressError(
            f"MORI-IO knows no IPv6, and {host} is an IPv6 address; give an IPv4 address of this machine"
        )
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{host!r} has no IPv4 address, which MORI-IO needs: {error}") from error
    return str(found[0][4][0])


@contextlib.contextmanager
def held_port(host: str, port: int) -> Iterator[None]:
    """Hold ``port`` of ``host`` until MORI-IO listens there: it ends the process where it cannot.

    The library sets ``SO_REUSEADDR``, so it may bind to a port that is held but not listened on. Raises `AddressError`
    if the port is taken, or if the address is none of this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise AddressError(
                f"MORI-IO cannot listen on {host} port {port}: {error.strerror}; bind to an IPv4 address of this "
                "machine, and to a free port or to port 0"
            ) from error
        yield


def rdma_devices(selection: str, root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """The RDMA devices that ``selection`` (``a,b`` or ``^a,b``) leaves of those of this machine, as MORI-IO reads it.

    Raises `TransportUnavailable` for a device that is no PCI device, on which MORI-IO looks for a bus for ever, and for
    one that this process may not open, which ends it.
    """
    present = sorted(found.name for found in root.glob("*"))
    names = [name.strip() for name in selection.removeprefix("^").split(",") if name.strip()]
    chosen = [name for name in present if not names or (name in names) != selection.startswith("^")]
    for name in chosen:
        if not any(_PCI_ADDRESS.fullmatch(part) for part in (root / name).resolve().parts):
            raise TransportUnavailable(
                f"RDMA device {name} is no PCI device, and MORI-IO hangs on those; leave it out: devices=^{name}"
            )
        nodes = [Path("/dev/infiniband") / found.name for found in (root / name / "device").glob("infiniband_verbs/*")]
        if nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
            raise TransportUnavailable(
                f"RDMA device {name} may not be opened ({nodes[0]}), and MORI-IO ends the process where it cannot; "
                f"give the container /dev/infiniband, or leave the device out: devices=^{name}"
            )
    return chosen


def require_gpu() -> None:
    """Raise `TransportUnavailable` where no AMD GPU is to be seen: the RDMA back-end ends the process without one."""
    paths = (
        os.environ.get("MORI_ROCM_SMI_PATH", ""),
        "librocm_smi64.so.1",
        "librocm_smi64.so",
        "/opt/rocm/lib/librocm_smi64.so.1",
    )
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            break
    else:
        raise TransportUnavailable(
            "librocm_smi64 cannot be loaded, and MORI-IO over RDMA needs it, also for host memory; install ROCm, or "
            "say where it is: MORI_ROCM_SMI_PATH"
        )
    count = ctypes.c_uint32(0)
    failed = library.rsmi_init(ctypes.c_uint64(0)) or library.rsmi_num_monitor_devices(ctypes.byref(count))
    library.rsmi_shut_down()
    if failed or not count.value:
        raise TransportUnavailable(
            "rocm_smi sees no AMD GPU, and MORI-IO over RDMA needs one, also for host memory; give the container "
            "/dev/kfd and /dev/dri"
        )


def require_pinnable(regions: Sequence[Region], copies: int = 1) -> None:
    """Raise `TransportUnavailable` for host memory that cannot be pinned ``copies`` times, naming the region.

    Empty regions pass: they are not registered. Device memory is the driver's to judge.
    """
    spans = _writable_spans()
    nbytes = 0
    for number, region in enumerate(regions):
        if not region.nbytes:
            continue
        if region.address <= 0:
            raise TransportUnavailable(f"region {number} has no address ({region.address}), so it cannot be registered")
        if region.kind != "host":
            continue
        end = region.address + region.nbytes
        if not any(start <= region.address and end <= stop for start, stop in spans):
            raise TransportUnavailable(
                f"region {number}, {region.nbytes} bytes at {region.address:#x}, is not all mapped and writable in "
                "this process, so it cannot be pinned"
            )
        nbytes += -(-end // mmap.PAGESIZE) * mmap.PAGESIZE - region.address // mmap.PAGESIZE * mmap.PAGESIZE
    _require_lockable(nbytes * copies)


def _writable_spans() -> list[tuple[int, int]]:
    """What this process may read and write, adjacent mappings joined."""
    spans: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions = line.split(maxsplit=2)[:2]
        if permissions.startswith("rw"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            joined = bool(spans) and spans[-1][1] == start
            spans.append((spans.pop()[0] if joined else start, end))
    return spans


def _require_lockable(nbytes: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    privileged = int(status.get("CapEff", "0"), 16) & _CAP_IPC_LOCK
    pinned = int(status.get("VmPin", "0 kB").split()[0]) << 10
    if limit != resource.RLIM_INFINITY and not privileged and pinned + nbytes > limit:
        raise TransportUnavailable(
            f"{nbytes} bytes of host memory are to be pinned, {pinned} are already, and the limit of locked memory is "
            f"{limit}; raise it (ulimit -l unlimited, or --ulimit memlock=-1 for a container)"
        )


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, which MORI-IO reads from C++, for a while. Empty values leave a variable as it is."""
    before = {name: os.environ.get(name) for name, value in values.items() if value}
    os.environ.update({name: values[name] for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def devices_present(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """The RDMA devices of this machine, by name."""
    return sorted(found.name for found in root.glob("*"))


def prepare_rdma(devices: str, workers: int) -> list[str]:
    """The RDMA devices that MORI-IO will use, after all checks that its RDMA back-end does not survive.

    ``devices`` selects some, ``workers`` is the number of threads that post. Raises `TransportUnavailable`, or
    `ConfigurationError` for threads with several devices.
    """
    found = rdma_devices(devices)
    if workers > 1 and len(found) > 1 and not os.environ.get("MORI_IO_RDMA_NIC_IDX"):
        raise ConfigurationError(
            f"num_worker_threads={workers} with {len(found)} devices ({', '.join(found)}): the library's threads use "
            "the keys of the first for all; name one (devices=...), or let no thread post (num_worker_threads=1)"
        )
    require_gpu()
    return found
