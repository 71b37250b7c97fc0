"""How large tiles are and how many programs run: a small rule, from measurements on one H200 (docs/results/gpu.md)."""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    """How one kernel is launched.

    A tile moves up to ``move_bytes`` bytes in up to ``move_items`` vectors, or changes ``elements`` elements. A program
    has ``warps`` warps, and ``programs`` of them share a multiprocessor.
    """

    move_bytes: int = 4096
    move_items: int = 512
    elements: int = 1024
    warps: int = 2
    programs: int = 1 << 16


WHOLE = Configuration()
"""For all multiprocessors: a program for each tile. Programs that take tile after tile were up to 8 % slower."""
LIMITED = Configuration(move_bytes=131072, move_items=8192, elements=8192, warps=16, programs=1)
"""For a few of them: each has one program, with as much under way as it holds. Two small ones would spread over two
multiprocessors."""
