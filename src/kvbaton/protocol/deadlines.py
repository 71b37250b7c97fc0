"""How long a room may stay in each state."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvbaton.errors import ConfigurationError


@dataclass(frozen=True)
class Deadlines:
    """Limits of both cores. Times are in seconds."""

    offer_wait: float = 300.0
    """From the opening of a room to the Offer (on the prefill side: of every decode rank)."""
    transfer: float = 300.0
    """Without any progress after that: a chunk, a write, a part."""
    drain: float = 30.0
    """From the failure of a receiver to the confirmation that nothing is written any more; then the peer is fenced."""
    parked_offers: int = 4096
    """Offers kept for rooms that the prefill side has not opened yet."""
    parked_bytes: int = 256 << 20
    """Bytes of row indices in those Offers."""
    parked_seconds: float = 120.0
    """How long such an Offer is kept before it is refused."""
    recent_seconds: float = 5.0
    """How long it is remembered that a room ended before all had offered, or was withdrawn before it was opened."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigurationError(f"deadlines: {field.name} is {value}; it must be above 0")
