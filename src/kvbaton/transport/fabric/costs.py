"""What writing costs over each library: constants that were measured, for `choose_executor`."""

from __future__ import annotations

from kvbaton.transport.base import Costs

COSTS: dict[str, Costs] = {}
"""By the name of the fabric; others have the defaults of `Costs`."""


def costs_of(name: str) -> Costs:
    """What writing costs over the fabric of that name."""
    return COSTS.get(name, Costs())
