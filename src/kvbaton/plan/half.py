"""One side of a transfer: the pieces as they lie there, and what they are called on both sides."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvbaton.plan.boxes import Boxes, Int64s

Side = Literal["source", "destination"]


class Half(NamedTuple):
    """Units of one side, and a number for each that the other side gives it too.

    ``stream`` tells boxes of one component apart that move for different tokens.
    """

    boxes: Boxes
    side: Side
    stream: int
    units: Int64s
    numbers: Int64s

    @property
    def table(self) -> Int64s:
        """The table of ``side``: ``Boxes.source`` or ``Boxes.destination``."""
        return self.boxes.source if self.side == "source" else self.boxes.destination

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, as they are at the destination."""
        return self.boxes.bytes_per_unit * len(self.units)
