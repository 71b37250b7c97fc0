"""What a core knows of a room, for those who explain what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvbaton.protocol.messages import Offer


class PartAccount(NamedTuple):
    """What a room has to do with one peer."""

    peer: str
    part: int
    """The index of the prefill rank in its grid on the decode side, of the decode rank on the prefill side."""
    epoch: int
    sends: bool
    """Whether data of this pair are to move."""
    done: bool
    """Whether everything was sent, or has come."""
    quiet: bool
    """Whether nothing can be written, or read to be checked, any more."""
    offer: Offer | None = None
    """What was offered; on the decode side without its epoch, and None before."""
    writes: int = 0
    """Prefill: tickets that have not ended."""
    moved: Mapping[str, int] = {}
    """Prefill: bytes by component."""


class RoomAccount(NamedTuple):
    """A room, with its peers in the order of their parts."""

    parts: tuple[PartAccount, ...]
    released: bool
    sent_tokens: int = 0
    """Prefill: up to which token chunks were handed over."""
