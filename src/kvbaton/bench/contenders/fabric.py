"""A transport of kvbaton over a vendor's library, without rooms: one write of the whole request.

Its arguments are the transport and its options (``executor=packed``). Run by kvbaton's own Python, which has the
library. The clock stops when the source's ticket has ended: the bytes are visible at the destination then.
"""

from __future__ import annotations

import base64
import sys
import time
from typing import Any

import numpy as np

from kvbaton import Region
from kvbaton.plan.boxes import Boxes, Transfer
from kvbaton.transport import create

from .pool import PoolSide
from .side import now, serve
from .work import TENSORS, Work


class FabricSide(PoolSide):
    """A transport with the pool registered."""

    def __init__(self, role: str, transport: str, options: dict[str, str]) -> None:
        super().__init__(role)
        self.transport = create(transport, instance=role, options=options)
        self.ticket = 0

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """As `Side.prepare`."""
        self.make_pool(work)
        self.transport.register([Region.of(self.pool)])
        return {"descriptor": base64.b64encode(self.transport.describe()).decode()}

    def meet(self, card: dict[str, Any]) -> None:
        """As `Side.meet`."""
        descriptor = base64.b64decode(card["descriptor"])
        if self.role != "source":
            self.transport.admit(descriptor)
            return
        self.peer = self.transport.connect(descriptor)
        self.transfer = transfer_of(self.work)

    def run(self) -> dict[str, float]:
        """As `Side.run`."""
        self.ticket += 1
        started = now()
        self.transport.write(self.peer, [self.transfer], self.ticket)
        returned = now()
        while not (completions := self.transport.poll()):
            time.sleep(0.0001)
        ended = now()
        if completions[0].error:
            raise RuntimeError(completions[0].error)
        return {"started": started, "returned": returned, "ended": ended}


def transfer_of(work: Work) -> Transfer:
    """A box for each tensor, applied to the rows of the request."""
    side = np.zeros((TENSORS, 7), np.int64)
    side[:, 1] = np.arange(TENSORS) * work.rows * work.piece
    side[:, 2] = side[:, 4] = work.piece
    side[:, 3] = 1
    shape = np.ones((TENSORS, 3), np.int64)
    shape[:, 2] = work.piece
    return Transfer(Boxes(shape, side, side.copy()), work.chosen("source"), work.chosen("destination"))


if __name__ == "__main__":
    _, transport, *options, role = sys.argv
    serve(FabricSide(role, transport, dict(option.split("=", 1) for option in options)))
