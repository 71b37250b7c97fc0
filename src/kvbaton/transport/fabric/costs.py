"""What writing costs over each library: constants that were measured, for `choose_executor`."""

from __future__ import annotations

from kvbaton.transport.base import Costs

COSTS: dict[str, Costs] = {
    # Two processes of one host over TCP, where copying overlaps with the wire: at 270 KiB both ways cost the same.
    "mooncake": Costs(piece_seconds=20e-6, copy_bytes_per_second=27e9, packed_seconds=20e-6),
}
"""By the name of the fabric; others have the defaults of `Costs`."""


def costs_of(name: str) -> Costs:
    """What writing costs over the fabric of that name."""
    return COSTS.get(name, Costs())
