"""All that a doctor finds, as plain values; `to_json` is what ``kvbaton doctor --json`` prints."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvbaton.devices import Choice, Devices
from kvbaton.doctor.findings import Attempt, PeerReport
from kvbaton.doctor.limits import Limits

FORMAT = 1
"""Raised when a field changes its meaning or goes."""


@dataclass(frozen=True)
class DeviceChoice:
    """Which network devices transports use for one kind of memory."""

    memory: str
    """ "host memory", or the GPU."""
    choice: Choice


@dataclass(frozen=True)
class PeerAccess:
    """Whether GPUs can address each other's memory; ``allowed[i][j]`` is about ``i`` and ``j`` of torch's order.

    Empty where there is nothing to ask; ``error`` says why it could not be asked.
    """

    allowed: tuple[tuple[bool, ...], ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Report:
    """What this machine has, what can be done with it, and what to change."""

    host: str
    kernel: str
    limits: Limits
    libraries: dict[str, str]
    native_copy: bool
    """Whether the native copy kernel is there."""
    devices: Devices
    choices: tuple[DeviceChoice, ...]
    peer_access: PeerAccess
    transports: tuple[Attempt, ...]
    peer: PeerReport | None
    advice: tuple[str, ...] = ()
    """What to change, a line for each."""

    @property
    def works(self) -> bool:
        """Whether anything can work: to the peer if one was named, else from here at all."""
        if self.peer is not None:
            return self.peer.works
        return any(each.state == "works" and each.cross_process for each in self.transports)


def to_json(report: Report) -> str:
    """The report as JSON, indented."""
    named = {"format": FORMAT, "works": report.works, **msgspec.to_builtins(report)}
    return msgspec.json.format(msgspec.json.encode(named), indent=2).decode()
