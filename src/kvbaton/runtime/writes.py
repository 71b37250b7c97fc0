"""Writes that are under way at a prefill rank: binds chunks to rows, starts them, and remembers what each one moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvbaton.plan import Pages, PairPlan, Transfer
from kvbaton.protocol import Offer, StartWrite, rows_from_bytes
from kvbaton.runtime.destinations import Destination


class Write(NamedTuple):
    """What one ticket stands for."""

    room: int = 0
    peer: str = ""
    moved: Mapping[str, int] = {}
    """Bytes by component."""
    pieces: Mapping[str, int] = {}
    """Contiguous runs by component, where somebody wants to know."""
    started: float = 0.0
    """When it began, where somebody wants to know; in seconds of the rank's clock."""


class Writes:
    """The tickets that were given to transports and have not come back."""

    def __init__(self) -> None:
        self._under_way: dict[int, Write] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(
        self,
        action: StartWrite,
        destination: Destination,
        chunk: Mapping[str, Pages],
        offer: Offer,
        aux: Mapping[str, list[Transfer]],
        observed: float | None = None,
    ) -> None:
        """Write the pieces and slots that ``action`` names, from the rows of ``chunk`` to those of the ``offer``.

        ``aux`` goes along: transfers that are bound already, by component. Where it raises, nothing was started.
        ``observed`` is the time, where somebody wants to know it and how many pieces there are.
        """
        bound = {**_bind(destination.plan, action, chunk, offer), **aux}
        moved = {name: sum(each.nbytes for each in transfers) for name, transfers in bound.items()}
        transfers = [each for transfers in bound.values() for each in transfers]
        write = Write(action.room, action.peer, moved)
        if observed is not None:
            pieces = {name: sum(each.pieces for each in transfers) for name, transfers in bound.items()}
            write = write._replace(pieces=pieces, started=observed)
        self._under_way[action.ticket] = write
        try:
            destination.transport.write(destination.remote, transfers, action.ticket)
        except BaseException:
            del self._under_way[action.ticket]
            raise

    def ended(self, ticket: int) -> Write:
        """What a ticket stood for that came back; it is forgotten."""
        return self._under_way.pop(ticket, Write())


def _bind(plan: PairPlan, action: StartWrite, chunk: Mapping[str, Pages], offer: Offer) -> dict[str, list[Transfer]]:
    bound: dict[str, list[Transfer]] = {}
    offered = offer.components
    for name, tokens in action.pieces.items():
        target = Pages(rows_from_bytes(offered[name].rows), offered[name].start)
        plan.check_rings(name, offer.tokens, offer.prefix, chunk[name], target)
        bound[name] = plan.bind(name, tokens, chunk[name], target)
    for name in action.slots:
        bound[name] = plan.bind_slots(name, chunk[name].rows, rows_from_bytes(offered[name].rows))
    return bound
