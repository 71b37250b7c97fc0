"""The messages of the control plane; `kvbaton.protocol.codec` packs them into frames and unpacks them.

Every number, text and collection has a bound that the decoder enforces, so a message that was decoded is small enough
and of the right types. Whether it makes sense in the present state is the business of the cores.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 5
"""Both sides must speak the same version; it is in the head of each frame."""

MAX_REASON_CHARACTERS = 2000
MAX_TRACE_CHARACTERS = 55
MAX_ROWS = 1 << 20
"""Rows of one component in one Offer: a million."""
MAX_AUX_BYTES = 1 << 20
MAX_DESCRIPTOR_BYTES = 1 << 16
MAX_TOKENS = 1 << 40
MAX_RANKS = 1 << 14
MAX_LOST = 64
"""Earlier connections that a Hello asks about."""

Text = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]
RoomNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Epoch = Annotated[int, Meta(ge=1, le=1 << 62)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Descriptor = Annotated[bytes, Meta(max_length=MAX_DESCRIPTOR_BYTES)]
PackedRows = Annotated[bytes, Meta(max_length=8 * MAX_ROWS)]
AuxBytes = Annotated[bytes, Meta(max_length=MAX_AUX_BYTES)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""A digest of `kvbaton.copy.digests`, little endian."""
TraceParent = Annotated[
    str, Meta(max_length=MAX_TRACE_CHARACTERS, pattern=r"\A(?:00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")
]
"""The trace context of a room as W3C's traceparent, or nothing."""
AuxPath = Literal["control", "fabric"]
"""How aux data travel: inside Done, or written by the transport with the last chunk."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Decode rank to prefill rank, first on a connection: who asks, and what it believes of the other side.

    ``striped``: sources that hold the same data share the work by token stripes. ``cast``: dtypes, factors and scales
    may differ, and elements are cast on their way. The decode rank decides both. ``aux`` is how it would like aux data
    to travel; the Welcome says what comes of it.

    ``connection`` is the decode rank's number of this connection. ``lost`` are the numbers of its earlier connections
    to this prefill rank that ended while writes may have been under way: the Welcome says which of them are over.

    Layouts are packed: a stranger may send large ones, and whoever takes in frames has no time to unpack them. See
    `kvbaton.protocol.packed`.
    """

    version: Annotated[int, Meta(ge=0, le=0xFFFF)]
    instance: Name
    model: Text
    layout: msgspec.Raw
    destination_index: Rank
    destinations: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    sources: Annotated[tuple[msgspec.Raw, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    source_index: Rank
    transports: Annotated[dict[Name, Descriptor], Meta(max_length=16)]
    striped: bool = False
    cast: bool = False
    aux: AuxPath = "control"
    connection: Count = 0
    lost: Annotated[tuple[Count, ...], Meta(max_length=MAX_LOST)] = ()


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Prefill rank to decode rank: the handshake holds.

    ``parts`` are the source indices that will send to this destination; each of them ends its work with a Done.
    ``aux`` is how this rank's aux data travel: "fabric" only where the Hello asked for it and the transport reaches the
    memory. ``reason`` says why this transport and this way, for people. ``over`` are those of the Hello's lost
    connections that this rank has let go of: none of its threads copies for them any more, or ever will.
    """

    instance: Name
    transport: Name
    descriptor: Descriptor
    parts: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    aux: AuxPath = "control"
    reason: Reason = ""
    over: Annotated[tuple[Count, ...], Meta(max_length=MAX_LOST)] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Prefill rank to decode rank: the handshake does not hold. ``error`` names an error of `kvbaton.errors`."""

    instance: Name
    reason: Reason
    error: Name = "HandshakeError"


class Rows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Row indices of one component: ``rows`` holds them as int64, little endian.

    ``start`` is the token position, on this rank's own token axis, of the first token of the first row (a multiple of
    the page size; 0 for slots).
    """

    rows: PackedRows
    start: Tokens = 0


class Offer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """Decode rank to each prefill rank of the grid: where the data of a room may be written.

    The sender fills tokens ``[prefix, tokens)``. ``aux_row`` is -1 if no aux data are wanted. ``digest``: the Done
    shall have digests of what was sent. ``trace`` is the span of the room at the decode rank, for those who observe; it
    changes nothing.
    """

    room: RoomNumber
    epoch: Epoch
    tokens: Tokens
    components: Annotated[dict[Name, Rows], Meta(max_length=256)]
    prefix: Tokens = 0
    aux_row: Annotated[int, Meta(ge=-1, le=1 << 40)] = -1
    digest: bool = False
    trace: TraceParent = ""


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """Prefill rank to decode rank: every byte of this part is visible at the receiver.

    ``bytes`` counts the bytes moved by component, ``chunks`` the writes they took. ``aux`` is the aux data itself,
    unless the transport wrote it. ``digests``, if the Offer asked for them, are of all bytes that this part sent, by
    component; one that is missing stands for nothing sent.
    """

    room: RoomNumber
    epoch: Epoch
    part: Rank
    chunks: Count = 0
    bytes: Annotated[dict[Name, Count], Meta(max_length=256)] = {}
    aux: AuxBytes = b""
    digests: Annotated[dict[Name, Digest], Meta(max_length=256)] = {}


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """Either way: the room has failed; nothing more is started for it. ``error`` is the name of an error.

    ``offered`` (decode rank to prefill rank) says that an Offer of this epoch was sent. It may still be on its way: the
    sender waits for it and drops it, so that a late Offer never starts a write into rows that were given back.
    """

    room: RoomNumber
    epoch: Epoch
    reason: Reason = ""
    error: Name = "TransferFailed"
    offered: bool = False


class AbortAck(msgspec.Struct, frozen=True, tag="abort_ack", forbid_unknown_fields=True):
    """Prefill rank to decode rank: ``drained`` promises that no write to this epoch's rows is, or will be, under way.

    Without it, it only says that the Abort was heard.
    """

    room: RoomNumber
    epoch: Epoch
    part: Rank
    drained: bool


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Either way: asks whether the other side is there."""

    number: Count = 0


class Pong(msgspec.Struct, frozen=True, tag="pong", forbid_unknown_fields=True):
    """The answer to the Ping of that number."""

    number: Count = 0


Message = Union[Hello, Welcome, Refused, Offer, Done, Abort, AbortAck, Ping, Pong]  # noqa: UP007 (msgspec reads it at run time)


def short_reason(reason: str) -> str:
    """``reason``, cut to what a message may carry."""
    return reason if len(reason) <= MAX_REASON_CHARACTERS else reason[: MAX_REASON_CHARACTERS - 3] + "..."
