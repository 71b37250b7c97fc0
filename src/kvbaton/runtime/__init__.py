"""The runtime: `Manager`, its senders and receivers. The only part of kvbaton that owns threads and sockets."""

from __future__ import annotations

from kvbaton.runtime.manager import Manager
from kvbaton.runtime.reach import PeerRank
from kvbaton.runtime.rooms import Receiver, Room, Sender
from kvbaton.runtime.settings import Settings

__all__ = ["Manager", "PeerRank", "Receiver", "Room", "Sender", "Settings"]
