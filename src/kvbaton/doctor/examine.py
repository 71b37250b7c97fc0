"""Puts a report together: looks at this machine, tries each transport, measures the way to a peer. Bounded in time."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kvbaton import copy
from kvbaton.devices import Choice, Devices
from kvbaton.doctor.advice import advise
from kvbaton.doctor.findings import Attempt, PeerReport
from kvbaton.doctor.libraries import library_versions
from kvbaton.doctor.limits import Limits
from kvbaton.doctor.report import DeviceChoice, PeerAccess, Report
from kvbaton.errors import ConfigurationError
from kvbaton.transport import NAMES

ATTEMPT_SECONDS = 60.0
GPU_SECONDS = 60.0
PEER_SECONDS = 90.0
AT_ONCE = 2
"""Transports that are tried at the same time."""


def examine(peer: str = "", root: Path = Path("/")) -> Report:
    """A report of this machine, and of the way to ``peer`` (``HOST:PORT``) if it is not empty.

    ``root`` is where the trees of the kernel lie. Takes at most a few minutes, whatever hangs.
    """
    devices = Devices.find(root)
    transports = try_transports(NAMES)
    usable = tuple(each.name for each in transports if each.state == "works" and each.cross_process)
    report = Report(
        host=platform.node(),
        kernel=f"{platform.system()} {platform.release()}",
        limits=Limits.find(root),
        libraries=library_versions(),
        native_copy=copy.NATIVE,
        devices=devices,
        choices=_choices(devices),
        peer_access=_peer_access() if devices.gpus else PeerAccess(),
        transports=transports,
        peer=measure_peer(peer, usable) if peer else None,
    )
    return dataclasses.replace(report, advice=advise(report))


def try_transports(names: Sequence[str], seconds: float = ATTEMPT_SECONDS) -> tuple[Attempt, ...]:
    """What each transport does, in processes of their own."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return tuple(pool.map(lambda name: _try(name, seconds), names))


def measure_peer(peer: str, names: Sequence[str], seconds: float = PEER_SECONDS) -> PeerReport:
    """What is found on the way to ``peer``, in a process of its own; what was found until then if that hangs."""
    lines, ended = _run(["kvbaton.doctor.measure", peer, ",".join(names)], seconds)
    report = PeerReport(peer)
    for line in lines:
        try:
            report = msgspec.json.decode(line, type=PeerReport)
        except msgspec.MsgspecError:
            # The last line may be cut.
            break
    if ended:
        at = f" while transport {report.trying} was tried" if report.trying else ""
        report.error = f"the measurement {ended}{at}"
    return report


def _try(name: str, seconds: float) -> Attempt:
    lines, ended = _run(["kvbaton.doctor.attempt", name], seconds)
    if ended:
        return Attempt(name, "fails", f"its process {ended}")
    # A vendor's library may write to the output too: ours is the last line.
    return msgspec.json.decode(lines[-1], type=Attempt)


def _choices(devices: Devices) -> tuple[DeviceChoice, ...]:
    try:
        named = devices.choose_for_gpus()
    except ConfigurationError as error:
        return (DeviceChoice("all memory", Choice((), str(error))),)
    return tuple(DeviceChoice(memory, choice) for memory, choice in named.items())


def _peer_access() -> PeerAccess:
    if importlib.util.find_spec("torch") is None:
        return PeerAccess(error="torch is not installed")
    lines, ended = _run(["kvbaton.doctor.gpu_access"], GPU_SECONDS)
    if ended:
        return PeerAccess(error=f"the process that asks torch {ended}")
    return PeerAccess(tuple(tuple(row) for row in json.loads(lines[-1])))


def _run(module: list[str], seconds: float) -> tuple[list[bytes], str]:
    """The lines that ``python -m`` printed, and how it ended, if not well: "took longer than ..."."""
    with subprocess.Popen(
        [sys.executable, "-m", *module], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0].splitlines(), f"took longer than {seconds:g} s and was ended"
    if process.returncode == 0 and output:
        return output.splitlines(), ""
    said = errors.decode(errors="replace").strip().splitlines()
    code = process.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return output.splitlines(), f"{how}: {said[-1]}" if said else how
