"""What to change on a machine, a line for each. Pure: a report in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator

from kvbaton.devices.choose import VARIABLE
from kvbaton.doctor.report import Report

LEAST_MEMLOCK = 1 << 30
"""Pools of a cache have at least that many bytes, all of them pinned where a network card writes into them."""
LEAST_DEV_SHM = 1 << 30
ROCE_MTU = 4096
EXTRAS = {"nixl": "nixl", "mooncake": "mooncake", "mori": "mori"}
"""Libraries that carry bytes over a network card, and the extra of kvbaton that installs each."""


def advise(report: Report) -> tuple[str, ...]:
    """The advice for ``report``, the most urgent first."""
    return (*_software(report), *_network(report), *_limits(report), *_peer(report))


def _software(report: Report) -> Iterator[str]:
    if not report.native_copy:
        yield (
            "the native copy kernel is missing, and copies are slow: install a C compiler and Python's headers, then "
            "kvbaton again"
        )
    failed = [each for each in report.transports if each.state == "fails"]
    for reason in dict.fromkeys(each.reason for each in failed):
        names = ", ".join(each.name for each in failed if each.reason == reason)
        yield f"not usable here: {names}: {reason}"
    if not report.limits.anonymous_files:
        yield "this system has no memfd_create, so no shared memory between processes: use Linux, or tcp"


def _network(report: Report) -> Iterator[str]:
    nics = report.devices.nics
    if nics and not any(report.libraries.get(name) for name in EXTRAS):
        names = " or ".join(f"'kvbaton[{extra}]'" for extra in EXTRAS.values())
        yield f"{nics[0].name} can do RDMA, but no library for it is installed: pip install {names}"
    for nic in nics:
        for port in nic.ports:
            if not port.active:
                yield f"{nic.name} port {port.number} is {port.state}: check its cable and switch, or ignore it"
            elif port.link_layer == "Ethernet" and 0 < port.mtu < ROCE_MTU:
                yield (
                    f"{nic.name} port {port.number} sends packets of {port.mtu} bytes: set the MTU of {port.netdev} "
                    f"({port.netdev_mtu}) to 4200 or more, here and on the switch: ip link set {port.netdev} mtu 9000"
                )
            if port.active and port.link_layer == "Ethernet" and port.best_gid is None:
                yield f"{nic.name} port {port.number} has no GID: give its Ethernet device {port.netdev} an address"
    if nics and not any(choice.choice.devices for choice in report.choices):
        yield f"no network device can be used: see the ports above, or name devices in {VARIABLE}"


def _limits(report: Report) -> Iterator[str]:
    limits = report.limits
    if report.devices.nics and 0 <= limits.memlock < LEAST_MEMLOCK:
        yield (
            f"only {limits.memlock >> 10} KiB may be pinned, and network cards pin what they write into: raise it with "
            "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        )
    if limits.dev_shm is not None and limits.dev_shm < LEAST_DEV_SHM:
        yield (
            f"/dev/shm has {limits.dev_shm >> 20} MiB, and UCX and torch put shared memory there: make it larger "
            "(containers: --shm-size=8g)"
        )
    if limits.ptrace_scope is not None and limits.ptrace_scope > 0:
        yield (
            f"kernel.yama.ptrace_scope is {limits.ptrace_scope}: processes may not look into each other, which UCX "
            "needs for its fastest copies on a host: sysctl kernel.yama.ptrace_scope=0 (kvbaton's shm does not need it)"
        )
    access = report.peer_access.allowed
    apart = [(i, j) for i, row in enumerate(access) for j, allowed in enumerate(row) if not allowed]
    if apart:
        yield f"GPU {apart[0][0]} cannot address the memory of GPU {apart[0][1]}: copies between them go over the host"


def _peer(report: Report) -> Iterator[str]:
    peer = report.peer
    if peer is None:
        return
    if peer.error:
        yield f"the peer {peer.address} was not measured to the end: {peer.error}"
    for name, here in report.libraries.items():
        there = peer.libraries.get(name, "")
        if here and there and here != there and name in ("kvbaton", *EXTRAS):
            yield f"{name} is {here} here and {there} at the peer: install the same on both sides"
    for each in peer.transports:
        if each.state == "fails":
            yield f"{each.name} works on both sides, but not between them: {each.reason}"
