import contextlib
import struct
import tracemalloc

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given
from message_examples import EXAMPLES

from kvbaton.errors import ProtocolError, RowsError, VersionMismatch
from kvbaton.layout import PAGED, SLOT, Axis, Component, RankLayout, Tensor, window
from kvbaton.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Done,
    Offer,
    Ping,
    Rows,
    bundle,
    decode,
    encode,
    rows_from_bytes,
    rows_to_bytes,
)
from kvbaton.protocol.codec import BUNDLE_BYTES, HEAD_BYTES, MAGIC, MAX_MESSAGES
from kvbaton.protocol.messages import MAX_ROWS
from kvbaton.protocol.packed import pack_layout, unpack_layout

NAMES = sorted(EXAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name):
    assert decode(encode(EXAMPLES[name])) == (EXAMPLES[name],)


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_cut_at_any_byte_is_one_error(name):
    frame = encode(EXAMPLES[name])
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:end])


@pytest.mark.parametrize("name", NAMES)
def test_bytes_after_the_message_are_refused(name):
    for tail in (b"\x00", b"\xc0", encode(EXAMPLES[name])):
        with pytest.raises(ProtocolError):
            decode(encode(EXAMPLES[name]) + tail)


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_byte_never_gives_anything_but_a_message_or_the_named_errors(name):
    frame = encode(EXAMPLES[name])
    for position in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(frame)
            changed[position] ^= flip
            with contextlib.suppress(ProtocolError, VersionMismatch):
                decode(bytes(changed))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(ProtocolError):
        decode(noise)
    with pytest.raises(ProtocolError):
        decode(MAGIC + PROTOCOL_VERSION.to_bytes(2, "little") + b"\xc1" + noise)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 0xFFFF])
def test_another_version_is_named_with_our_own(version):
    frame = MAGIC + version.to_bytes(2, "little") + b"a body that version would understand"
    with pytest.raises(VersionMismatch, match=rf"version {version} .*version {PROTOCOL_VERSION}\b"):
        decode(frame)


def head(body):
    return MAGIC + PROTOCOL_VERSION.to_bytes(2, "little") + body


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode({"type": "exec", "code": "print()"}),
        msgspec.msgpack.encode({"number": 1}),
        msgspec.msgpack.encode({"type": "ping", "number": -1}),
        msgspec.msgpack.encode({"type": "ping", "number": "1"}),
        msgspec.msgpack.encode({"type": "ping", "number": 1, "extra": 1}),
        msgspec.msgpack.encode({"type": "ping", "number": 2**63}),
        msgspec.msgpack.encode({"type": "abort", "room": 1, "epoch": 0}),
        msgspec.msgpack.encode({"type": "abort", "room": 1, "epoch": 1, "reason": "x" * 2001}),
        msgspec.msgpack.encode({"type": "done", "room": 1, "epoch": 1, "part": 1 << 14}),
        msgspec.msgpack.encode({"type": "done", "room": 1, "epoch": 1, "part": 0, "aux": bytes((1 << 20) + 1)}),
        msgspec.msgpack.encode({"type": "offer", "room": 1, "epoch": 1, "tokens": (1 << 40) + 1, "components": {}}),
        msgspec.msgpack.encode(
            {"type": "offer", "room": 1, "epoch": 1, "tokens": 1, "components": {str(n): [b"", 0] for n in range(257)}}
        ),
        b"\x81\xa4type\xa4pi\xff\xfe",
        b"\x91" * 100_000,
        b"\x81" * 100_000,
        b"",
    ],
)
def test_what_breaks_a_bound_is_refused(body):
    with pytest.raises(ProtocolError):
        decode(head(body))


def test_a_frame_that_is_too_long_is_refused_before_it_is_read():
    # An object that counts its own reads is no frame, but the length is looked at first.
    class Long(bytes):
        def __len__(self):
            return MAX_FRAME_BYTES + 1

        def __getitem__(self, item):
            raise AssertionError("the frame was read")

    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES)):
        decode(Long())


def test_a_message_that_is_too_long_is_not_sent():
    rows = Rows(bytes(8 * MAX_ROWS))
    with pytest.raises(ProtocolError, match="Offer"):
        encode(Offer(1, 1, 1, {"a": rows, "b": rows}))


@pytest.mark.parametrize("marker", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
@pytest.mark.parametrize("claimed", [1 << 20, 1 << 27, (1 << 32) - 1])
@pytest.mark.parametrize(
    "before", [b"", b"\x81", b"\x82\xa4type\xa5hello\xa7sources", b"\x82\xa4type\xa4done\xa5bytes"]
)
def test_a_huge_claim_takes_no_memory(marker, claimed, before):
    frame = head(before + marker + struct.pack(">I", claimed))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 27, (1 << 32) - 1])
def test_a_huge_claim_inside_a_layout_takes_no_memory(claimed):
    hello = {"type": "hello", "version": 1, "instance": "i", "model": "m"}
    body = b"\x85" + msgspec.msgpack.encode(hello)[1:] + b"\xa6layout\x91\xdd" + struct.pack(">I", claimed)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(head(body))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Several messages in one frame.


@given(st.lists(st.sampled_from(NAMES), max_size=20))
def test_bundles_hold_every_message_in_order(names):
    frames = bundle([encode(EXAMPLES[name]) for name in names])
    assert len(frames) == min(len(names), 1)
    assert [message for frame in frames for message in decode(frame)] == [EXAMPLES[name] for name in names]


def test_one_message_travels_as_it_is():
    assert bundle([encode(Ping(1))]) == [encode(Ping(1))]


def test_bundles_are_bounded_in_messages():
    frames = bundle([encode(Ping(number)) for number in range(2 * MAX_MESSAGES + 1)])
    assert [len(decode(frame)) for frame in frames] == [MAX_MESSAGES, MAX_MESSAGES, 1]
    ping = msgspec.msgpack.encode(Ping(1))
    with pytest.raises(ProtocolError):
        decode(head(msgspec.msgpack.encode([msgspec.Raw(ping)] * (MAX_MESSAGES + 1))))


def test_bundles_are_bounded_in_bytes():
    large = encode(Offer(1, 1, 1, {"a": Rows(bytes(BUNDLE_BYTES // 16 * 8))}))
    frames = bundle([large, large, encode(Ping(1)), large])
    assert [len(decode(frame)) for frame in frames] == [1, 2, 1]
    assert all(len(frame) <= BUNDLE_BYTES for frame in frames)


@pytest.mark.parametrize("body", [[], [[]], [{"type": "ping", "number": 1}, 7], [{"type": "ping", "number": -1}]])
def test_a_bundle_with_anything_wrong_in_it_is_refused_whole(body):
    with pytest.raises(ProtocolError):
        decode(head(msgspec.msgpack.encode(body)))


# Case D04: nested lengths by component.

NESTED = [[[4096, 4096, 512], [], [256]], [[]], [], [[2**40]], [[2**31], [2**32 + 1, 2**40 - 1]]]


def layout_of(lengths):
    """A layout whose tensors have these row lengths, component by component."""
    kinds = [SLOT, window(4), PAGED]
    return RankLayout(
        tuple(
            Component(
                f"component{number}",
                kinds[number % 3],
                tuple(
                    Tensor("state", layer, 0, 0, 1, length, "uint8", (Axis("byte", length, 1, ((0, length),)),))
                    for layer, length in enumerate(inner)
                ),
            )
            for number, inner in enumerate(lengths)
        )
    )


def lengths_of(layout):
    return [[tensor.row_stride for tensor in component.tensors] for component in layout.components]


def sent_and_unpacked(layout):
    hello = msgspec.structs.replace(EXAMPLES["hello"], layout=pack_layout(layout))
    return unpack_layout(decode(encode(hello))[0].layout, "own")


@pytest.mark.parametrize("lengths", NESTED)
def test_nested_lengths_keep_their_structure(lengths):
    packed = pack_layout(layout_of(lengths))
    hello = msgspec.structs.replace(EXAMPLES["hello"], layout=packed, sources=(packed,))
    (received,) = decode(encode(hello))
    assert lengths_of(unpack_layout(received.layout, "own")) == lengths
    assert lengths_of(unpack_layout(received.sources[0], "source")) == lengths
    assert received == hello


def test_no_components_and_one_empty_component_stay_different():
    none, empty = (sent_and_unpacked(layout_of(lengths)) for lengths in ([], [[]]))
    assert none != empty
    assert (len(none.components), len(empty.components)) == (0, 1)


@given(st.lists(st.lists(st.integers(1, 2**40), max_size=4), max_size=4))
def test_any_nested_lengths_keep_their_structure(lengths):
    assert lengths_of(sent_and_unpacked(layout_of(lengths))) == lengths


# Rows.


@given(st.lists(st.integers(0, 2**63 - 1), max_size=50))
def test_rows_round_trip(rows):
    packed = rows_to_bytes(rows)
    assert packed == b"".join(row.to_bytes(8, "little") for row in rows)
    unpacked = rows_from_bytes(packed)
    assert unpacked.dtype == np.int64
    assert unpacked.tolist() == rows


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64, np.uint64, ">i8"])
def test_rows_of_any_integer_type(dtype):
    assert rows_from_bytes(rows_to_bytes(np.array([1, 2, 300], dtype))).tolist() == [1, 2, 300]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([-1], "-1"),
        ([[1, 2]], "shape"),
        ([1.5], "float64"),
        (np.array([2**63], np.uint64), str(2**63)),
        (np.broadcast_to(np.int64(0), MAX_ROWS + 1), str(MAX_ROWS)),
    ],
)
def test_rows_that_are_none(rows, text):
    with pytest.raises(RowsError, match=text.replace("*", r"\*")):
        rows_to_bytes(rows)


@pytest.mark.parametrize(
    ("packed", "text"), [(bytes(9), "9 bytes"), (b"\xff" * 8, "-1"), (bytes(8 * MAX_ROWS + 8), str(MAX_ROWS))]
)
def test_packed_rows_that_are_none(packed, text):
    with pytest.raises(RowsError, match=text):
        rows_from_bytes(packed)


def test_head_is_six_bytes():
    assert HEAD_BYTES == 6
    assert encode(Ping(1))[:6] == b"KVB\x1e\x05\x00"


def test_decoding_makes_only_the_types_of_messages():
    for message in EXAMPLES.values():
        assert type(decode(encode(message))[0]) is type(message)
    assert isinstance(decode(encode(Done(1, 1, 0)))[0], Done)
    assert decode(encode(Abort(1, 1)))[0].offered is False
