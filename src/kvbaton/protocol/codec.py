"""Frames: a magic, the version of the protocol, and one message in msgpack, or a list of several.

Decoding makes plain values, never code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Union

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.errors import ProtocolError, RowsError, VersionMismatch
from kvbaton.plan.boxes import Int64s
from kvbaton.protocol.messages import MAX_ROWS, PROTOCOL_VERSION, Message

MAGIC = b"KVB\x1e"
HEAD_BYTES = len(MAGIC) + 2
MAX_FRAME_BYTES = 16 << 20
"""The longest frame that is sent, or looked at: 16 MiB."""
MAX_MESSAGES = 256
"""Messages that one frame may have."""
BUNDLE_BYTES = 1 << 20
"""Messages are put together up to so many bytes; a longer one travels by itself."""

_MOST_OF_A_BUNDLE = HEAD_BYTES + 5 + BUNDLE_BYTES
_SMALL_MAPS = range(0x80, 0x90)
"""First bytes of a msgpack map of up to 15 keys, which each message is. Long frames that are anything else could hold
millions of small values, and take long to decode."""

_HEAD = MAGIC + PROTOCOL_VERSION.to_bytes(2, "little")
_encoder = msgspec.msgpack.Encoder()
_Bundle = Annotated[tuple[Message, ...], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
_decoder: msgspec.msgpack.Decoder[Message | tuple[Message, ...]] = msgspec.msgpack.Decoder(Union[Message, _Bundle])  # noqa: UP007 (msgspec reads it at run time)


def encode(message: Message) -> bytes:
    """The frame of ``message``. Raises `ProtocolError` if it is longer than ``MAX_FRAME_BYTES``."""
    frame = bytearray(_HEAD)
    _encoder.encode_into(message, frame, HEAD_BYTES)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(frame)} bytes is longer than a frame may be ({MAX_FRAME_BYTES} bytes)"
        )
    return bytes(frame)


def bundle(frames: Sequence[bytes]) -> list[bytes]:
    """The messages of ``frames``, each of one message, in as few frames, in their order."""
    bundles: list[bytes] = []
    first = 0
    while first < len(frames):
        last, nbytes = first + 1, len(frames[first])
        while last < min(len(frames), first + MAX_MESSAGES) and nbytes + len(frames[last]) <= BUNDLE_BYTES:
            nbytes += len(frames[last])
            last += 1
        if last == first + 1:
            bundles.append(frames[first])
        else:
            bodies = [msgspec.Raw(frame[HEAD_BYTES:]) for frame in frames[first:last]]
            bundles.append(_HEAD + _encoder.encode(bodies))
        first = last
    return bundles


def decode(frame: bytes) -> tuple[Message, ...]:
    """The messages in ``frame``, at least one, complete and within their bounds.

    Raises `VersionMismatch` for a frame of another version of the protocol, and `ProtocolError` for anything else that
    is not exactly such a frame: too long, cut short, followed by more bytes, of unknown kind, out of bounds.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is longer than a frame may be ({MAX_FRAME_BYTES} bytes)")
    if frame[: len(MAGIC)] != MAGIC or len(frame) < HEAD_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes does not begin like one of kvbaton's")
    version = int.from_bytes(frame[len(MAGIC) : HEAD_BYTES], "little")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the peer speaks version {version} of the protocol, this side version {PROTOCOL_VERSION}: "
            "run the same release of kvbaton on both sides"
        )
    if len(frame) > _MOST_OF_A_BUNDLE and frame[HEAD_BYTES] not in _SMALL_MAPS:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes is not a single message; several are at most {_MOST_OF_A_BUNDLE} bytes long"
        )
    try:
        decoded = _decoder.decode(memoryview(frame)[HEAD_BYTES:])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes cannot be decoded: {error}") from None
    return decoded if isinstance(decoded, tuple) else (decoded,)


def rows_to_bytes(rows: npt.ArrayLike) -> bytes:
    """Row indices (any integers, one dimension) as they travel: int64, little endian.

    Raises `RowsError` if they are not a list of whole numbers from 0, or more than ``MAX_ROWS``.
    """
    array = np.asarray(rows)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RowsError(f"rows must be one list of integers, not {array.dtype} of shape {array.shape}")
    if array.size > MAX_ROWS:
        raise RowsError(f"{array.size} rows are more than one component of an offer may have ({MAX_ROWS})")
    if array.min() < 0 or array.max() > np.iinfo(np.int64).max:
        raise RowsError(f"rows must be from 0 to 2**63 - 1; they run from {array.min()} to {array.max()}")
    return array.astype("<i8", copy=False).tobytes()


def rows_from_bytes(packed: bytes) -> Int64s:
    """The row indices in ``packed``, as a read-only int64 array.

    Raises `RowsError` for a length that is no multiple of 8, more than ``MAX_ROWS``, or an index below 0.
    """
    if len(packed) % 8:
        raise RowsError(f"{len(packed)} bytes are no whole number of rows of 8 bytes")
    if len(packed) > 8 * MAX_ROWS:
        raise RowsError(f"{len(packed) // 8} rows are more than one component of an offer may have ({MAX_ROWS})")
    rows = np.frombuffer(packed, dtype="<i8").astype(np.int64, copy=False)
    if has_negative(rows):
        raise RowsError(f"a row index is {rows.min()}; rows count from 0")
    return rows


def has_negative(rows: Int64s) -> bool:
    """Whether one of ``rows`` is below 0."""
    # As an unsigned number it is larger than any other: one pass instead of two where the largest matters too.
    return bool(rows.size) and int(rows.view(np.uint64).max()) >> 63 == 1
