"""What a manager tells of its rooms: `Observer` hears it, and the other names here are the nouns of that story.

This module imports nothing of the runtime, which uses it. Times are seconds of the clock of the rank's deadlines;
`ObservedRank.wall` turns them into time of day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbaton.errors import TransferAborted, TransferFailed
from kvbaton.layout.nouns import Coords
from kvbaton.protocol.status import Status

CONTROL = "control"
"""What carries aux data that travel inside messages; where else the name of a transport stands."""


@dataclass(frozen=True)
class Figures:
    """How things stand at one rank, at the moment when they were asked for."""

    rooms: Mapping[str, int] = field(default_factory=dict)
    """Rooms whose number is in use, by the value of their status."""
    quarantined_rooms: int = 0
    """Rooms that failed and whose rows are not released yet ..."""
    quarantined_rows: int = 0
    """... and these rows, of all components together."""
    peers: Mapping[str, int] = field(default_factory=dict)
    """Ranks of the other side that are joined, by transport."""
    unfenced_peers: int = 0
    """Decode: lost prefill ranks of which it is not proven yet that they write no more."""
    tickets: int = 0
    """Prefill: writes that are under way."""
    parked_offers: int = 0
    """Prefill: offers for rooms that are not open yet."""
    dropped_frames: Mapping[str, int] = field(default_factory=dict)
    """Frames that could not be decoded, since the start, by error."""
    ignored_messages: Mapping[str, int] = field(default_factory=dict)
    """Messages that did not fit the state of things, since the start, by kind."""
    control_faults: int = 0
    """Errors of our own that the control thread survived, since the start."""


@dataclass(frozen=True, eq=False)
class ObservedRank:
    """The rank whose manager tells."""

    side: str
    """Either "prefill" or "decode"."""
    instance: str
    coords: Coords
    components: frozenset[str]
    """The names of its components. A peer can send other names: do not make labels of those."""
    wall_offset: float
    """Seconds to add to a time for the time of day, as seconds since 1970."""
    figures: Callable[[], Figures]
    """How things stand now. May be called on any thread."""

    def wall(self, seconds: float) -> int:
        """The time of day in nanoseconds since 1970."""
        return round((seconds + self.wall_offset) * 1e9)


class PeerRecord(NamedTuple):
    """A rank of the other side."""

    instance: str
    coords: str
    transport: str
    """The name of the transport that carries the data of the pair."""


class PartRecord(NamedTuple):
    """What a room has to do with one rank of the other side."""

    peer: PeerRecord
    part: int
    """Its index: of the prefill rank in its grid on a decode rank, of the decode rank on a prefill rank."""
    epoch: int
    tokens: int
    """The length of the request, as the decode side offered it ..."""
    prefix: int
    """... and how many of its first tokens are not sent."""
    sends: bool
    """Whether data of this pair are to move."""
    done: bool
    """Whether everything was sent (prefill), or has come (decode)."""
    quiet: bool
    """Whether it is certain that nothing can be written any more, and nothing is read to be checked."""
    writes: int
    """Prefill: writes that are under way."""
    moved: Mapping[str, int]
    """Bytes by component so far ..."""
    expected: Mapping[str, int]
    """... and when it is done."""


@dataclass(eq=False, slots=True)
class ObservedRoom:
    """One room of one rank, from the engine's call to the release of its rows. Its fields fill up as it goes on."""

    rank: ObservedRank
    number: int
    opened: float
    """When the engine asked for it."""
    connected: float | None = None
    """Decode: when all its prefill ranks were found and greeted."""
    offered: float | None = None
    """When the decode side's rows were first known here."""
    transferring: float | None = None
    """When its status became TRANSFERRING."""
    ended: float | None = None
    released: float | None = None
    status: Status = Status.WAITING
    reason: str = ""
    error: type[TransferFailed] | None = None
    """Why it failed."""
    moved: Mapping[str, int] = field(default_factory=dict)
    """Bytes by component."""
    sent_tokens: int = 0
    """Prefill: up to which token the engine has handed chunks over."""
    rows: int = 0
    """Rows of all components together that belong to the transfer; set when it has failed ..."""
    held: bool = False
    """... as is whether they are held back, because something may still touch them."""
    parts: tuple[PartRecord, ...] = ()
    """Set when it goes over to TRANSFERRING, and anew at its end."""
    trace: str = ""
    """The W3C traceparent that travels with the offer; empty for none."""

    @property
    def side(self) -> str:
        """As `ObservedRank.side`."""
        return self.rank.side

    @property
    def aborted(self) -> bool:
        """Whether it failed because one of the two engines wished so."""
        return self.error is TransferAborted

    @property
    def error_name(self) -> str:
        """The name of its error; empty if it did not fail."""
        return "" if self.error is None else self.error.__name__

    def stages(self) -> dict[str, tuple[float, float | None]]:
        """When each stage that it has reached began and ended (None: it goes on).

        "waiting" for the other side, "transfer", and "release": its end until its rows were free.
        """
        stages = {"waiting": (self.opened, self.ended if self.transferring is None else self.transferring)}
        if self.transferring is not None:
            stages["transfer"] = (self.transferring, self.ended)
        if self.ended is not None:
            stages["release"] = (self.ended, self.released)
        return stages


class Chunk(NamedTuple):
    """A write of one chunk to one decode rank that ended; or what came with the Done of one prefill rank."""

    ticket: int
    """Its number on this rank; 0 for what a Done says."""
    part: int
    """As `PartRecord.part`."""
    transport: str
    started: float
    ended: float
    moved: Mapping[str, int]
    """Bytes by component."""
    pieces: Mapping[str, int]
    """Contiguous runs by component; empty on a decode rank, which does not know."""
    error: str = ""
    """Why it failed: then nothing is known of the bytes."""


class Observer:
    """Hears what happens at a manager: pass it as ``Manager(observers=[...])``. Override what you want to hear.

    One observer may serve many managers. Methods are called on the control thread of each, but for `room_opened` and
    `rank_closed`; they must return at once, and must not call the manager. What they raise is logged, and changes
    nothing. A method that is not overridden costs nothing.
    """

    def rank_started(self, rank: ObservedRank) -> None:
        """A manager begins, on the thread that made it. Comes before everything else of this rank."""

    def rank_closed(self, rank: ObservedRank) -> None:
        """A manager has ended, on the thread that closed it. Nothing of this rank follows."""

    def room_opened(self, room: ObservedRoom) -> None:
        """The engine made a sender or a receiver; on the engine's thread, in its context. Comes first of each room."""

    def room_connected(self, room: ObservedRoom) -> None:
        """Decode: the prefill ranks of this room are found and greeted."""

    def room_offered(self, room: ObservedRoom) -> None:
        """The rows of the decode side are known here. Decode: before they are told to anybody."""

    def room_transferring(self, room: ObservedRoom) -> None:
        """The status is TRANSFERRING."""

    def chunk_written(self, room: ObservedRoom, chunk: Chunk) -> None:
        """Prefill: a write has ended, or failed."""

    def part_delivered(self, room: ObservedRoom, chunk: Chunk) -> None:
        """Decode: everything that one prefill rank sends is in place."""

    def room_ended(self, room: ObservedRoom) -> None:
        """The room succeeded or failed. Once for each room."""

    def rows_released(self, room: ObservedRoom) -> None:
        """Nothing touches the rows any more. Once for each room, after its end."""

    def peer_joined(self, rank: ObservedRank, peer: PeerRecord) -> None:
        """A rank of the other side passed the handshake."""

    def peer_lost(self, rank: ObservedRank, peer: PeerRecord, reason: str) -> None:
        """A rank that was joined is gone, or was given up."""

    def handshake_refused(self, rank: ObservedRank, error: str, reason: str) -> None:
        """Two sides do not fit; ``error`` is the name of an error of `kvbaton.errors`."""

    def frame_dropped(self, rank: ObservedRank, kind: str, reason: str) -> None:
        """A frame could not be decoded; ``kind`` is the name of an error."""
