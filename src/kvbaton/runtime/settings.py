"""Everything about a `Manager` that a user may tune, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from kvbaton.errors import ConfigurationError
from kvbaton.protocol import Deadlines
from kvbaton.protocol.messages import AuxPath


@dataclass(frozen=True)
class Settings:
    """Limits and intervals of one `Manager`. Times are in seconds."""

    heartbeat_seconds: float = 1.0
    """How often an idle control connection is probed."""
    peer_timeout_seconds: float = 4.0
    """Silence on a control connection after which the peer counts as lost."""
    connect_seconds: float = 2.0
    """How long a control endpoint at which nothing listens is tried."""
    handshake_seconds: float = 20.0
    """Longest time from the first look-up of a source to its readiness."""
    registry_heartbeat_seconds: float = 2.0
    """How often a prefill rank tells the registry that it lives."""
    announce_seconds: float = 0.002
    """How long a room that a data-parallel replica opened waits for others, to be announced with them."""
    room_conflict_seconds: float = 1.0
    """How long a room that another replica has announced may be held by it; then the sender here fails."""
    fence_retry_seconds: float = 0.2
    """How often it is tried to prove that a lost peer can write no more."""
    close_seconds: float = 2.0
    """How long `Manager.close` waits for writes that are under way."""
    queued_frames: int = 16_384
    """Control frames that may wait for a peer that does not read; more, and the peer counts as lost."""
    striped: bool = True
    """Whether source ranks that hold the same data share the work, in stripes of tokens or layers, so that each network
    card carries its part; otherwise one of them sends. The decode side decides."""
    cast: bool = False
    """Whether dtypes, factors and scales may differ, and elements are cast on their way; the decode side decides."""
    aux: AuxPath = "control"
    """How aux data travel: "control" is inside messages, "fabric" by the transport, with the last chunk. Where it
    cannot reach the memory they go inside messages all the same, which is logged once. The decode side decides."""
    digest: bool = False
    """Whether rooms are checked by digests: success means then that every byte is the right one. Costs a pass over the
    bytes on each side. The decode side decides, and may decide otherwise for a room (`Manager.receiver`)."""
    insecure: bool = False
    """Whether addresses beyond loopback may be bound and advertised without a secret: see docs/security.md."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """How long a room may stay in each state."""

    def __post_init__(self) -> None:
        if self.aux not in get_args(AuxPath):
            raise ConfigurationError(f"settings: aux is {self.aux!r}; it must be one of {', '.join(get_args(AuxPath))}")
