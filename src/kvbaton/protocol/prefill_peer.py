"""What the prefill side keeps of a decode rank while it is connected."""

from __future__ import annotations

from kvbaton.protocol.epochs import MAX_GAPS, SeenEpochs
from kvbaton.protocol.prefill_room import PrefillRoom
from kvbaton.protocol.shares import PeerShare


class PrefillPeer:
    """A decode rank: its share, the epochs it has used, and the rooms in which it is a destination."""

    def __init__(self, share: PeerShare) -> None:
        self.share = share
        self.seen = SeenEpochs()
        self.rooms: set[PrefillRoom] = set()
        self._aborted_early: set[int] = set()

    @property
    def pending_epochs(self) -> int:
        """How many epochs are remembered because another message is still on its way."""
        return len(self.seen) + len(self._aborted_early)

    def abort_early(self, epoch: int) -> bool:
        """Note that ``epoch`` was aborted while its Offer is on its way. False if too many are noted already.

        The Offer must not start a write: its rows were given back when the Abort was confirmed.
        """
        if len(self._aborted_early) >= MAX_GAPS:
            return False
        self._aborted_early.add(epoch)
        return True

    def was_aborted_early(self, epoch: int) -> bool:
        """Whether the Offer of ``epoch``, which came now, was aborted before. The note is no longer needed then."""
        if epoch not in self._aborted_early:
            return False
        self._aborted_early.remove(epoch)
        return True
