"""What an engine holds of a room: `Sender` at prefill, `Receiver` at decode.

Every method returns at once and may be called from any thread. The state machines run on the manager's control thread;
a room object only carries requests there and shows what came back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvbaton.errors import TransferFailed
from kvbaton.protocol import Status
from kvbaton.runtime.later import Event
from kvbaton.runtime.rows import RowsLike

if TYPE_CHECKING:
    from kvbaton.runtime.decode import DecodeSide
    from kvbaton.runtime.prefill import PrefillSide


class Room:
    """The part that `Sender` and `Receiver` share: status, reason and figures of one room."""

    def __init__(self, room: int) -> None:
        self.room = room
        """The number that both sides know the request by."""
        self._status = Status.WAITING
        self._reason = ""
        self._failure: type[TransferFailed] = TransferFailed
        self._rows_released = False
        self.closed = False
        """Whether the engine closed the room; for the manager."""
        self._started = time.monotonic()
        self._ended: float | None = None
        self.bytes_by_component: dict[str, int] = {}
        """Bytes moved so far, by component, to all decode ranks of the room together.

        Final when `poll` returns ``Status.SUCCESS``. A new dict at each change: one that was read stays as it is.
        """

    def poll(self) -> Status:
        """The state of the room. ``SUCCESS`` and ``FAILED`` are final. Never raises."""
        return self._status

    @property
    def reason(self) -> str:
        """Why the room failed: part, rank and step; empty otherwise."""
        return self._reason

    @property
    def rows_released(self) -> bool:
        """Whether nothing can read or write the room's rows any more, so that they may be used again.

        After a failure this can come later than ``Status.FAILED``: a write may still be on its way.
        """
        return self._rows_released

    @property
    def seconds(self) -> float:
        """Seconds from the room's start to its end, or to now."""
        return (self._ended or time.monotonic()) - self._started

    def raise_for_failure(self) -> None:
        """Raise the `TransferFailed` that ended this room; do nothing if it did not fail."""
        if self._status is Status.FAILED:
            raise self._failure(self._reason)

    # Below: called by the manager only.

    def restart_clock(self) -> None:
        """Count `seconds` from now."""
        self._started = time.monotonic()

    def show(self, status: Status, reason: str = "", error: type[TransferFailed] = TransferFailed) -> None:
        """Make ``status`` visible. A final status stays as it is."""
        if self._status.terminal:
            return
        self._reason = reason
        self._failure = error
        if status.terminal:
            self._ended = time.monotonic()
        self._status = status

    def show_released(self) -> None:
        """Make it visible that the rows may be used again."""
        self._rows_released = True

    def count(self, component: str, nbytes: int) -> None:
        """Add to `bytes_by_component`."""
        before = self.bytes_by_component
        self.bytes_by_component = {**before, component: before.get(component, 0) + nbytes}


class Offered(NamedTuple):
    """What a decode rank says of a request when it offers its rows."""

    tokens: int
    """Its length."""
    prefix: int
    """How many of its first tokens the decode side has already."""


class Sender(Room):
    """The prefill side of one room. Made by `Manager.sender`."""

    def __init__(self, room: int, side: PrefillSide) -> None:
        super().__init__(room)
        self._side = side
        self.offered: Offered | None = None
        """What the first decode rank that offered said of the request; None before `poll` says TRANSFERRING."""

    def send(self, rows: Mapping[str, RowsLike], tokens: tuple[int, int], after: Event | None = None) -> None:
        """Hand over the rows of the chunk ``tokens`` = (first, last): they are complete and will not be written again.

        ``rows`` gives, for each paged or window component, the pages that hold these tokens (those of a page that two
        chunks share are given in both). Chunks may come in any order. Returns before anything moved; the rows must
        stay as they are until `rows_released`.

        ``after`` is for rows that a device is still writing: something with ``query() -> bool``, as a
        ``torch.cuda.Event`` that was recorded after the last kernel that writes them. Nothing is read before it is
        true, nor of chunks that were handed over later; the device is never waited for.

        Raises `RowsError` if the rows do not fit the registered layout or the tokens, and `RoomError` after `finish`.
        """
        self._side.submit(self, rows, tokens, after)

    def finish(
        self,
        rows: Mapping[str, RowsLike] | None = None,
        tokens: tuple[int, int] | None = None,
        aux: int | None = None,
        after: Event | None = None,
    ) -> None:
        """Hand over what is left: a last chunk, the slots of state components and the aux slot. Nothing can follow.

        ``tokens`` is the range of the last chunk, and its end the length of the request; None where `send` gave
        everything. ``after`` is as in `send`, for the slots and the aux slot too. Raises as `send` does.
        """
        self._side.finish(self, rows or {}, tokens, aux, after)

    def abort(self, reason: str = "aborted by the prefill engine") -> None:
        """Fail the room if it has not ended; the other side is told. Never raises."""
        self._side.abort(self, reason)

    def close(self) -> None:
        """Forget the room; one that has not ended is aborted. Safe to call twice.

        The number is free again when `rows_released`: at once for a room that ended well.
        """
        self._side.close_room(self)


class Receiver(Room):
    """The decode side of one room. Made by `Manager.receiver`."""

    def __init__(self, room: int, side: DecodeSide, source: str) -> None:
        super().__init__(room)
        self._side = side
        self.source = source
        """The registry where the prefill ranks of this room are found."""

    def offer(self, rows: Mapping[str, RowsLike], tokens: int, prefix: int = 0, aux: int | None = None) -> None:
        """Say where the request's data shall go. May come before or after the prefill side has it.

        ``tokens`` is the length of the request; the first ``prefix`` tokens are there already and are not written.
        ``rows`` gives the pages from ``prefix`` on (for a window component: from the first token of the window, or
        ``prefix`` if that is later) and the slots of state components; ``aux`` is the aux slot. The rows belong to
        the transfer until `rows_released`.

        Raises `RowsError` if the rows do not fit the registered layout, and `RoomError` at a second call.
        """
        self._side.offer(self, rows, tokens, prefix, aux)

    def abort(self, reason: str = "aborted by the decode engine") -> None:
        """Fail the room if it has not ended; the other side is told. The rows come back when `rows_released`."""
        self._side.abort(self, reason)

    def close(self) -> None:
        """Forget the room; one that has not ended is aborted. Safe to call twice.

        The number and the rows are free again when `rows_released`: at once for a room that ended well. Keep the object
        until then, and ask it.
        """
        self._side.close_room(self)
