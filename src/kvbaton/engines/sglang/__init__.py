"""kvbaton as a transfer back-end of SGLang: ``--disaggregation-transfer-backend kvbaton`` (docs/sglang.md).

The four classes that SGLang makes are names of this package; they import SGLang when they are asked for. What does not
say so imports nothing of it.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "KvbatonKVManager": "manager",
    "KvbatonKVSender": "sender",
    "KvbatonKVReceiver": "receiver",
    "KvbatonKVBootstrapServer": "bootstrap",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
