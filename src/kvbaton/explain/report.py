"""Everything that ``kvbaton plan`` can give out about two topology files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbaton.errors import ConfigurationError
from kvbaton.explain.explain import Ranks, check_pairs, explain_ranks, side_of
from kvbaton.explain.groups import pair_name
from kvbaton.explain.html import draw_html
from kvbaton.explain.page import view_pages
from kvbaton.explain.request import Request
from kvbaton.explain.result import Explanation
from kvbaton.explain.ribbons import draw
from kvbaton.topology import load_topology
from kvbaton.transport.executor import ExecutorOption


class Report(NamedTuple):
    """An explanation and what it was made from; each output is made when it is asked for."""

    explanation: Explanation
    source: Ranks
    destination: Ranks
    request: Request
    pair: tuple[int, int] | None
    """The pair whose bytes the page shows; None: the one that moves most pieces."""

    def json(self) -> str:
        """The explanation as JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self.explanation), indent=1).decode()

    def svg(self) -> str:
        """The picture."""
        return draw(self.explanation)

    def html(self) -> str:
        """The page."""
        chosen = self.pair
        if chosen is None and self.explanation.pairs:
            most = max(self.explanation.pairs, key=lambda pair: pair.pieces)
            chosen = most.source, most.destination
        if chosen is None:
            return draw_html(self.explanation)
        rules = {"striped": self.explanation.striped, "cast": self.explanation.cast}
        views = view_pages(self.source, self.destination, self.request, chosen, **rules)
        return draw_html(self.explanation, views, pair_name(self.explanation, *chosen))

    def print(self) -> None:
        """Print the tables; 100 columns where the output is no terminal."""
        from rich.console import Console

        from kvbaton.explain.table import print_tables

        console = Console()
        print_tables(self.explanation, console if console.is_terminal else Console(width=100))


def make(
    source: Path,
    destination: Path,
    request: Request,
    *,
    pair: str | None = None,
    timed: bool = False,
    executor: ExecutorOption = "auto",
) -> Report:
    """Read both files and explain them. ``pair`` is ``source:destination``, in numbers of ranks.

    ``executor`` is the option of that name of one-sided transports.

    Raises `ConfigurationError`, `ShardError` or `LayoutError`, each in one line that names the file or the component.
    """
    topologies = load_topology(source), load_topology(destination)
    if request.prefix > request.tokens:
        raise ConfigurationError(f"the prefix of {request.prefix} tokens is longer than the {request.tokens} tokens")
    check_pairs(topologies[0].ranks, topologies[1].ranks)
    sides = [side_of(topology, request) for topology in topologies]
    rules = {"striped": topologies[1].striped, "cast": topologies[1].cast}
    made = explain_ranks(sides[0], sides[1], request, **rules, timed=timed, executor=executor)
    return Report(made, sides[0], sides[1], request, None if pair is None else _pair(pair, made))


def write(path: Path, text: str) -> None:
    """Write ``text``; raises `ConfigurationError` where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from None


def _pair(words: str, explanation: Explanation) -> tuple[int, int]:
    known = [(pair.source, pair.destination) for pair in explanation.pairs]
    named = {f"{source}:{destination}": (source, destination) for source, destination in known}
    if words in named:
        return named[words]
    listed = ", ".join(f"{source}:{destination}" for source, destination in known[:8])
    raise ConfigurationError(f"--pair {words[:40]}: no such pair moves anything; those that do: {listed or 'none'}")
