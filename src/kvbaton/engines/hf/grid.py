"""How an engine's cache is spread over ranks: their sizes, who holds which layers and which tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvbaton.errors import ConfigurationError
from kvbaton.layout import Coords, Ownership

Order = Literal["NHD", "HND"]
"""Which axis of a page lies outside: the tokens or the heads."""


@dataclass(frozen=True)
class Grid:
    """The ranks of one engine, and how each of them lays its memory out.

    * ``tp`` ranks share the heads and the channels of convolutions; where there are fewer heads than ranks, several
      ranks hold the same one. What has no heads is whole on each of them.
    * ``pp`` stages share the layers, in contiguous runs. The aux table is on the last stage.
    * ``cp`` ranks share the tokens, ``cp_unit`` neighbours at a time: a page (page-sharded prefill) or 1 (decode
      context parallelism). An entry of compressed attention is never cut. States are whole on each of them.

    ``page_size`` is in tokens. With ``window_ring`` a request uses the rows of its sliding windows in turn.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_unit: int = 1
    page_size: int = 16
    order: Order = "NHD"
    window_ring: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "tp", "pp", "cp", "cp_unit"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.order not in get_args(Order):
            raise ConfigurationError(f"order is {self.order!r}; choose one of {', '.join(get_args(Order))}")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.pp * self.cp

    def coords(self, number: int) -> Coords:
        """Where rank ``number`` stands; ranks are numbered as the registry orders them: pp outermost, tp innermost."""
        rest, tp = divmod(number, self.tp)
        pp, cp = divmod(rest, self.cp)
        return Coords(tp=(tp, self.tp), pp=(pp, self.pp), cp=(cp, self.cp))

    def stage_of(self, layer: int, layers: int) -> int:
        """The stage that has ``layer`` of ``layers``."""
        return layer * self.pp // layers

    def owned(self, coords: Coords, ratio: int = 1) -> Ownership:
        """The tokens that a rank holds of a component with an entry for every ``ratio`` tokens."""
        rank, size = coords.cp
        return Ownership(math.lcm(self.cp_unit, ratio), size, rank) if size > 1 else Ownership()

    def chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        """The numbers of the ranks that this process holds: those of ``ranks``, or all of them.

        Raises `ConfigurationError` for numbers that are not in the grid, twice in the list, or none at all.
        """
        numbers = tuple(range(self.size) if ranks is None else ranks)
        outside = [number for number in numbers if number not in range(self.size)]
        if outside or not numbers or len(set(numbers)) < len(numbers):
            raise ConfigurationError(
                f"ranks is {list(numbers)}; list at least one of the {self.size} ranks (tp {self.tp} x pp {self.pp} x "
                f"cp {self.cp}), each once, from 0 to {self.size - 1}"
            )
        return numbers

    def check_layers(self, layers: int) -> None:
        """Raise `ConfigurationError` if there are more stages than layers."""
        if self.pp > layers:
            raise ConfigurationError(f"pp is {self.pp}, but the model has {layers} layers; choose at most {layers}")

    def component_page_size(self, rates: Iterable[int]) -> int:
        """The page size of a component, in tokens: so that entries of each of ``rates`` tokens are whole in a page."""
        return math.lcm(self.page_size, *rates)
