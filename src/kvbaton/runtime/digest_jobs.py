"""When digests are made: small ones at once, large ones in the background, where they hold up nobody."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvbaton.copy import NATIVE
from kvbaton.plan import Pages, PairPlan
from kvbaton.protocol import StartWrite
from kvbaton.runtime.context import Context
from kvbaton.runtime.digests import MODULUS, Digests, Portion, Ranges, aux_portion, digests_of
from kvbaton.transport.base import Completion

logger = logging.getLogger(__name__)

AT_ONCE_BYTES = 128 << 10 if NATIVE else 2 << 10
"""What is made on the control thread: it takes as long as a message or two."""
AT_A_TIME = 2
"""Digests in the background: some of its threads stay free for handshakes."""

Made = Callable[[Digests | Exception], None]


class DigestJobs:
    """Makes digests of this rank's memory. Everything is called, and answers, on the control thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: deque[tuple[Callable[[], Digests], Made]] = deque()
        self._under_way = 0
        self._starting = False

    def __len__(self) -> int:
        return self._under_way + len(self._waiting)

    def make(self, portion: Portion, made: Made, known: Digests | None = None) -> None:
        """Call ``made`` with the digests of ``portion`` and those that are ``known`` already, of other components.

        Or with the error because of which they cannot be had. Perhaps before this returns.
        """
        work = partial(_make, self._context, portion, known or {})
        if portion.nbytes > AT_ONCE_BYTES:
            self._waiting.append((work, made))
            self._next()
            return
        try:
            result: Digests | Exception = work()
        except Exception as error:
            result = error
        made(result)

    def _next(self) -> None:
        if self._starting:
            return
        self._starting = True
        while self._waiting and self._under_way < AT_A_TIME:
            work, made = self._waiting.popleft()
            ended = partial(self._ended, made)
            self._under_way += 1
            self._context.in_background(work, ended, ended)
        self._starting = False

    def _ended(self, made: Made, result: Digests | Exception) -> None:
        self._under_way -= 1
        try:
            made(result)
        except Exception:
            # Raised here, it would be taken for an error of the work, which has ended once already.
            logger.exception("a digest was made, and its result could not be taken in")
        self._next()


@dataclass
class Sent:
    """The digests of what was sent to one decode rank of one room, so far."""

    sums: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Tokens of each component that are in the sums, or will be."""

    def add(self, digests: Digests) -> None:
        """Take in the digests of more bytes."""
        for name, value in digests.items():
            self.sums[name] = (self.sums.get(name, 0) + value) % MODULUS

    def fresh(self, component: str, tokens: tuple[int, int]) -> Ranges:
        """Which of ``tokens`` were not asked for before: two chunks may hold the same ones, and they count once."""
        seen = self._seen.setdefault(component, [])
        found, at = [], tokens[0]
        for first, last in seen:
            if at < first and at < tokens[1]:
                found.append((at, min(first, tokens[1])))
            at = max(at, last)
        if at < tokens[1]:
            found.append((at, tokens[1]))
        self._seen[component] = _merged([*seen, tokens])
        return tuple(found)


class WriteDigests:
    """The digests of writes. A write counts as ended when its digest is made too: its rows are read until then.

    ``written`` takes the completions that had to wait for that.
    """

    def __init__(self, context: Context, written: Callable[[Completion], None]) -> None:
        self._context = context
        self._jobs = DigestJobs(context)
        self._written = written
        self._under_way: set[int] = set()
        self._waiting: dict[int, Completion] = {}
        self._errors: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._under_way) + len(self._errors)

    def start(
        self, action: StartWrite, plan: PairPlan, chunk: Mapping[str, Pages], sent: Sent, aux: int | None
    ) -> None:
        """Make the digests of a write that was started, and add them to ``sent``. Never raises."""
        self._under_way.add(action.ticket)
        made = partial(self._made, action.ticket, sent)
        try:
            rows = {name: chunk[name].rows for name in action.slots}
            if aux is not None:
                rows |= aux_portion(self._context.layout, plan, "source", aux).rows
            tokens = {name: (sent.fresh(name, piece), chunk[name]) for name, piece in action.pieces.items()}
            portion = Portion(plan, "source", tokens, rows)
            self._jobs.make(portion, made)
        except Exception as error:
            made(error)

    def holds(self, completion: Completion) -> bool:
        """Whether the end of a write has to wait for its digest; it comes again by itself."""
        waits = completion.ticket in self._under_way
        if waits:
            self._waiting[completion.ticket] = completion
        return waits

    def error(self, ticket: int) -> str:
        """Why the digest of an ended write could not be made; empty if it was. Forgotten with that."""
        return self._errors.pop(ticket, "")

    def _made(self, ticket: int, sent: Sent, result: Digests | Exception) -> None:
        self._under_way.discard(ticket)
        if isinstance(result, Exception):
            self._errors[ticket] = f"its digest could not be made: {result}"
        else:
            sent.add(result)
        completion = self._waiting.pop(ticket, None)
        if completion is not None:
            self._written(completion)


def _make(context: Context, portion: Portion, known: Digests) -> Digests:
    return {**digests_of(context, portion), **known}


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
