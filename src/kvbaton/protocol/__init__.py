"""The protocol without I/O: messages and their frames, the handshake, and the state machines of both sides."""

from __future__ import annotations

from kvbaton.protocol.account import PartAccount, RoomAccount
from kvbaton.protocol.actions import (
    Action,
    CheckDigests,
    Deliver,
    FencePeer,
    RoomChanged,
    RowsReleased,
    Send,
    SendDone,
    StartWrite,
)
from kvbaton.protocol.codec import MAX_FRAME_BYTES, bundle, decode, encode, rows_from_bytes, rows_to_bytes
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.decode_core import DecodeCore
from kvbaton.protocol.handshake import Accepted, answer_hello, check_welcome, make_hello, refusal, refuse
from kvbaton.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Done,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Refused,
    Rows,
    Welcome,
)
from kvbaton.protocol.prefill_core import PrefillCore
from kvbaton.protocol.shares import ComponentNeed, PeerShare
from kvbaton.protocol.status import Status

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Abort",
    "AbortAck",
    "Accepted",
    "Action",
    "CheckDigests",
    "ComponentNeed",
    "Deadlines",
    "DecodeCore",
    "Deliver",
    "Done",
    "FencePeer",
    "Hello",
    "Message",
    "Offer",
    "PartAccount",
    "PeerShare",
    "Ping",
    "Pong",
    "PrefillCore",
    "Refused",
    "RoomAccount",
    "RoomChanged",
    "Rows",
    "RowsReleased",
    "Send",
    "SendDone",
    "StartWrite",
    "Status",
    "Welcome",
    "answer_hello",
    "bundle",
    "check_welcome",
    "decode",
    "encode",
    "make_hello",
    "refusal",
    "refuse",
    "rows_from_bytes",
    "rows_to_bytes",
]
