"""The connections between one prefill and one decode rank: frames under way, and what each end knows of its loss."""

from __future__ import annotations

from typing import NamedTuple

JOINED, LOST, FENCED, DEAD = "joined", "lost", "fenced", "dead"
"""What an end of a connection knows: nothing; that it has ended; that no write lands any more. Or it is dead."""


class Link(NamedTuple):
    """One connection. Frames arrive in any order; they are lost only with the connection."""

    number: int
    up: bool = True
    prefill: str = JOINED
    decode: str = JOINED
    to_prefill: tuple[bytes, ...] = ()
    to_decode: tuple[bytes, ...] = ()
    orphans: tuple[int, ...] = ()
    """Lives whose rows writes of a dead prefill process may still reach."""

    @property
    def is_over(self) -> bool:
        """Whether neither end has anything to do with it any more."""
        return self.prefill != JOINED and self.decode in (FENCED, DEAD)

    def with_frame(self, frame: bytes, to_prefill: bool) -> Link:
        """With a frame more, if it can arrive."""
        if not self.up:
            return self
        if to_prefill:
            return self._replace(to_prefill=tuple(sorted((*self.to_prefill, frame))))
        return self._replace(to_decode=tuple(sorted((*self.to_decode, frame))))

    def without_frame(self, frame: bytes, to_prefill: bool) -> Link:
        """With that frame once less."""
        frames = list(self.to_prefill if to_prefill else self.to_decode)
        frames.remove(frame)
        return self._replace(to_prefill=tuple(frames)) if to_prefill else self._replace(to_decode=tuple(frames))

    def with_prefill(self, knows: str) -> Link:
        """The prefill end has noticed, or is dead: nothing arrives there any more."""
        return self._replace(up=False, prefill=knows, to_prefill=())

    def with_decode(self, knows: str) -> Link:
        """The decode end has noticed, has fenced its peer, or is dead: nothing arrives there any more."""
        orphans = self.orphans if knows == LOST else ()
        return self._replace(up=False, decode=knows, to_decode=(), orphans=orphans)


class Channel(NamedTuple):
    """All connections of one pair that are not over, oldest first, and how many there were."""

    opened: int = 0
    links: tuple[Link, ...] = ()

    def link(self, number: int) -> Link | None:
        """The connection of that number, unless it is over."""
        for link in self.links:
            if link.number == number:
                return link
        return None

    def with_link(self, changed: Link) -> Channel:
        """With ``changed`` in its place."""
        links = tuple(changed if link.number == changed.number else link for link in self.links)
        return Channel(self.opened, tuple(link for link in links if not link.is_over))

    def joined(self) -> Channel:
        """With a new connection."""
        return Channel(self.opened + 1, (*self.links, Link(self.opened + 1)))
