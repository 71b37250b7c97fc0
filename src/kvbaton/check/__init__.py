"""The oracle: checks that layouts transfer correctly, for authors of engines.

`check_pair` checks two grids of your own; `check_layouts` checks many random ones (it needs the extra ``check``).
"""

from kvbaton.check.examples import Failure, Outcome, check_layouts
from kvbaton.check.explain import Problem
from kvbaton.check.layouts import Report, check_pair

__all__ = ["Failure", "Outcome", "Problem", "Report", "check_layouts", "check_pair"]
