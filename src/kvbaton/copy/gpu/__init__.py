"""Copies between device memory: see `kvbaton.copy.gpu.copier`.

Needs torch and Triton (``pip install kvbaton[gpu]``), which are loaded when something of it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbaton.errors import ConfigurationError

if TYPE_CHECKING:
    from kvbaton.copy.gpu.copier import Copier

__all__ = ["Copier"]


def __getattr__(name: str) -> Any:
    if name != "Copier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvbaton.copy.gpu.copier import Copier
    except ImportError as error:
        raise ConfigurationError(
            f"copying on a GPU needs torch and Triton: pip install kvbaton[gpu] ({error})"
        ) from error
    return Copier
