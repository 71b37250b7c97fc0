"""kvbaton: hands a request's KV cache and hybrid-model state from the prefill engine to the decode engine.

The names here are all that an engine needs: describe memory (`RankLayout` and its parts), make a `Manager`, and use its
`Sender` and `Receiver`.
"""

from __future__ import annotations

from kvbaton import errors
from kvbaton.layout import Axis, Component, Coords, Ownership, RankLayout, Tensor
from kvbaton.memory import Region, SharedMemory
from kvbaton.plan import Pages
from kvbaton.protocol import Deadlines, Status
from kvbaton.registry import HttpRegistry, MemoryRegistry, RegistryClient
from kvbaton.runtime import Manager, Receiver, Sender, Settings

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Component",
    "Coords",
    "Deadlines",
    "HttpRegistry",
    "Manager",
    "MemoryRegistry",
    "Ownership",
    "Pages",
    "RankLayout",
    "Receiver",
    "Region",
    "RegistryClient",
    "Sender",
    "Settings",
    "SharedMemory",
    "Status",
    "Tensor",
    "__version__",
    "errors",
]
