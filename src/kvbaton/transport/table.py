"""The registered regions of a process as the tables that checks and kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbaton.copy import check_bounds, check_source
from kvbaton.copy.movers import Movers
from kvbaton.errors import RowsError, TransportError, TransportUnavailable
from kvbaton.memory import Region
from kvbaton.plan.boxes import Int64s, Transfer

MAX_DESCRIPTOR = 64 * 1024
"""Bytes that a descriptor may have."""


class RegionTable:
    """Addresses and lengths of registered regions, by region number."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions = tuple(regions)
        self.bases: Int64s = np.array([region.address for region in regions], dtype=np.int64)
        self.nbytes: Int64s = np.array([region.nbytes for region in regions], dtype=np.int64)
        self._movers: Movers | None = None

    @property
    def movers(self) -> Movers:
        """What packs and unpacks rows of these regions."""
        if self._movers is None:
            self._movers = Movers(self.regions)
        return self._movers

    @classmethod
    def of_kinds(cls, regions: Sequence[Region], kinds: frozenset[str], transport: str) -> RegionTable:
        """A table of ``regions``. Raises `TransportUnavailable` for memory of a kind that is not in ``kinds``."""
        for number, region in enumerate(regions):
            if region.kind not in kinds:
                raise TransportUnavailable(
                    f"region {number} is {region.kind} memory, but the {transport} transport reaches only "
                    f"{', '.join(sorted(kinds))} memory; choose another transport"
                )
        return cls(regions)


def check_write(
    transfers: Sequence[Transfer], local: Int64s, remote: Int64s, peer: str, *, keep: bool = True
) -> list[Transfer]:
    """The transfers that move something, checked against the lengths of the regions of both sides.

    To ``keep`` them for later, their units are copies, so that the caller may use its arrays again. Raises `RowsError`
    for what is outside the local regions, `TransportError` for what is outside the peer's.
    """
    checked = []
    for boxes, source_units, destination_units in transfers:
        if len(source_units) != len(destination_units):
            raise RowsError(f"{len(source_units)} source units but {len(destination_units)} destination units")
        check_source(boxes, source_units, local)
        try:
            nbytes = check_bounds("destination", boxes.shape, boxes.destination, destination_units, remote)
        except RowsError as error:
            raise TransportError(f"the write is outside the regions of peer {peer}: {error}") from error
        if nbytes:
            units = source_units, destination_units
            ready = (each.copy() if keep or not each.flags.carray else each for each in units)
            checked.append(Transfer(boxes.pick(), *ready))
    return checked
