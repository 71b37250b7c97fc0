"""Digests of one side of a transfer: of what a prefill rank sends, and of what is in place at a decode rank.

Both sides walk the same pieces of the same plan, each in its own rows, so that only a number by component must travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton import copy
from kvbaton.errors import ConfigurationError, DigestMismatch
from kvbaton.layout import RankLayout
from kvbaton.memory import Region
from kvbaton.plan import Half, Pages, PairPlan
from kvbaton.plan.boxes import Int64s
from kvbaton.plan.half import Side
from kvbaton.protocol import Done, Rows, rows_from_bytes
from kvbaton.protocol.failures import Failure
from kvbaton.runtime.context import Context

Digests = Mapping[str, int]
"""By component, modulo 2**64. One that is missing is 0: that of no bytes."""

MODULUS = 1 << 64
THREADS = 2
"""Of one digest; the kernel takes them for a MiB and more."""
TOKENS_AT_A_TIME = 1 << 16
"""It bounds the arrays of units to a few MiB."""

Ranges = tuple[tuple[int, int], ...]


def check_memory(regions: Sequence[Region]) -> None:
    """Raise `ConfigurationError` where digests cannot be made: memory of a device."""
    for index, region in enumerate(regions):
        if region.kind != "host":
            raise ConfigurationError(
                f"region {index} is memory of kind {region.kind!r}, and digests are made of host memory only: "
                "turn digests off (Settings(digest=False), receiver(digest=False))"
            )


@dataclass(frozen=True)
class Portion:
    """What a digest is of: tokens by component with the rows that hold them, and rows of components without tokens."""

    plan: PairPlan
    side: Side
    tokens: Mapping[str, tuple[Ranges, Pages]] = field(default_factory=dict)
    rows: Mapping[str, Int64s] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """At most so many bytes."""
        paged = sum(
            self.plan.bytes_per_token(name) * sum(last - first for first, last in ranges)
            for name, (ranges, _) in self.tokens.items()
        )
        return paged + sum(self.plan.bytes_per_row(name) * len(rows) for name, rows in self.rows.items())

    def halves(self) -> Iterator[tuple[str, Half]]:
        """All pieces, by component. Raises `RowsError` for rows that do not hold the tokens."""
        for name, (ranges, pages) in self.tokens.items():
            for first, last in ranges:
                for begin in range(first, last, TOKENS_AT_A_TIME):
                    end = min(begin + TOKENS_AT_A_TIME, last)
                    for half in self.plan.halves(name, self.side, (begin, end), pages):
                        yield name, half
        for name, rows in self.rows.items():
            for half in self.plan.slot_halves(name, self.side, rows):
                yield name, half


def digests_of(context: Context, portion: Portion) -> Digests:
    """The digests of ``portion``, which lies in this rank's memory. Reads all of it.

    Raises `RowsError` for rows that do not hold it, and `ConfigurationError` for memory of a device.
    """
    check_memory(context.regions)
    sums: dict[str, int] = {}
    for name, half in portion.halves():
        sums[name] = (sums.get(name, 0) + _digest(context, half)) % MODULUS
    return sums


def aux_digests(context: Context, plan: PairPlan, packed: bytes) -> Digests:
    """The digests of aux data as they travel inside a Done: what `pack_aux` made."""
    sums: dict[str, int] = {}
    at = 0
    for name in aux_components(context.layout, plan):
        for half in plan.slot_halves(name, "destination", [0]):
            part, at = packed[at : at + half.nbytes], at + half.nbytes
            sums[name] = (sums.get(name, 0) + copy.digest_packed(half, part)) % MODULUS
    return sums


def aux_portion(layout: RankLayout, plan: PairPlan, side: Side, row: int) -> Portion:
    """The aux data of one row."""
    return Portion(plan, side, {}, {name: np.array([row], np.int64) for name in aux_components(layout, plan)})


def landed_portion(
    layout: RankLayout, plan: PairPlan, components: Mapping[str, Rows], tokens: int, prefix: int, aux: int | None
) -> Portion:
    """What a part puts in place of an offer; ``aux`` is the row that the transport wrote, None if it did not."""
    paged: dict[str, tuple[Ranges, Pages]] = {}
    rows = {} if aux is None else dict(aux_portion(layout, plan, "destination", aux).rows)
    for name in plan.components:
        kind, offered = layout.component(name).kind, components.get(name)
        if offered is None or not offered.rows:
            continue
        if kind.has_tokens:
            paged[name] = (kind.needed(tokens, prefix),), Pages(rows_from_bytes(offered.rows), offered.start)
        else:
            rows[name] = rows_from_bytes(offered.rows)
    return Portion(plan, "destination", paged, rows)


def compare(found: Digests, done: Done) -> Failure | None:
    """What is wrong with what is in place, by what its sender says of it; None if nothing is."""
    sent = {name: int.from_bytes(value, "little") for name, value in done.digests.items()}
    wrong = [name for name in {**found, **sent} if found.get(name, 0) != sent.get(name, 0)]
    if not wrong:
        return None
    name = wrong[0]
    others = f" (so have {', '.join(wrong[1:])})" if wrong[1:] else ""
    return Failure(
        DigestMismatch,
        f"component {name}: the bytes in place have the digest {found.get(name, 0):016x}, those that were sent "
        f"{sent.get(name, 0):016x}{others}: they changed on their way, or rows were written by somebody else on one "
        "of the two sides before the room had ended",
    )


def as_sent(digests: Digests) -> dict[str, bytes]:
    """Digests as they travel in a Done."""
    return {name: value.to_bytes(8, "little") for name, value in digests.items()}


def aux_components(layout: RankLayout, plan: PairPlan) -> list[str]:
    """The aux components in which ``plan`` moves something, in the order in which they are packed."""
    return [each.name for each in layout.components if each.kind.aux and each.name in plan.components]


def _digest(context: Context, half: Half) -> int:
    return copy.digest_half(half, context.bases(), context.region_bytes(), threads=THREADS)
