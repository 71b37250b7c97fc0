"""The protocol as a specification: an exhaustive search over the real cores. See `docs/specification.md`."""

from kvbaton.check.search.bounds import WORLDS, Bounds
from kvbaton.check.search.explore import Result, Trace, replay, search, shortest
from kvbaton.check.search.world import World

__all__ = ["WORLDS", "Bounds", "Result", "Trace", "World", "replay", "search", "shortest"]
