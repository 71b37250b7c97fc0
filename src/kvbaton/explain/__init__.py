"""What a pair of topologies does: who sends what to whom, in which pieces, which way, or why it is refused."""

from kvbaton.explain.explain import Ranks, explain, explain_ranks, side_of
from kvbaton.explain.request import Request
from kvbaton.explain.result import Explanation

__all__ = ["Explanation", "Ranks", "Request", "explain", "explain_ranks", "side_of"]
