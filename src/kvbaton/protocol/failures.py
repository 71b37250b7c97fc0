"""Why a room failed: an error by name, so that it survives the way over the wire, and a sentence."""

from __future__ import annotations

from typing import NamedTuple

from kvbaton.errors import DeadlineExceeded, DigestMismatch, PeerLost, TransferAborted, TransferFailed
from kvbaton.protocol.messages import Abort, short_reason

_BY_NAME = {
    error.__name__: error for error in (TransferFailed, TransferAborted, DigestMismatch, PeerLost, DeadlineExceeded)
}


class Failure(NamedTuple):
    """The error to raise, and its text."""

    error: type[TransferFailed]
    reason: str

    @classmethod
    def named(cls, name: str, reason: str) -> Failure:
        """A failure that a peer told us of; a name that this side does not know counts as `TransferFailed`."""
        return cls(_BY_NAME.get(name, TransferFailed), reason)

    def message(self, room: int, epoch: int, *, offered: bool = False) -> Abort:
        """The Abort that tells a peer of it."""
        return Abort(room, epoch, short_reason(self.reason), self.error.__name__, offered)
