"""The planner: what must move between two ranks, and as which boxes. Pure functions on layouts and row indices."""

from kvbaton.plan.assign import assign
from kvbaton.plan.boxes import SHAPE_COLUMNS, SIDE_COLUMNS, Boxes, Int64s, Transfer
from kvbaton.plan.compile import compile_pair
from kvbaton.plan.group import Runs, group_rows
from kvbaton.plan.half import Half
from kvbaton.plan.pages import Pages
from kvbaton.plan.pair import PairPlan
from kvbaton.plan.share import EVERY_TOKEN, Part, Share, TokenClasses

__all__ = [
    "EVERY_TOKEN",
    "SHAPE_COLUMNS",
    "SIDE_COLUMNS",
    "Boxes",
    "Half",
    "Int64s",
    "Pages",
    "PairPlan",
    "Part",
    "Runs",
    "Share",
    "TokenClasses",
    "Transfer",
    "assign",
    "compile_pair",
    "group_rows",
]
