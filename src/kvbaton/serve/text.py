"""From token ids to text, piece by piece: incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_PATIENCE = 8


class Detokenizer:
    """Turns token ids into text as they come.

    Text is given out when it can no longer change: a character whose bytes are spread over tokens waits for its last
    one (but not for ever: bytes that never make a character are given out after some calls). Each call decodes only
    the tokens since the last two pieces, so the cost does not grow with the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._context = 0
        self._context_text = ""
        self._held_calls = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Take tokens in and return the text that became certain."""
        self._pending += token_ids
        text = self._decode(self._pending)
        self._held_calls += 1
        if text.endswith(_INCOMPLETE) and self._held_calls <= _PATIENCE:
            return ""
        return self._give(text)

    def finish(self) -> str:
        """Return what is left, complete or not."""
        return self._give(self._decode(self._pending)) if len(self._pending) > self._context else ""

    def _give(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._held_calls = 0
        # The last piece stays as context: whether a word begins with a space is known only from what is before it.
        self._pending = self._pending[self._context :]
        self._context = len(self._pending)
        self._context_text = self._decode(self._pending)
        return new


class StopStrings:
    """Finds the first of some strings in a text that grows, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certainly not part of a stop string, and the stop string that was found, if any."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            free, self._held = self._held[:at], ""
            return free, stop
        keep = next((n for n in range(min(self._longest - 1, len(self._held)), 0, -1) if self._may_begin(n)), 0)
        cut = len(self._held) - keep
        free, self._held = self._held[:cut], self._held[cut:]
        return free, None

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, length: int) -> bool:
        tail = self._held[-length:]
        return any(stop.startswith(tail) for stop in self._stops if len(stop) > length)
