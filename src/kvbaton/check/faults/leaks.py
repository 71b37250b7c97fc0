"""What a process must not keep when every room is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.check.faults.watch import WatchedDecode, WatchedPrefill

if TYPE_CHECKING:
    from kvbaton.check.faults.process import Process


def kept(process: Process) -> dict[str, int]:
    """What is kept for rooms, tickets and peers that are gone, by table, without what is empty."""
    side, connected = process.side, process.control.connected
    sizes = {f"core: {name}": size for name, size in side.core.table_sizes().items() if name != "peers"}
    if process.world.result.faults["corrupt"]:
        # The epoch of an Offer that was lost stays open as long as its connection.
        sizes.pop("core: epochs", None)
    sizes["rooms"] = len(side.rooms)
    sizes["leases"] = len(process.memory.leases)
    sizes["jobs"] = len(process.jobs)
    sizes["background"] = int(not process.background.idle)
    sizes["long requests"] = len(process.calls.running)
    sizes["tickets"] = sum(transport.outstanding for transport in process.transports.values())
    if isinstance(side, WatchedPrefill):
        destinations = side._destinations
        sizes["writes"] = len(side._writes)
        sizes["handshakes"] = len(destinations._handshakes)
        sizes["announced"] = len(side.announcer or ())
        sizes["peers that are gone"] = len(side.core._peers.keys() - connected.keys())
        sizes["destinations that are gone"] = len(destinations._joined.keys() - connected.keys())
        sizes["refused that are gone"] = len(destinations._refused.keys() - connected.keys())
    else:
        assert isinstance(side, WatchedDecode)
        sources = side._sources
        joined = [link for source in sources._current.values() for link in source.links.values() if link.joined]
        sizes["lost peers"] = len(sources._lost)
        sizes["retired sources"] = len(sources._retired)
        sizes["look-ups to try again"] = len(sources._returning)
        sizes["sought rooms"] = len(side._finder)
        sizes["rooms of sources"] = sum(len(source.rooms) for source in sources._current.values())
        sizes["withdrawn rooms"] = sum(len(source.withdrawn) for source in sources._current.values())
        sizes["peers that are gone"] = len(side.core._peers.keys() - connected.keys())
        sizes["connections of nobody"] = len(connected.keys() - sources._source_of_peer.keys())
        incoming = sum(transport.incoming for transport in process.transports.values())
        sizes["writers that are gone"] = max(0, incoming - len(joined))
    return {name: size for name, size in sizes.items() if size}
