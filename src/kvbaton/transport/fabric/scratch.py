"""Memory of an adapter that tells peers apart: libraries name an address, and not the process that lives there."""

from __future__ import annotations

import itertools
import secrets

import numpy as np

from kvbaton.memory import Region

TOKEN_BYTES = 16
SLOTS = 256
"""Tokens that may be read at a time, and one less for the own."""


class Scratch:
    """A random token, which peers read to know that they have reached this process, and room for the tokens of peers.

    To be registered with the library beside the regions. Slots may be taken from any thread.
    """

    def __init__(self) -> None:
        self._slots = np.zeros((SLOTS, TOKEN_BYTES), np.uint8)
        self._slots[0] = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint8)
        self._taken = itertools.count()
        self.region = Region.of(self._slots)

    @property
    def token(self) -> bytes:
        """The own token, which lies at the begin of `region`."""
        return bytes(self._slots[0])

    @property
    def address(self) -> int:
        """Where the own token lies."""
        return self.region.address

    def take(self) -> int:
        """The number of a slot, zeroed, into which a peer's token may be read."""
        slot = 1 + next(self._taken) % (SLOTS - 1)
        self._slots[slot] = 0
        return slot

    def address_of(self, slot: int) -> int:
        """Where a slot lies."""
        return self.region.address + slot * TOKEN_BYTES

    def found(self, slot: int) -> bytes:
        """What was read into a slot."""
        return bytes(self._slots[slot])
