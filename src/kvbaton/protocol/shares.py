"""What one decode rank needs from one prefill rank, as far as the protocol must know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvbaton.layout import Kind, Ownership
from kvbaton.protocol.messages import Offer

EVERY_TOKEN = Ownership()


@dataclass(frozen=True)
class ComponentNeed:
    """A component in which the pair moves something; ``owned`` are the tokens that the decode rank holds of it."""

    kind: Kind
    owned: Ownership = EVERY_TOKEN


@dataclass(frozen=True)
class PeerShare:
    """The share of one decode rank, as the handshake settled it."""

    components: Mapping[str, ComponentNeed]
    destination_index: int
    """Which decode rank of its replica it is ..."""
    destinations: int
    """... out of how many; a room ends when each of them was served."""
    part: int
    """This prefill rank's index in the grid."""
    sends: bool
    """Whether the decode rank waits for a Done of this part."""
    carries_aux: bool = False
    """Whether this part brings aux data ..."""
    writes_aux: bool = False
    """... and writes it with the last chunk, instead of putting it into Done."""


Needs = dict[str, tuple[int, int]]
"""Tokens ``[first, last)`` by component; never an empty range."""


def find_fault(offer: Offer) -> str:
    """Why ``offer`` cannot be served by anybody; empty if it holds together."""
    if offer.prefix > offer.tokens:
        return f"the offer's prefix of {offer.prefix} tokens is longer than its {offer.tokens} tokens"
    for name, rows in offer.components.items():
        if len(rows.rows) % 8:
            return f"component {name!r}: {len(rows.rows)} bytes of the offer are no whole number of rows of 8 bytes"
        indices = np.frombuffer(rows.rows, dtype="<i8")
        if indices.size and indices.min() < 0:
            return f"component {name!r}: the offer names row {indices.min()}; rows count from 0"
    return ""


def needed(offer: Offer, share: PeerShare) -> tuple[Needs, frozenset[str], str]:
    """What ``offer`` asks of this share: tokens by component, slot components, and why it cannot be served (or "")."""
    needs: Needs = {}
    slots = []
    for name, need in share.components.items():
        rows = offer.components.get(name)
        if not need.kind.has_tokens:
            if rows is None:
                return (
                    {},
                    frozenset(),
                    f"component {name!r}: the receiver offered no slots (an empty list means none are wanted)",
                )
            if rows.rows:
                slots.append(name)
        else:
            first, last = need.kind.needed(offer.tokens, offer.prefix)
            entries = need.owned.in_entries(need.kind.ratio)
            held = [entries.local_count(token // need.kind.ratio) for token in (first, last)]
            if held[0] == held[1]:
                continue
            if rows is None or not rows.rows:
                return (
                    {},
                    frozenset(),
                    f"component {name!r}: the receiver offered 0 rows for tokens {first} to {offer.tokens}",
                )
            needs[name] = (first, offer.tokens)
    return needs, frozenset(slots), ""
