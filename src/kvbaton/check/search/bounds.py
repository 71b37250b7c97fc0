"""How large the world of a search is, and the worlds that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from kvbaton.errors import ConfigurationError


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
    aborts: bool = True
    """Whether engines abort, each room at any moment."""
    deadlines: bool = True
    """Whether any deadline passes at any moment: rooms without progress, parked Offers, what is remembered of rooms."""
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
            if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= 9:
                raise ConfigurationError(f"search: {field.name} is {value}; it must be from {least} to 9")
        if not self.rooms:
            raise ConfigurationError("search: rooms is empty; name the room number of each life")

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


WORLDS: Mapping[str, Bounds] = MappingProxyType({
    "calm": Bounds(rooms=(7, 7), chunks=2, aborts=False, deadlines=False, repeats=1),
})
"""The worlds that have a name, by it."""
