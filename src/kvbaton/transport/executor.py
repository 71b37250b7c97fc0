"""Which way bytes go, by what a transport can do and what there is to move. A pure function."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvbaton.transport.base import Capabilities

ExecutorName = Literal["mapped", "direct", "packed", "none"]

POST_SECONDS = 13e-6
"""What a one-sided transport pays for each piece: from 256 B pieces at 0.02 GB/s, and 128 KiB pieces at 9.8 GB/s."""
COPY_BYTES_PER_SECOND = 7e9
"""What gathering or scattering copies: the native kernel on two cores, 2 KiB pieces."""


class Executor(NamedTuple):
    """A way, and why it is taken.

    ``mapped``: one pass from source rows to destination rows. ``direct``: each piece is written by itself.
    ``packed``: gathered into slabs, streamed, scattered. ``none``: nothing moves.
    """

    name: ExecutorName
    reason: str


def choose_executor(capabilities: Capabilities, pieces: int, nbytes: int) -> Executor:
    """How a transport with ``capabilities`` moves ``nbytes`` bytes in ``pieces`` runs, and why.

    A transport that addresses the peer's memory maps it. Else one that writes piece by piece does so if posting the
    pieces costs less than copying all bytes twice (gather and scatter). Else bytes are packed.
    """
    if not nbytes:
        return Executor("none", "nothing moves")
    if capabilities.mapped:
        return Executor("mapped", "the peer's memory is addressed directly: one fused copy, whatever the pieces")
    if not capabilities.one_sided:
        return Executor("packed", "a stream: gather into slabs, send, scatter")
    posting, copying = pieces * POST_SECONDS, 2 * nbytes / COPY_BYTES_PER_SECOND
    costs = (
        f"posting {pieces:,} pieces of {nbytes // pieces:,} bytes on average costs about {posting * 1e3:,.1f} ms, "
        f"gathering and scattering {nbytes:,} bytes {copying * 1e3:,.1f} ms"
    )
    return Executor("direct" if posting < copying else "packed", costs)
