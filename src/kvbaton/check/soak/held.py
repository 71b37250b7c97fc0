"""What a manager keeps for rooms, tickets and peers, table by table."""

from __future__ import annotations

from kvbaton.runtime import Manager
from kvbaton.runtime.decode import DecodeSide
from kvbaton.runtime.prefill import PrefillSide

_STAYS = ("peers", "remembered")
"""Tables that live as long as connections do, or for some seconds."""


def held(manager: Manager) -> dict[str, int]:
    """The sizes of tables that are empty when no room is open; those that are not."""
    side = manager.side
    sizes = {"rooms_of_the_engine": len(side.rooms)}
    if isinstance(side, PrefillSide):
        sizes |= side.core.table_sizes()
        sizes["writes"] = len(side._writes)
        sizes["handshakes"] = len(side._destinations._handshakes)
        sizes["announced"] = len(side.announcer or ())
    elif isinstance(side, DecodeSide):
        sizes |= side.core.table_sizes()
        sources = side._sources
        sizes["lost"] = len(sources._lost)
        sizes["retired"] = len(sources._retired)
        sizes["sought"] = len(side._finder)
    return {name: size for name, size in sizes.items() if size and name not in _STAYS}
