"""One room of the decode side: which parts are in place, and who may still write."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.errors import DeadlineExceeded
from kvbaton.protocol.account import PartAccount, RoomAccount
from kvbaton.protocol.deadlines import Deadlines
from kvbaton.protocol.failures import Failure
from kvbaton.protocol.messages import Done, Offer
from kvbaton.protocol.status import Status


@dataclass
class Link:
    """What the room has to do with one prefill rank."""

    peer: str
    part: int
    epoch: int
    expected: bool
    """Whether this part sends, and so ends with a Done."""
    name: str
    """What it is called in reasons."""
    done: bool = False
    drained: bool = False
    """Whether it is known to write no more although it is not done."""
    checking: Done | None = None
    """What ended it, while its digests are being checked."""

    @property
    def quiet(self) -> bool:
        """Whether nothing of this part can still be written."""
        return not self.expected or self.done or self.drained


@dataclass(eq=False)
class DecodeRoom:
    """The state of one room. It is its own key in tables: two lives of a room number are two objects."""

    number: int
    opened: float
    progress: float
    links: dict[str, Link] = field(default_factory=dict)
    status: Status = Status.WAITING
    failure: Failure | None = None
    offered: bool = False
    terms: Offer | None = None
    """What every peer was offered, but for its epoch."""
    remaining: int = 0
    """Expected parts that are not done, or not yet known to be right."""
    digest: bool = False
    """Whether what parts sent is checked by its digests."""
    closed: bool = False
    released: bool = False

    def unquiet(self) -> list[Link]:
        """The parts that may still write."""
        return [link for link in self.links.values() if not link.quiet] if self.offered else []

    @property
    def in_use(self) -> bool:
        """Whether its rows may still be written, or are read to be checked."""
        return bool(self.unquiet()) or any(link.checking for link in self.links.values())

    def account(self) -> RoomAccount:
        """What there is to tell of it."""
        parts = [
            PartAccount(
                link.peer,
                link.part,
                link.epoch,
                link.expected,
                link.done,
                not (link.checking or (self.offered and not link.quiet)),
                self.terms,
            )
            for link in sorted(self.links.values(), key=lambda link: link.part)
        ]
        return RoomAccount(tuple(parts), self.released)

    def deadline(self, limits: Deadlines) -> tuple[float, Failure]:
        """When the room fails if nothing happens, and as what."""
        if not self.offered:
            reason = f"the decode engine did not offer its rows within {limits.offer_wait:g} s"
            return self.opened + limits.offer_wait, Failure(DeadlineExceeded, reason)
        waiting = [link for link in self.links.values() if link.expected and (not link.done or link.checking)]
        names = [link.name for link in sorted(waiting, key=lambda link: link.part)]
        missing = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        reason = f"no progress for {limits.transfer:g} s; still missing: {missing}"
        return self.progress + limits.transfer, Failure(DeadlineExceeded, reason)
