"""Kinds of components: how rows relate to the tokens of a request. A kind is data; no code asks for its name.

A component of a kind that holds tokens consists of *entries*, each of which stands for `Kind.ratio` neighbouring tokens
(one, in most caches). A row holds the entries of `Component.page_size` tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbaton.layout.limits import PageSize, Size


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """How the rows of a component relate to the tokens of a request.

    * ``per``: ``token`` if rows hold tokens, ``request`` if a row is one state of the whole request.
    * ``ratio``: tokens that an entry stands for; it exists once all of them are there (compressed attention).
    * ``window``: only the last so many tokens are needed (0: all of them).
    * ``tail``: only the tokens after the last multiple of this number are needed (0: all of them): those for which
      no compressed entry stands yet.
    * ``ring``: the rows of a request are used in turn. Page ``p`` lies in row ``p % rows``, so that the rows hold the
      last tokens only. One row for each request with ``page_size`` entries is a ring of that size.
    * ``reused``: whether a decode engine that has a prefix of the request already has it in this component too (the
      decode side's business alone).
    * ``aux``: small values that are sent last, over the control channel (``per`` request only).

    Both sides must agree on all of them but ``ring``, which says where entries are and not which, and ``reused``.
    """

    per: Literal["token", "request"] = "token"
    ratio: PageSize = 1
    window: Size = 0
    tail: PageSize = 0
    ring: bool = False
    reused: bool = True
    aux: bool = False

    def __str__(self) -> str:
        if self.per == "request":
            return "aux" if self.aux else "slot"
        words = [f"window of {self.window} tokens"] if self.window else []
        words += [f"tail after each {self.tail} tokens"] if self.tail else []
        words = words or ["paged"]
        words += [f"1 entry for {self.ratio} tokens"] if self.ratio > 1 else []
        words += ["in a ring"] if self.ring else []
        words += ["never reused"] if not self.reused else []
        return ", ".join(words)

    @property
    def has_tokens(self) -> bool:
        """Whether its rows hold tokens."""
        return self.per == "token"

    @property
    def content(self) -> Kind:
        """What both sides must agree on."""
        return msgspec.structs.replace(self, ring=False, reused=True)

    def needed(self, tokens: int, prefix: int = 0) -> tuple[int, int]:
        """The tokens ``[first, last)`` of a request of ``tokens`` tokens that a receiver with ``prefix`` tokens lacks.

        Empty for rows without tokens. An entry is needed if its last token is among them: see `has_entries`.
        """
        if not self.has_tokens:
            return tokens, tokens
        first = prefix if self.reused else 0
        if self.window:
            first = max(first, tokens - self.window)
        if self.tail:
            first = max(first, tokens // self.tail * self.tail)
        return min(first, tokens), tokens

    def has_entries(self, tokens: tuple[int, int]) -> bool:
        """Whether an entry ends within ``tokens`` (first, last)."""
        return tokens[0] // self.ratio < tokens[1] // self.ratio


PAGED = Kind()
"""Every token has a place in a page."""
SLOT = Kind(per="request")
"""A row is the state of a whole request: conv state, recurrent state, any other row of a request."""
AUX = Kind(per="request", aux=True)
"""As `SLOT`, but small, and sent last with the message that ends the transfer."""


def window(tokens: int) -> Kind:
    """Pages of which only those of the last ``tokens`` tokens are needed."""
    return Kind(window=tokens)


def ring(tokens: int) -> Kind:
    """The last ``tokens`` tokens in rows that a request uses in turn."""
    return Kind(window=tokens, ring=True, reused=False)


def compressed(ratio: int) -> Kind:
    """Pages with one entry for every ``ratio`` tokens."""
    return Kind(ratio=ratio)


def tail(tokens: int) -> Kind:
    """The tokens after the last multiple of ``tokens``, at their position modulo the size of a row of the request."""
    return Kind(tail=tokens, ring=True, reused=False)
