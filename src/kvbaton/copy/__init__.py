"""Copies boxes between rows, and between rows and packed buffers.

It moves bytes as they are, or casts elements on their way where the boxes say so (`kvbaton.plan.boxes.Cast`).
The native kernel releases the GIL. Where it is missing, or with ``KVBATON_COPY=numpy``, numpy copies: the same results,
slowly, with one `SlowCopyWarning`. Nothing here checks addresses: `check_bounds` does, and must come first.
"""

from __future__ import annotations

from typing import Any

from kvbaton.copy.bounds import check_bounds, check_source
from kvbaton.copy.digests import digest, packed_side
from kvbaton.copy.fallback import SlowCopyWarning
from kvbaton.copy.halves import digest_half, digest_packed
from kvbaton.copy.implementation import NATIVE, kernel
from kvbaton.plan.boxes import Cast, Int64s, Transfer

__all__ = [
    "NATIVE",
    "SlowCopyWarning",
    "check_bounds",
    "check_source",
    "copy_boxes",
    "digest",
    "digest_half",
    "digest_packed",
    "extent",
    "gather",
    "packed_side",
    "receive_rows",
    "scatter",
    "send_rows",
]


def extent(numbers: Int64s) -> tuple[int, int]:
    """The smallest and the largest of ``numbers``: int64, contiguous, at least one.

    The native kernel keeps the GIL meanwhile, a microsecond for thousands of them: numpy lets go of it, and an engine's
    thread may then wait for milliseconds until it gets it back.
    """
    found: tuple[int, int] = kernel.extent(numbers)
    return found


def copy_boxes(
    transfer: Transfer,
    source_bases: Int64s,
    destination_bases: Int64s,
    threads: int = 1,
    *,
    begin: int = 0,
    end: int | None = None,
) -> None:
    """Copy the bytes ``[begin, end)`` of the transfer's packed stream (all of it by default) from rows to rows.

    ``source_bases`` and ``destination_bases`` hold the address of each region, as int64. The two must not overlap.
    Raises ``ValueError`` or ``TypeError`` for tables that are not as `kvbaton.plan.boxes` says.
    """
    boxes = transfer.boxes
    kernel.copy(
        boxes.shape,
        boxes.source,
        boxes.destination,
        transfer.source_units,
        transfer.destination_units,
        source_bases,
        destination_bases,
        begin,
        transfer.nbytes if end is None else end,
        threads,
        boxes.cast,
    )


def gather(
    shape: Int64s,
    side: Int64s,
    units: Int64s,
    bases: Int64s,
    out: Any,
    *,
    begin: int = 0,
    threads: int = 1,
    cast: Cast | None = None,
) -> None:
    """Fill the writable buffer ``out`` with the packed stream of (shape, side, units, cast), from its byte ``begin``.

    Raises ``ValueError`` if the stream ends before the buffer does.
    """
    kernel.gather(shape, side, units, bases, out, begin, threads, cast)


def scatter(
    shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, packed: Any, *, begin: int = 0, threads: int = 1
) -> None:
    """Spread the buffer ``packed``, which holds the packed stream from its byte ``begin``, over the rows.

    Raises ``ValueError`` if the stream ends before the buffer does.
    """
    kernel.scatter(shape, side, units, bases, packed, begin, threads)


def send_rows(
    descriptor: int, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, *, begin: int, end: int
) -> None:
    """Send the bytes ``[begin, end)`` of the packed stream of (shape, side, units) straight from the rows.

    ``descriptor`` is that of a connected, blocking socket. Returns when the socket has taken all of them. Raises
    ``OSError`` if the connection breaks.
    """
    kernel.send(descriptor, shape, side, units, bases, begin, end)


def receive_rows(
    descriptor: int, shape: Int64s, side: Int64s, units: Int64s, bases: Int64s, *, begin: int, end: int
) -> int:
    """Receive the bytes ``[begin, end)`` of the packed stream straight into the rows; the opposite of `send_rows`.

    Returns how many bytes came: fewer than asked for if the connection ended. Raises ``OSError`` if it breaks.
    """
    received: int = kernel.receive(descriptor, shape, side, units, bases, begin, end)
    return received
