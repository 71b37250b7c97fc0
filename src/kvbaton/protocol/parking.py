"""Offers that came before the prefill side opened their room: kept for a while, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.messages import Offer


class Parked(NamedTuple):
    """An Offer without a room."""

    peer: str
    offer: Offer
    expires: float


class Parking:
    """At most one Offer for each room and peer, the one of the newest epoch.

    A peer may fill as much as it leaves free: one alone gets half, two get a third each. So one that offers without end
    never takes the place of the others.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._limits = deadlines
        self._by_age: OrderedDict[tuple[int, str], Parked] = OrderedDict()
        self._peers_of_room: dict[int, set[str]] = {}
        self._rooms_of_peer: dict[str, set[int]] = {}
        self._bytes = 0
        self._bytes_of_peer: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def put(self, peer: str, offer: Offer, now: float) -> str:
        """Keep ``offer``; returns why it cannot be kept, or ""."""
        before = self._by_age.get((offer.room, peer))
        if before is not None:
            if before.offer.epoch > offer.epoch:
                return f"room {offer.room} was offered again since"
            self.remove(offer.room, peer)
        size = _size(offer)
        if len(self._by_age) >= self._limits.parked_offers or self._bytes + size > self._limits.parked_bytes:
            return (
                f"room {offer.room} is not open at the prefill side; it keeps {len(self._by_age)} early "
                f"offers (limit {self._limits.parked_offers}), {self._bytes} bytes (limit {self._limits.parked_bytes})"
            )
        own, own_bytes = len(self._rooms_of_peer.get(peer, ())), self._bytes_of_peer.get(peer, 0)
        free, free_bytes = self._limits.parked_offers - len(self._by_age), self._limits.parked_bytes - self._bytes
        if own and (own + 1 > free or own_bytes + size > free_bytes):
            return (
                f"room {offer.room} is not open at the prefill side; it keeps {own} early offers of this decode rank "
                f"already ({own_bytes} bytes), and has room for {free} more of all ranks ({free_bytes} bytes): a rank "
                "may fill as much as it leaves free"
            )
        self._by_age[offer.room, peer] = Parked(peer, offer, now + self._limits.parked_seconds)
        self._peers_of_room.setdefault(offer.room, set()).add(peer)
        self._rooms_of_peer.setdefault(peer, set()).add(offer.room)
        self._bytes += size
        self._bytes_of_peer[peer] = own_bytes + size
        return ""

    def get(self, room: int, peer: str) -> Offer | None:
        """The Offer of that room and peer, if one is kept."""
        parked = self._by_age.get((room, peer))
        return None if parked is None else parked.offer

    def remove(self, room: int, peer: str) -> None:
        """Forget one Offer, if it is there."""
        parked = self._by_age.pop((room, peer), None)
        if parked is None:
            return
        size = _size(parked.offer)
        self._bytes -= size
        self._bytes_of_peer[peer] -= size
        peers = self._peers_of_room[room]
        peers.discard(peer)
        if not peers:
            del self._peers_of_room[room]
        rooms = self._rooms_of_peer[peer]
        rooms.discard(room)
        if not rooms:
            del self._rooms_of_peer[peer], self._bytes_of_peer[peer]

    def take(self, room: int) -> list[Parked]:
        """Forget, and return, the Offers of ``room``."""
        parked = [self._by_age[room, peer] for peer in sorted(self._peers_of_room.get(room, ()))]
        for entry in parked:
            self.remove(room, entry.peer)
        return parked

    def drop_peer(self, peer: str) -> None:
        """Forget the Offers of ``peer``."""
        for room in list(self._rooms_of_peer.get(peer, ())):
            self.remove(room, peer)

    def next(self) -> float | None:
        """When the next Offer expires; None if there is none."""
        return next(iter(self._by_age.values())).expires if self._by_age else None

    def expired(self, now: float) -> list[Parked]:
        """Forget, and return, the Offers that have waited too long."""
        entries = []
        while self._by_age and (parked := next(iter(self._by_age.values()))).expires <= now:
            self.remove(parked.offer.room, parked.peer)
            entries.append(parked)
        return entries


def _size(offer: Offer) -> int:
    return sum(len(rows.rows) for rows in offer.components.values())
