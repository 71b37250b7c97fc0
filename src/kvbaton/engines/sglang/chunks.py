"""Which tokens of a request the pages are that SGLang hands over, chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple


class Chunk(NamedTuple):
    """Tokens ``[first, last)`` of a request; ``first`` is the first of a page."""

    first: int
    last: int
    final: bool
    """Whether it is the last chunk."""


class Chunks:
    """The pages of one request at prefill: all after ``prefix`` tokens that decode has, in order."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.prefix = 0
        """Tokens that need not be sent: whole pages of this side."""
        self._pages = 0
        self._taken = 0

    def skip(self, prefix: int) -> int:
        """Leave out what decode has of the request, in whole pages of this side; returns those tokens."""
        self.prefix = prefix // self.page_size * self.page_size
        return self.prefix

    def begin(self, pages: int) -> None:
        """``pages`` are to come."""
        self._pages = pages
        self._taken = 0

    def take(self, pages: int, tokens: int | None) -> Chunk:
        """The next chunk: so many pages with so many tokens in them (None: as many as there is room for)."""
        first = self.prefix + self._taken * self.page_size
        self._taken += pages
        held = pages * self.page_size
        return Chunk(first, first + (held if tokens is None else min(tokens, held)), self._taken == self._pages)


def length(exact: int, offered: int, page_size: int) -> int:
    """How long the request is, for both sides.

    ``exact`` is what prefill knows, ``offered`` what decode said. A decode engine that only knows its pages counts them
    as full; then so does prefill, and what lies behind the last token goes along. Where the two do not fit together
    this is ``exact``, and kvbaton refuses the request.
    """
    padded = -(-exact // page_size) * page_size
    return offered if offered in (exact, padded) else exact
