"""Which way bytes go, by what a transport can do and what there is to move. A pure function."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from kvbaton.errors import ConfigurationError
from kvbaton.plan.boxes import Transfer
from kvbaton.transport.base import Capabilities

ExecutorName = Literal["mapped", "direct", "packed", "none"]
ExecutorOption = Literal["auto", "packed", "direct"]
"""What a user may ask for."""


EXECUTORS: tuple[ExecutorOption, ...] = get_args(ExecutorOption)

CAST_REASON = "elements are cast on their way, which only packing does"


class Executor(NamedTuple):
    """A way, and why it is taken.

    ``mapped``: one pass from source rows to destination rows. ``direct``: each piece is written by itself.
    ``packed``: gathered into slabs, streamed, scattered. ``none``: nothing moves.
    """

    name: ExecutorName
    reason: str


def executor_option(text: str) -> ExecutorOption:
    """The option that ``text`` names. Raises `ConfigurationError` for anything else."""
    for executor in EXECUTORS:
        if text == executor:
            return executor
    raise ConfigurationError(f"executor {text!r} is none of {', '.join(EXECUTORS)}")


def choose_executor(capabilities: Capabilities, pieces: int, nbytes: int, wanted: ExecutorOption = "auto") -> Executor:
    """How a transport with ``capabilities`` moves ``nbytes`` bytes in ``pieces`` runs, and why.

    A transport that addresses the peer's memory maps it. Else one that writes piece by piece does so if posting the
    pieces costs less than copying all bytes twice (gather and scatter). Else bytes are packed. ``wanted`` overrides
    the comparison of costs, and nothing else.
    """
    if not nbytes:
        return Executor("none", "nothing moves")
    if capabilities.mapped:
        return Executor("mapped", "the peer's memory is addressed directly: one fused copy, whatever the pieces")
    if not capabilities.one_sided:
        return Executor("packed", "a stream: gather into slabs, send, scatter")
    if wanted != "auto":
        return Executor(wanted, f"the option executor asks for it: {wanted}")
    costs = capabilities.costs
    posting = pieces * costs.piece_seconds
    copying = costs.packed_seconds + 2 * nbytes / costs.copy_bytes_per_second
    reason = (
        f"posting {pieces:,} pieces of {nbytes // pieces:,} bytes on average costs about {posting * 1e3:,.1f} ms, "
        f"gathering and scattering {nbytes:,} bytes {copying * 1e3:,.1f} ms"
    )
    return Executor("direct" if posting < copying else "packed", reason)


def choose_for(transfer: Transfer, capabilities: Capabilities, wanted: ExecutorOption = "auto") -> Executor:
    """How ``transfer`` goes, as `choose_executor`: with the runs that it has, and packed where elements are cast."""
    nbytes = transfer.nbytes
    if transfer.boxes.cast is not None and nbytes and not capabilities.mapped:
        return Executor("packed", CAST_REASON)
    return choose_executor(capabilities, count_runs(transfer) if nbytes else 0, nbytes, wanted)


def count_runs(transfer: Transfer) -> int:
    """About how many writes a transfer makes when rows that follow each other on both sides are one."""
    boxes, source_units, destination_units = transfer
    pieces, run = boxes.shape[:, 0] * boxes.shape[:, 1], boxes.shape[:, 2]
    follow = pieces == 1
    for side in (boxes.source, boxes.destination):
        unit_stride = np.where(side[:, 3] == 1, side[:, 2], side[:, 4])
        follow &= (unit_stride == run) & (side[:, 2] == side[:, 3] * run)
    breaks = (np.diff(source_units) != 1) | (np.diff(destination_units) != 1)
    followed = int(follow.sum())
    return followed * (1 + int(np.count_nonzero(breaks))) + int(pieces[~follow].sum()) * len(source_units)
