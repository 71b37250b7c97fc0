"""One room of the prefill side: what was submitted, and what each decode rank asked for and got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvbaton.errors import DeadlineExceeded, RowsError
from kvbaton.protocol.account import PartAccount, RoomAccount
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.messages import Done, Offer
from kvbaton.protocol.shares import Needs, PeerShare
from kvbaton.protocol.status import Status


@dataclass(frozen=True)
class Submission:
    """A chunk: its rows are known to the runtime as ``handle``."""

    handle: int
    ranges: Mapping[str, tuple[int, int]]
    slots: frozenset[str] = frozenset()
    aux: bool = False
    """Whether the aux row is ready with it."""


@dataclass(frozen=True)
class Finish:
    """What the whole request holds."""

    tokens: int
    slots: frozenset[str]
    aux: bool
    covered: Mapping[str, tuple[tuple[int, int], ...]]
    """Tokens submitted by component, as few ranges as possible."""


@dataclass
class Destination:
    """A decode rank that offered its rows."""

    peer: str
    share: PeerShare
    offer: Offer
    needs: Needs
    slots: frozenset[str]
    outstanding: int = 0
    """Tickets that have not ended."""
    chunks: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes by component."""
    served: bool = False
    owes_ack: bool = False
    """Whether it must still hear that nothing is under way."""

    def pieces(self, submission: Submission) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
        """What ``submission`` holds of what this rank needs: tokens by component, and slot components."""
        pieces = {}
        for name, (first, last) in submission.ranges.items():
            need = self.needs.get(name)
            if need is not None and max(first, need[0]) < min(last, need[1]):
                pieces[name] = (max(first, need[0]), min(last, need[1]))
        return pieces, tuple(sorted(self.slots & submission.slots))

    def takes_aux(self, submission: Submission) -> bool:
        """Whether the aux row is written to this rank with ``submission``."""
        return submission.aux and self.share.writes_aux and self.offer.aux_row >= 0

    @property
    def aux_in_done(self) -> bool:
        """Whether the aux data go inside the Done to this rank."""
        return self.share.carries_aux and not self.share.writes_aux and self.offer.aux_row >= 0

    def missing(self, finish: Finish) -> str:
        """What this rank asked for and ``finish`` does not hold; empty if it is all there."""
        if self.offer.tokens != finish.tokens:
            return f"the sender finished {finish.tokens} tokens, the receiver offered rows for {self.offer.tokens}"
        for name, (first, last) in self.needs.items():
            at = first
            for start, end in finish.covered.get(name, ()):
                if start <= at < end:
                    at = end
            if at < last:
                return f"component {name!r}: tokens {first} to {last} are needed, those from {at} on were not sent"
        absent = sorted(self.slots - finish.slots)
        if absent:
            return f"component {absent[0]!r}: the receiver offered slots, the sender finished without any"
        if self.share.carries_aux and self.offer.aux_row >= 0 and not finish.aux:
            return "the receiver waits for aux data, the sender finished without any"
        return ""

    def done(self) -> Done:
        """The message that ends this part."""
        return Done(self.offer.room, self.offer.epoch, self.share.part, self.chunks, dict(self.moved))


@dataclass(eq=False)
class PrefillRoom:
    """The state of one room. It is its own key in tables: two lives of a room number are two objects."""

    number: int
    opened: float
    progress: float
    status: Status = Status.WAITING
    failure: Failure | None = None
    submissions: list[Submission] = field(default_factory=list)
    finish: Finish | None = None
    destinations: dict[str, Destination] = field(default_factory=dict)
    indices: set[int] = field(default_factory=set)
    expected: int | None = None
    """How many decode ranks must be served; known from the first Offer."""
    served: int = 0
    outstanding: int = 0
    withdrawn: set[int] = field(default_factory=set)
    """Decode ranks, by index, that gave up before they offered, or were refused: an Offer of theirs is for a later life
    of the room."""
    closed: bool = False
    released: bool = False

    @property
    def all_offered(self) -> bool:
        """Whether every decode rank has offered its rows."""
        return self.expected is not None and len(self.destinations) == self.expected

    def waits_for(self, share: PeerShare) -> bool:
        """Whether a decode rank of that share is one whose Offer is still to come."""
        return self.expected in (None, share.destinations) and share.destination_index not in self.indices

    def is_over_for(self, peer: str, rank: int, epoch: int) -> bool:
        """Whether an Offer of ``peer``, which is decode rank ``rank``, is for a later life of the room number."""
        if self.closed or rank in self.withdrawn or self.status is Status.SUCCESS:
            return True
        known = self.destinations.get(peer)
        return known is not None and epoch > known.offer.epoch

    def deadline(self, limits: Deadlines) -> tuple[float, Failure]:
        """When the room fails if nothing happens, and as what."""
        if not self.all_offered:
            of = "" if self.expected is None else f" (of {self.expected})"
            reason = f"after {limits.offer_wait:g} s {len(self.destinations)} decode ranks{of} have offered their rows"
            return self.opened + limits.offer_wait, Failure(DeadlineExceeded, reason)
        writes = f"{self.outstanding} writes have not ended"
        waiting = writes if self.outstanding else "the prefill engine has not finished it"
        reason = f"no progress for {limits.transfer:g} s: {waiting}"
        return self.progress + limits.transfer, Failure(DeadlineExceeded, reason)

    def account(self) -> RoomAccount:
        """What there is to tell of it."""
        parts = [
            PartAccount(
                each.peer,
                each.share.destination_index,
                each.offer.epoch,
                each.share.sends,
                each.served,
                each.outstanding == 0 and (each.served or self.status.terminal),
                each.offer,
                each.outstanding,
                dict(each.moved),
            )
            for each in sorted(self.destinations.values(), key=lambda each: each.share.destination_index)
        ]
        ends = [last for submission in self.submissions for _, last in submission.ranges.values()]
        return RoomAccount(tuple(parts), self.released, self.finish.tokens if self.finish else max(ends, default=0))

    @property
    def complete(self) -> bool:
        """Whether every decode rank was served."""
        return self.all_offered and self.served == self.expected


def check_ranges(ranges: Mapping[str, tuple[int, int]], tokens: int | None) -> None:
    """Raise `RowsError` for a token range that runs backwards or past ``tokens``."""
    for name, (first, last) in ranges.items():
        if not 0 <= first <= last:
            raise RowsError(f"sender: component {name!r}: tokens {first} to {last} are no range")
        if tokens is not None and last > tokens:
            raise RowsError(
                f"sender: component {name!r}: tokens {first} to {last} reach past the request's {tokens} tokens"
            )


def merge(submissions: Iterable[Submission]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The tokens of all ``submissions`` by component, as few ranges as possible."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for submission in submissions:
        for name, piece in submission.ranges.items():
            ranges.setdefault(name, []).append(piece)
    return {name: _merge_ranges(pieces) for name, pieces in ranges.items()}


def _merge_ranges(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pieces):
        if first == last:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
