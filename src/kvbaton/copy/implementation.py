"""Which kernel copies: the native one, or numpy where it is missing or ``KVBATON_COPY=numpy`` asks for that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvbaton.copy import fallback

if TYPE_CHECKING:
    from types import ModuleType


def _choose() -> tuple[ModuleType, bool]:
    if os.environ.get("KVBATON_COPY", "") == "numpy":
        return fallback, False
    try:
        from kvbaton.copy import _kernel
    except ImportError:
        return fallback, False
    return _kernel, True


kernel, NATIVE = _choose()
"""Whether the native kernel copies."""
