"""What one source rank sends of what one destination rank needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvbaton.layout import Span


class TokenClasses(NamedTuple):
    """The tokens ``t`` with ``(t // unit) % modulus`` in ``remainders`` (ascending). The default is every token."""

    unit: int = 1
    modulus: int = 1
    remainders: tuple[int, ...] = (0,)


EVERY_TOKEN = TokenClasses()


class Part(NamedTuple):
    """One block of global indices: the same in each of ``layers``.

    ``block`` gives intervals of global indices for every axis but the token axis: all their combinations. ``tokens``
    says which tokens, of those that both ranks own (always every one for rows without tokens).
    """

    component: str
    role: str
    layers: tuple[int, ...]
    block: tuple[tuple[str, tuple[Span, ...]], ...]
    tokens: TokenClasses


@dataclass(frozen=True, slots=True)
class Share:
    """All the parts that one source rank sends to one destination rank."""

    parts: tuple[Part, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the source sends nothing at all to this destination."""
        return not self.parts

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components of which something is sent."""
        return tuple(dict.fromkeys(part.component for part in self.parts))
