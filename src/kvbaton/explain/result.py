"""What an explanation says, as plain data: the schema of ``kvbaton plan --json``."""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes."""


class Runs(msgspec.Struct, frozen=True):
    """Contiguous runs of bytes: how many pieces, and the bytes of the shortest, the middle and the longest one."""

    pieces: int
    shortest: int
    median: int
    longest: int


class PartInfo(msgspec.Struct, frozen=True):
    """A block of the model: ``roles`` of ``layers``, the index spans ``(start, count)`` of each axis of ``block``.

    ``sizes`` are those of the axes in the whole model.

    Of the tokens that both ranks own, those with ``(token // unit) % modulus`` in ``remainders`` move. They count
    entries where an entry stands for several tokens.
    """

    roles: tuple[str, ...]
    layers: tuple[int, ...]
    block: dict[str, tuple[tuple[int, int], ...]]
    sizes: dict[str, int]
    unit: int
    modulus: int
    remainders: tuple[int, ...]


class Flow(msgspec.Struct, frozen=True):
    """What one pair of ranks moves of one component.

    ``first`` and ``last``: the tokens of the request that it needs (``first == last`` for rows without tokens).
    ``units``: rows, or equal parts of rows, that are addressed.
    """

    component: str
    nbytes: int
    units: int
    first: int
    last: int
    runs: Runs
    parts: tuple[PartInfo, ...]


class Pair(msgspec.Struct, frozen=True):
    """A pair of ranks that has something to move; ``source`` and ``destination`` are numbers of ranks.

    ``executor`` is ``mapped``, ``direct``, ``packed``, ``direct and packed`` or ``none``; ``why`` has its
    reason in words and numbers.
    """

    source: int
    destination: int
    nbytes: int
    pieces: int
    executor: str
    why: str
    flows: tuple[Flow, ...]


class Refusal(msgspec.Struct, frozen=True):
    """Why a destination is refused, in the words of the handshake. ``source`` is None where no single rank is why."""

    source: int | None
    destination: int
    error: str
    reason: str


class RankInfo(msgspec.Struct, frozen=True):
    """One rank. ``nbytes`` and ``pieces`` are what it sends (a source) or receives (a destination)."""

    number: int
    label: str
    coords: str
    components: tuple[str, ...]
    nbytes: int
    pieces: int
    peers: int


class Side(msgspec.Struct, frozen=True):
    """One side: its ranks, and how evenly they work: ``balance`` is the most bytes of a rank over the mean."""

    title: str
    model: str
    replicas: int
    ranks: tuple[RankInfo, ...]
    balance: float


class CastInfo(msgspec.Struct, frozen=True):
    """Elements that are cast on their way: ``roles`` of ``layers``, from the format ``source`` to ``destination``.

    ``relative`` bounds the error as a part of the value where that is within the range of the destination, and above
    the smallest numbers; ``bound`` has all of it in words.
    """

    roles: tuple[str, ...]
    layers: tuple[int, ...]
    source: str
    destination: str
    relative: float
    bound: str


class ComponentInfo(msgspec.Struct, frozen=True):
    """One component over all pairs. ``source_copies``: how many source ranks hold each element on average."""

    name: str
    kind: str
    nbytes: int
    runs: Runs
    source_copies: float
    destination_copies: float
    casts: tuple[CastInfo, ...] = ()


class Transport(msgspec.Struct, frozen=True):
    """The transport that both sides would settle on; ``name`` "" if they have none in common.

    ``available``: whether this release has it.
    """

    name: str
    available: bool
    source: tuple[str, ...]
    destination: tuple[str, ...]


class PlannerTime(msgspec.Struct, frozen=True):
    """Milliseconds that the planner took for all pairs together."""

    assign: float
    compile: float
    bind: float


class Explanation(msgspec.Struct, frozen=True):
    """What a pair of topologies does with one request.

    ``pages`` is ``shuffled`` or ``contiguous``. Bytes and pieces count one data-parallel replica of each side: a
    request lives on one.
    """

    schema: int
    tokens: int
    prefix: int
    pages: str
    striped: bool
    nbytes: int
    pieces: int
    source: Side
    destination: Side
    transport: Transport
    components: tuple[ComponentInfo, ...]
    pairs: tuple[Pair, ...]
    refusals: tuple[Refusal, ...]
    planner: PlannerTime | None = None
    cast: bool = False
    """Whether the destination allows casts."""

    @property
    def refused(self) -> bool:
        """Whether anything is."""
        return bool(self.refusals)
