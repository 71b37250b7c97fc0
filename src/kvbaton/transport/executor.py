"""Which way bytes go, by what a transport can do and what there is to move. A pure function."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvbaton.transport.base import Capabilities

ExecutorName = Literal["mapped", "direct", "packed", "none"]
ExecutorOption = Literal["auto", "packed", "direct"]
"""What a user may ask for."""


class Executor(NamedTuple):
    """A way, and why it is taken.

    ``mapped``: one pass from source rows to destination rows. ``direct``: each piece is written by itself.
    ``packed``: gathered into slabs, streamed, scattered. ``none``: nothing moves.
    """

    name: ExecutorName
    reason: str


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
