"""What a core asks its driver to do. Actions are carried out in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

import msgspec

from kvbaton.errors import TransferFailed
from kvbaton.protocol.messages import Done, Message
from kvbaton.protocol.status import Status


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to ``peer``."""

    peer: str
    message: Message


class StartWrite(msgspec.Struct, frozen=True):
    """Prefill: write to ``peer``; report the end of ``ticket`` to `PrefillCore.written`, exactly once.

    ``handle`` says which submission the source rows come from; `PrefillCore.offer` has the destination rows. ``pieces``
    are tokens ``[first, last)`` by component, ``slots`` the components that move as a whole. ``aux``: the aux row goes
    along, into the row that the Offer names. At least one piece, slot or aux row is named, and no piece is empty.
    """

    peer: str
    ticket: int
    room: int
    epoch: int
    handle: int
    pieces: Mapping[str, tuple[int, int]]
    slots: tuple[str, ...]
    aux: bool = False


class SendDone(msgspec.Struct, frozen=True):
    """Prefill: send ``done`` to ``peer``; first put the aux data into it if ``aux`` is set."""

    peer: str
    done: Done
    aux: bool


class CheckDigests(msgspec.Struct, frozen=True):
    """Decode: a part says that it is complete; see whether what is in place has the digests of ``done``.

    Report the result to `DecodeCore.checked`, exactly once. The rows stay as they are until then.
    """

    peer: str
    room: int
    epoch: int
    done: Done


class Deliver(msgspec.Struct, frozen=True):
    """Decode: a part is complete; take over what ``done`` carries. It comes before the room's success."""

    room: int
    part: int
    done: Done


class RoomChanged(msgspec.Struct, frozen=True):
    """The status of a room changed. ``reason`` says why it failed, and ``error`` is the class to raise for it."""

    room: int
    status: Status
    reason: str = ""
    error: type[TransferFailed] = TransferFailed


class RowsReleased(msgspec.Struct, frozen=True):
    """No write touches this room's rows any more. Comes once for a room, after its terminal status."""

    room: int


class FencePeer(msgspec.Struct, frozen=True):
    """Decode: ``peer`` did not confirm in time that it writes no more. Cut it off, then report it lost and fenced."""

    peer: str
    reason: str


Action = Union[Send, StartWrite, SendDone, CheckDigests, Deliver, RoomChanged, RowsReleased, FencePeer]  # noqa: UP007
