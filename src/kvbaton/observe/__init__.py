"""Observers of a manager: Prometheus metrics, log lines of failed rooms, OpenTelemetry spans, and timelines.

What needs a library of its own is imported when it is asked for: `Metrics` needs prometheus-client, `Spans`
opentelemetry-api.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvbaton.observe.base import (
    CONTROL,
    Chunk,
    Figures,
    ObservedRank,
    ObservedRoom,
    Observer,
    PartRecord,
    PeerRecord,
)
from kvbaton.observe.log import FailureLog
from kvbaton.observe.timeline import Timeline, TraceFolder

if TYPE_CHECKING:
    from kvbaton.observe.metrics import Metrics
    from kvbaton.observe.spans import Spans

__all__ = [
    "CONTROL",
    "Chunk",
    "FailureLog",
    "Figures",
    "Metrics",
    "ObservedRank",
    "ObservedRoom",
    "Observer",
    "PartRecord",
    "PeerRecord",
    "Spans",
    "Timeline",
    "TraceFolder",
]

_MODULES = {"Metrics": "metrics", "Spans": "spans"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
