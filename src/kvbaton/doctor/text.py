"""A report as text, for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbaton.doctor.report import Report

STATES = {"works": "green", "missing": "yellow", "fails": "red"}


def show(report: Report, console: Console) -> None:
    """Print ``report``."""
    _machine(report, console)
    _network(report, console)
    _gpus(report, console)
    _transports(report, console)
    _peer(report, console)
    console.print()
    if report.advice:
        console.print("[bold]What to change[/bold]")
        for line in report.advice:
            console.print(Text(f"* {line}"))
    else:
        console.print("[bold]Nothing to change.[/bold]")


def _machine(report: Report, console: Console) -> None:
    limits = report.limits
    rows = {
        "host": f"{report.host}, {report.kernel}",
        "processors": f"{limits.processors} that this process may use",
        "memory": size(limits.memory)
        + (f", the container may use {size(limits.memory_limit)}" if limits.memory_limit else ""),
        "may be pinned": size(limits.memlock) if limits.memlock >= 0 else "without limit",
        "open files": str(limits.open_files) if limits.open_files >= 0 else "without limit",
        "/dev/shm": "not there"
        if limits.dev_shm is None
        else f"{size(limits.dev_shm)}, free {size(limits.dev_shm_free or 0)}",
        "System V segment": "not known" if limits.shmmax is None else size(limits.shmmax),
        "memfd_create": "yes" if limits.anonymous_files else "no",
        "ptrace rule (yama)": "none" if limits.ptrace_scope is None else str(limits.ptrace_scope),
        "huge pages": ", ".join(f"{each.free} of {each.total} x {size(each.size)} free" for each in limits.huge_pages)
        + (f"; shared memory: {limits.shared_huge_pages}" if limits.shared_huge_pages else ""),
        "native copy kernel": "yes" if report.native_copy else "no",
        "libraries": ", ".join(f"{name} {version}" for name, version in report.libraries.items() if version),
        "not installed": ", ".join(name for name, version in report.libraries.items() if not version) or "nothing",
    }
    table = _table("This machine", "", "")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)


def _network(report: Report, console: Console) -> None:
    if report.devices.nics:
        table = _table("Network cards", "device", "PCI", "NUMA", "port", "state", "link", "Gbit/s", "MTU", "GID")
        for nic in report.devices.nics:
            for port in nic.ports:
                gid = port.best_gid
                table.add_row(
                    nic.name,
                    nic.pci.address or "-",
                    str(nic.pci.numa_node) if nic.pci.numa_node >= 0 else "-",
                    str(port.number),
                    port.state,
                    port.link_layer,
                    f"{port.gbits:g}",
                    f"{port.mtu} ({port.netdev} {port.netdev_mtu})" if port.netdev else "-",
                    f"{gid.index}: {gid.address} {gid.kind}" if gid else "-",
                )
        console.print(table)
    table = _table("Which network cards are used", "for", "devices", "why")
    for each in report.choices:
        table.add_row(Text(each.memory), Text(", ".join(each.choice.devices) or "none"), Text(each.choice.why))
    console.print(table)


def _gpus(report: Report, console: Console) -> None:
    if not report.devices.gpus:
        return
    table = _table("GPUs", "vendor", "number", "name", "memory", "PCI", "NUMA")
    for gpu in report.devices.gpus:
        node = str(gpu.pci.numa_node) if gpu.pci.numa_node >= 0 else "-"
        memory = size(gpu.memory_bytes) if gpu.memory_bytes else "-"
        table.add_row(gpu.vendor, str(gpu.index), Text(gpu.name), memory, gpu.pci.address or "-", node)
    console.print(table)
    access = report.peer_access
    if access.error:
        console.print(Text(f"Peer access is not known: {access.error}"))
    elif access.allowed:
        pairs = sum(map(sum, access.allowed)) - len(access.allowed)
        console.print(Text(f"Peer access: {pairs} of {len(access.allowed) * (len(access.allowed) - 1)} pairs"))


def _transports(report: Report, console: Console) -> None:
    table = _table("Transports here", "transport", "state", "reaches", "memory", "reason")
    for each in report.transports:
        reach = "other hosts" if each.cross_host else "this host" if each.cross_process else "this process"
        works = each.state == "works"
        table.add_row(
            each.name,
            Text(each.state, STATES[each.state]),
            reach if works else "-",
            ", ".join(each.memory_kinds) or "-",
            Text(each.reason or "-"),
        )
    console.print(table)


def _peer(report: Report, console: Console) -> None:
    peer = report.peer
    if peer is None:
        return
    title = f"To {peer.address}" + (f" ({peer.host})" if peer.host else "")
    table = _table(title, "transport", "state", "4 KiB in place after", "128 MiB in 64 KiB rows", "reason")
    if peer.round_trip_seconds:
        table.add_row("a message", Text("works", "green"), _microseconds(peer.round_trip_seconds), "-", "-")
    for each in peer.transports:
        works = each.state == "works"
        table.add_row(
            each.name,
            Text(each.state, STATES[each.state]),
            _microseconds(each.round_trip_seconds) if works else "-",
            f"{each.bytes_per_second / 1e9:.2f} GB/s" if works else "-",
            Text(each.reason or "-"),
        )
    if table.row_count:
        console.print(table)
    if peer.error:
        console.print(Text(f"{peer.address}: {peer.error}", "red"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def size(nbytes: int) -> str:
    """Bytes as text: "64 MiB"."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"
