"""What the environment and SGLang's own options say of a rank: transports, devices, timeouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from kvbaton.errors import ConfigurationError
from kvbaton.protocol import Deadlines
from kvbaton.protocol.messages import AuxPath
from kvbaton.runtime.settings import Settings
from kvbaton.transport import AUTO, NAMES
from kvbaton.transport.fabric import FABRICS

TRANSPORT = "KVBATON_TRANSPORT"
"""Environment variable: ``auto``, or names of transports in order of preference, with commas."""
AUX = "KVBATON_AUX"
"""Environment variable: how aux data travel, as `Settings.aux`."""
UNLIMITED = 1e9
"""Seconds that never pass, for what SGLang itself limits, or does not limit at all."""


@dataclass(frozen=True)
class Timeouts:
    """SGLang's own limits, in seconds; the defaults are SGLang's."""

    bootstrap: float = 300.0
    """Prefill: from the sender to the offers."""
    waiting: float = 300.0
    """Decode: from the offer to the end."""
    release: float = 30.0
    """Decode: from a failure until pages are used again, even without proof that nothing writes into them."""
    lost: float = 10.0
    """Silence after which a peer counts as lost."""


def transports(environment: Mapping[str, str]) -> str | list[str]:
    """What `Manager` takes as ``transports``."""
    names = [name.strip() for name in environment.get(TRANSPORT, "").split(",") if name.strip()]
    return AUTO if names in ([], [AUTO]) else names


def device_options(wanted: str | Sequence[str], devices: str) -> dict[str, dict[str, str]]:
    """The ``transport_options`` for network ``devices`` ("mlx5_0,mlx5_1"; empty: those that are near)."""
    named = ",".join(part.strip() for part in devices.split(",") if part.strip())
    if not named:
        return {}
    chosen = NAMES if wanted == AUTO else wanted
    return {name: {"devices": named} for name in chosen if name in FABRICS}


def settings(role: str, timeouts: Timeouts, environment: Mapping[str, str]) -> Settings:
    """The settings of a rank. Raises `ConfigurationError` for an unknown value of `AUX`."""
    aux = environment.get(AUX, "") or "control"
    if aux not in get_args(AuxPath):
        raise ConfigurationError(f"{AUX} is {aux!r}; it must be one of {', '.join(get_args(AuxPath))}")
    deadlines = Deadlines(
        # The decode engine may wait for pages as long as it likes, the prefill engine keep a request in its queue as
        # long as the decode side is willing to wait.
        offer_wait=timeouts.bootstrap if role == "prefill" else UNLIMITED,
        transfer=UNLIMITED if role == "prefill" else timeouts.waiting,
        # Then the peer is cut off, which is proof too: both fit into the time for which SGLang holds the pages.
        drain=max(0.5, timeouts.release * 0.6),
        parked_seconds=timeouts.waiting,
    )
    return Settings(
        heartbeat_seconds=min(1.0, timeouts.lost / 4),
        peer_timeout_seconds=timeouts.lost,
        aux=cast(AuxPath, aux),
        deadlines=deadlines,
    )
