"""Every decoder there is."""

from __future__ import annotations

from kvbaton.check.fuzz import http_decoders, protocol_decoders, transport_decoders
from kvbaton.check.fuzz.target import Decoder


def all_decoders() -> list[Decoder]:
    """Those of the control plane, of transports, and of what comes over HTTP and from files."""
    return [*protocol_decoders.decoders(), *transport_decoders.decoders(), *http_decoders.decoders()]
