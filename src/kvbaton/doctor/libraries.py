"""Versions of the libraries that transports and engines stand on, without importing them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable

DISTRIBUTIONS = {
    "kvbaton": ("kvbaton",),
    "numpy": ("numpy",),
    "msgspec": ("msgspec",),
    "pyzmq": ("pyzmq",),
    "torch": ("torch",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
    "mori": ("amd-mori", "mori"),
}
"""What each library may be called where it is installed from; the first one that is there counts."""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def library_versions(version: Callable[[str], str] = _version) -> dict[str, str]:
    """The version of each library; empty for one that is not installed."""
    versions = {"python": platform.python_version()}
    for library, names in DISTRIBUTIONS.items():
        versions[library] = next((found for name in names if (found := version(name))), "")
    return versions
