"""How large the world of a search is, and the worlds that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from kvbaton.errors import ConfigurationError

MANY = 9


@dataclass(frozen=True)
class Bounds:
    """What a world has, and how often each thing may happen in one run of it. All of it is explored."""

    prefills: int = 2
    """Prefill ranks: the parts of each room."""
    decodes: int = 1
    rooms: tuple[int, ...] = (7,)
    """The room number of each life, in the order of the lives. Lives of one number follow each other: the next begins,
    on any side, when every rank has closed the one before."""
    pages: int = 1
    """Page sets of each decode rank. A life holds one from its Offer until its rows are released."""
    chunks: int = 1
    """Writes of each part."""
    idle_part: bool = False
    """Whether the last part has nothing to send."""
    digests: bool = False
    """Whether the receiver checks what came by its digests; the check takes a while, and may find that it is wrong."""
    prompt: bool = False
    """Whether engines do at once what they can: submit what a room that they open needs, offer pages as soon as some
    are free, and close a room that has ended. Otherwise they do so at any moment."""
    aborts: int = MANY
    """How often engines abort a room in one run, at any moment; `MANY` is without a limit."""
    deadlines: Literal["any", "idle", "never"] = "any"
    """When deadlines pass (of rooms without progress, of parked Offers, of what is remembered of rooms): at any moment;
    or when nothing but faults can happen before, because they are far longer than anything takes; or never."""
    cancels: bool = False
    """Whether a prefill engine may give a room up instead of opening it."""
    faults: int = 0
    """How many of ``deaths``, ``cuts`` and ``write_errors`` happen in one run, taken together."""
    deaths: bool = True
    """Whether a process may die, and be replaced by a new one."""
    cuts: bool = True
    """Whether a connection may end while both processes live."""
    write_errors: bool = True
    repeats: int = 0
    """Frames that arrive twice."""
    fences: int = 0
    """Drain deadlines that pass: the decode side cuts a prefill rank off."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("prefills", "decodes", "pages", "chunks") else 0
            if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= MANY:
                raise ConfigurationError(f"search: {field.name} is {value}; it must be from {least} to {MANY}")
        if not self.rooms:
            raise ConfigurationError("search: rooms is empty; name the room number of each life")

    @property
    def can_fail(self) -> bool:
        """Whether anything can go wrong in it; else every room must succeed."""
        return bool(
            self.aborts or self.faults or self.fences or self.cancels or self.digests or self.deadlines != "never"
        )

    @property
    def tokens(self) -> int:
        """Tokens of every request: one for each chunk."""
        return self.chunks

    def before(self, life: int) -> int | None:
        """The life that had this life's room number before it."""
        earlier = [each for each in range(life) if self.rooms[each] == self.rooms[life]]
        return earlier[-1] if earlier else None

    def sends(self, part: int) -> bool:
        """Whether a part has something to send."""
        return not (self.idle_part and part == self.prefills - 1)


WORLDS: Mapping[str, Bounds] = MappingProxyType(
    {
        "calm": Bounds(rooms=(7, 7), chunks=2, aborts=0, deadlines="never", repeats=1),
        "idle": Bounds(idle_part=True),
        "room": Bounds(),
        "ranks": Bounds(prefills=1, decodes=2),
        "death": Bounds(prompt=True, faults=1, cuts=False, write_errors=False),
        "lives": Bounds(prefills=1, rooms=(7, 7), digests=True, prompt=True, faults=1, fences=1),
        "rooms": Bounds(
            rooms=(7, 8), prompt=True, aborts=0, deadlines="idle", faults=1, cuts=False, write_errors=False
        ),
        "room-faults": Bounds(faults=1),
        "room-frames": Bounds(prompt=True, chunks=2, repeats=1, fences=1, cancels=True),
        "room-digests": Bounds(digests=True, prompt=True, faults=1, cuts=False, write_errors=False),
        "ranks-faults": Bounds(prefills=1, decodes=2, prompt=True, faults=1, cancels=True),
        "lives-faults": Bounds(prefills=1, rooms=(7, 7), chunks=2, cancels=True, faults=1, repeats=1, fences=1),
        "lives-parts": Bounds(
            rooms=(7, 7), prompt=True, aborts=1, deadlines="idle", faults=1, cuts=False, write_errors=False
        ),
        "rooms-pages": Bounds(prefills=1, rooms=(7, 8), pages=2, prompt=True, faults=1, fences=1),
        "rooms-abort": Bounds(
            rooms=(7, 8), prompt=True, aborts=1, deadlines="idle", faults=1, cuts=False, write_errors=False
        ),
    }
)
"""The worlds that have a name, by it: those of seconds, then those of minutes."""

SHORT = ("calm", "idle", "room", "ranks", "death", "lives", "rooms")
"""Worlds that take seconds."""
